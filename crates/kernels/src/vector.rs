//! Element-wise operations.

use crate::Exec;
use crate::isa::multiversion;
use crate::math;
use crate::shape::{self, ShapeError, expect_len};

/// `x[i] ← x[i] + y[i]`. Errors: [`ShapeError`] if the lengths differ.
pub fn add(exec: &Exec, x: &mut [f32], y: &[f32]) -> Result<(), ShapeError> {
    expect_len("add: second operand", x.len(), y.len())?;
    add_all(exec.isa, x, y);
    Ok(())
}

/// `x[t, i] ← x[t, i] + bias[i]`. Errors: [`ShapeError`] if `x` isn't whole rows.
pub fn add_bias(exec: &Exec, x: &mut [f32], bias: &[f32]) -> Result<(), ShapeError> {
    shape::rows("add bias: input", x.len(), bias.len())?;
    for row in x.chunks_exact_mut(bias.len().max(1)) {
        add_all(exec.isa, row, bias);
    }
    Ok(())
}

/// `x[i] ← x[i] · factor`.
pub fn scale(exec: &Exec, x: &mut [f32], factor: f32) {
    scale_all(exec.isa, x, factor);
}

/// `x[i] ← cap · tanh(x[i] / cap)`: bounds values by `±cap`.
pub fn softcap(exec: &Exec, x: &mut [f32], cap: f32) {
    softcap_all(exec.isa, x, cap);
}

multiversion! {
    fn add_all(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

multiversion! {
    fn scale_all(x: &mut [f32], factor: f32) {
        for x in x {
            *x *= factor;
        }
    }
}

multiversion! {
    pub(crate) fn softcap_all(x: &mut [f32], cap: f32) {
        for x in x {
            *x = cap * math::tanh(*x / cap);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_scales_and_caps() {
        let exec = Exec::new(1, crate::Isa::detect());
        let mut x = [1.0, 2.0, 3.0, 4.0];
        add(&exec, &mut x, &[1.0; 4]).unwrap();
        add_bias(&exec, &mut x, &[10.0, 20.0]).unwrap();
        assert_eq!(x, [12.0, 23.0, 14.0, 25.0]);
        scale(&exec, &mut x, 0.5);
        assert_eq!(x, [6.0, 11.5, 7.0, 12.5]);
        softcap(&exec, &mut x, 5.0);
        for (x, want) in x.iter().zip([6.0f64, 11.5, 7.0, 12.5]) {
            assert!((f64::from(*x) - 5.0 * (want / 5.0).tanh()).abs() < 1e-5);
        }
        assert!(add(&exec, &mut x, &[0.0; 3]).is_err());
        assert!(add_bias(&exec, &mut x, &[0.0; 3]).is_err());
    }
}
