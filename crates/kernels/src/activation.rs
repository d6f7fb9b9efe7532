//! Activation functions, of gated feed-forward blocks and alone.

pub use sterna_format::model::Activation;

use crate::isa::multiversion;
use crate::math;
use crate::pool::SharedSlice;
use crate::shape::{ShapeError, expect_len};
use crate::{Exec, Isa};

/// Elements per task.
const ELEMENTS_PER_TASK: usize = 8192;

/// `gate[i] ← activation(gate[i]) · up[i]`, for [`Activation::ClampedSwiglu`] as that says.
///
/// Errors: [`ShapeError`] if the lengths differ.
pub fn gate(
    exec: &Exec,
    activation: Activation,
    gate: &mut [f32],
    up: &[f32],
) -> Result<(), ShapeError> {
    expect_len("gate: up projection", gate.len(), up.len())?;
    let shared = SharedSlice::new(gate);
    exec.pool.for_ranges(up.len(), ELEMENTS_PER_TASK, |range| {
        let up = &up[range.clone()];
        // SAFETY: ranges of different tasks don't overlap.
        let gate = unsafe { shared.range_mut(range) };
        gate_by(exec.isa, activation, gate, up);
    });
    Ok(())
}

pub(crate) fn gate_by(isa: Isa, activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Silu => silu(isa, gate, up),
        Activation::Relu2 => relu2(isa, gate, up),
        Activation::Relu => relu(isa, gate, up),
        Activation::GeluTanh => gelu_tanh(isa, gate, up),
        Activation::GeluErf => gelu_erf(isa, gate, up),
        Activation::ClampedSwiglu => clamped_swiglu(isa, gate, up),
    }
}

/// A function of single values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e^−x)`.
    Sigmoid,
    /// An activation, of a gate for 1.
    Activation(Activation),
}

/// `x[i] ← function(x[i])`.
pub fn apply(exec: &Exec, function: Function, x: &mut [f32]) {
    const ONES: [f32; 256] = [1.0; 256];
    let n = x.len();
    let shared = SharedSlice::new(x);
    exec.pool.for_ranges(n, ELEMENTS_PER_TASK, |range| {
        // SAFETY: ranges of different tasks don't overlap.
        let x = unsafe { shared.range_mut(range) };
        match function {
            Function::Tanh => tanh(exec.isa, x),
            Function::Sigmoid => sigmoid(exec.isa, x),
            Function::Activation(activation) => {
                for x in x.chunks_mut(ONES.len()) {
                    gate_by(exec.isa, activation, x, &ONES[..x.len()]);
                }
            }
        }
    });
}

multiversion! {
    fn tanh(x: &mut [f32]) {
        for x in x {
            *x = math::tanh(*x);
        }
    }
}

multiversion! {
    fn sigmoid(x: &mut [f32]) {
        for x in x {
            *x = math::sigmoid(*x);
        }
    }
}

multiversion! {
    pub(crate) fn silu(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = math::silu(*g) * u;
        }
    }
}

multiversion! {
    fn relu2(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            let r = g.max(0.0);
            *g = r * r * u;
        }
    }
}

multiversion! {
    fn relu(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            *g = g.max(0.0) * u;
        }
    }
}

multiversion! {
    fn gelu_tanh(gate: &mut [f32], up: &[f32]) {
        // √(2/π)
        const C: f32 = 0.797_884_6;
        for (g, u) in gate.iter_mut().zip(up) {
            let x = *g;
            *g = 0.5 * x * (1.0 + math::tanh(C * (x + 0.044_715 * x * x * x))) * u;
        }
    }
}

multiversion! {
    fn gelu_erf(gate: &mut [f32], up: &[f32]) {
        for (g, u) in gate.iter_mut().zip(up) {
            let x = *g;
            *g = 0.5 * x * (1.0 + math::erf(x * std::f32::consts::FRAC_1_SQRT_2)) * u;
        }
    }
}

multiversion! {
    fn clamped_swiglu(gate: &mut [f32], up: &[f32]) {
        use Activation as A;
        for (g, u) in gate.iter_mut().zip(up) {
            let x = if *g > A::CLAMP { A::CLAMP } else { *g };
            let u = u.clamp(-A::CLAMP, A::CLAMP);
            *g = x * math::sigmoid(A::CLAMPED_SLOPE * x) * (u + 1.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::exec_matrix;

    #[test]
    fn matches_known_values_on_every_path() {
        // Values at -2, -0.5, 0, 1 and 3 to six digits.
        let cases = [
            (
                Activation::Silu,
                [-0.238406, -0.188770, 0.0, 0.731059, 2.857722],
            ),
            (Activation::Relu2, [0.0, 0.0, 0.0, 1.0, 9.0]),
            (Activation::Relu, [0.0, 0.0, 0.0, 1.0, 3.0]),
            (
                Activation::GeluTanh,
                [-0.045402, -0.154286, 0.0, 0.841192, 2.996363],
            ),
            (
                Activation::GeluErf,
                [-0.045500, -0.154269, 0.0, 0.841345, 2.99595],
            ),
            // Twice the gate: what it is multiplied with is 1.
            (
                Activation::ClampedSwiglu,
                [-0.128683, -0.299223, 0.0, 1.691592, 5.963857],
            ),
        ];
        for exec in exec_matrix() {
            for (activation, want) in cases {
                let mut x = [-2.0, -0.5, 0.0, 1.0, 3.0];
                gate(&exec, activation, &mut x, &[1.0; 5]).unwrap();
                for (got, want) in x.iter().zip(want) {
                    assert!(
                        (got - want).abs() < 2e-6,
                        "{activation:?}: {got}, not {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn functions_of_single_values() {
        for exec in exec_matrix() {
            for n in [5, 300] {
                let values: Vec<f32> = (0..n).map(|i| i as f32 / 50.0 - 2.0).collect();
                let of = |function| {
                    let mut x = values.clone();
                    apply(&exec, function, &mut x);
                    x
                };
                for (i, x) in values.iter().map(|&x| f64::from(x)).enumerate() {
                    let tanh = f64::from(of(Function::Tanh)[i]);
                    assert!((tanh - x.tanh()).abs() < 1e-6);
                    let sigmoid = f64::from(of(Function::Sigmoid)[i]);
                    assert!((sigmoid - 1.0 / (1.0 + (-x).exp())).abs() < 1e-6);
                    let relu2 = f64::from(of(Function::Activation(Activation::Relu2))[i]);
                    assert!((relu2 - x.max(0.0).powi(2)).abs() < 1e-6);
                }
            }
        }
    }

    #[test]
    fn both_factors_are_clamped() {
        let cases = [
            (9.0, 9.0, 7.0 * 8.0),
            (9.0, -9.0, 7.0 * -6.0),
            (-90.0, 3.0, 0.0),
        ];
        for exec in exec_matrix() {
            for (x, up, want) in cases {
                let mut x = [x];
                gate(&exec, Activation::ClampedSwiglu, &mut x, &[up]).unwrap();
                assert!((x[0] - want).abs() < 1e-3, "{}, not {want}", x[0]);
            }
        }
    }

    #[test]
    fn large_inputs_stay_finite() {
        let exec = Exec::new(1, crate::Isa::SCALAR);
        for activation in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
            let mut x = [-1e4, 1e4];
            gate(&exec, activation, &mut x, &[1.0; 2]).unwrap();
            assert_eq!(x, [0.0, 1e4], "{activation:?}");
        }
        assert!(gate(&exec, Activation::Silu, &mut [0.0; 2], &[0.0; 3]).is_err());
    }
}
