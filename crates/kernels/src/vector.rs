//! Element-wise operations.

use crate::Exec;
use crate::isa::multiversion;
use crate::math;
use crate::shape::{self, ShapeError, expect_len};

/// `x[i] ← x[i] + y[i]`. Errors: [`ShapeError`] if the lengths differ.
pub fn add(exec: &Exec, x: &mut [f32], y: &[f32]) -> Result<(), ShapeError> {
    expect_len("add: second operand", x.len(), y.len())?;
    exec.for_rows(x, 1, |first, x| add_all(exec.isa, x, &y[first..]));
    Ok(())
}

/// `x[t, i] ← x[t, i] + bias[i]`. Errors: [`ShapeError`] if `x` isn't whole rows.
pub fn add_bias(exec: &Exec, x: &mut [f32], bias: &[f32]) -> Result<(), ShapeError> {
    shape::rows("add bias: input", x.len(), bias.len())?;
    exec.for_rows(x, bias.len(), |_, x| {
        for row in x.chunks_exact_mut(bias.len().max(1)) {
            add_all(exec.isa, row, bias);
        }
    });
    Ok(())
}

/// `x[i] ← x[i] · factor`.
pub fn scale(exec: &Exec, x: &mut [f32], factor: f32) {
    exec.for_rows(x, 1, |_, x| scale_all(exec.isa, x, factor));
}

/// `x[t, i] ← x[t, i] + sigmoid(gate[t]) · y[t, i]`, with a row for each gate.
///
/// Errors: [`ShapeError`] if the lengths of `x` and `y` differ or they aren't whole rows.
pub fn add_gated(exec: &Exec, x: &mut [f32], y: &[f32], gate: &[f32]) -> Result<(), ShapeError> {
    expect_len("add: second operand", x.len(), y.len())?;
    let width = x.len().checked_div(gate.len()).unwrap_or(0);
    expect_len("add: gates", width * gate.len(), x.len())?;
    exec.for_rows(x, width, |first, x| {
        let rows = x
            .chunks_exact_mut(width)
            .zip(y[first..].chunks_exact(width));
        for ((x, y), gate) in rows.zip(&gate[first / width..]) {
            add_scaled(exec.isa, x, y, math::sigmoid(*gate));
        }
    });
    Ok(())
}

/// `x[i] ← x[i] · sigmoid(gate[i])`. Errors: [`ShapeError`] if the lengths differ.
pub fn gate(exec: &Exec, x: &mut [f32], gate: &[f32]) -> Result<(), ShapeError> {
    expect_len("gate: gates", x.len(), gate.len())?;
    exec.for_rows(x, 1, |first, x| gate_all(exec.isa, x, &gate[first..]));
    Ok(())
}

/// `x[i] ← x[i] · y[i]`. Errors: [`ShapeError`] if the lengths differ.
pub fn multiply(exec: &Exec, x: &mut [f32], y: &[f32]) -> Result<(), ShapeError> {
    expect_len("multiply: second operand", x.len(), y.len())?;
    exec.for_rows(x, 1, |first, x| multiply_all(exec.isa, x, &y[first..]));
    Ok(())
}

/// `x[i] ← x[i] + sigmoid(share[i]) · (y[i] − x[i])`. Errors: [`ShapeError`] if lengths differ.
pub fn blend(exec: &Exec, x: &mut [f32], y: &[f32], share: &[f32]) -> Result<(), ShapeError> {
    expect_len("blend: second operand", x.len(), y.len())?;
    expect_len("blend: shares", x.len(), share.len())?;
    exec.for_rows(x, 1, |first, x| {
        blend_all(exec.isa, x, &y[first..], &share[first..]);
    });
    Ok(())
}

/// Moves every second run of `len` elements of `x` to `seconds`, and the others together.
///
/// Errors: [`ShapeError`] if `x` isn't pairs of runs.
pub fn split_runs(len: usize, x: &mut Vec<f32>, seconds: &mut Vec<f32>) -> Result<(), ShapeError> {
    let n = shape::rows("split: pairs of runs", x.len(), 2 * len)?;
    seconds.clear();
    for i in 0..n {
        let first = 2 * i * len;
        seconds.extend_from_slice(&x[first + len..first + 2 * len]);
        x.copy_within(first..first + len, i * len);
    }
    x.truncate(n * len);
    Ok(())
}

/// `x[i] ← cap · tanh(x[i] / cap)`: bounds values by `±cap`.
pub fn softcap(exec: &Exec, x: &mut [f32], cap: f32) {
    exec.for_rows(x, 1, |_, x| softcap_all(exec.isa, x, cap));
}

multiversion! {
    pub(crate) fn add_all(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += y;
        }
    }
}

multiversion! {
    fn add_scaled(x: &mut [f32], y: &[f32], factor: f32) {
        for (x, y) in x.iter_mut().zip(y) {
            *x += factor * y;
        }
    }
}

multiversion! {
    fn gate_all(x: &mut [f32], gate: &[f32]) {
        for (x, gate) in x.iter_mut().zip(gate) {
            *x *= math::sigmoid(*gate);
        }
    }
}

multiversion! {
    fn multiply_all(x: &mut [f32], y: &[f32]) {
        for (x, y) in x.iter_mut().zip(y) {
            *x *= y;
        }
    }
}

multiversion! {
    fn blend_all(x: &mut [f32], y: &[f32], share: &[f32]) {
        for ((x, y), share) in x.iter_mut().zip(y).zip(share) {
            *x += math::sigmoid(*share) * (y - *x);
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
        let mut x = [1.0, 2.0, 3.0, 4.0];
        multiply(&exec, &mut x, &[2.0, 3.0, 4.0, 5.0]).unwrap();
        assert_eq!(x, [2.0, 6.0, 12.0, 20.0]);
        blend(&exec, &mut x, &[4.0; 4], &[0.0, 100.0, -100.0, 0.0]).unwrap();
        assert_eq!(x, [3.0, 4.0, 12.0, 12.0]);
        assert!(multiply(&exec, &mut x, &[0.0; 3]).is_err());
        assert!(blend(&exec, &mut x, &[0.0; 4], &[0.0; 3]).is_err());
        assert!(blend(&exec, &mut x, &[0.0; 3], &[0.0; 4]).is_err());
        assert!(add(&exec, &mut x, &[0.0; 3]).is_err());
        assert!(add_bias(&exec, &mut x, &[0.0; 3]).is_err());
    }

    #[test]
    fn gates_runs_and_rows() {
        let exec = Exec::new(1, crate::Isa::detect());
        let mut x: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let mut seconds = vec![9.0];
        split_runs(3, &mut x, &mut seconds).unwrap();
        assert_eq!(x, [0.0, 1.0, 2.0, 6.0, 7.0, 8.0]);
        assert_eq!(seconds, [3.0, 4.0, 5.0, 9.0, 10.0, 11.0]);
        assert!(split_runs(4, &mut x, &mut seconds).is_err());
        assert!(split_runs(0, &mut x, &mut seconds).is_err());

        let sigmoid = |x: f32| 1.0 / (1.0 + f64::from(-x).exp());
        let mut y = x.clone();
        gate(&exec, &mut y, &seconds).unwrap();
        for ((y, x), gate) in y.iter().zip(&x).zip(&seconds) {
            assert!((f64::from(*y) - f64::from(*x) * sigmoid(*gate)).abs() < 1e-6);
        }
        assert!(gate(&exec, &mut y, &seconds[1..]).is_err());

        let mut sum = vec![1.0; 6];
        add_gated(&exec, &mut sum, &x, &[0.0, -1.0]).unwrap();
        for (i, (sum, x)) in sum.iter().zip(&x).enumerate() {
            let factor = [0.5, sigmoid(-1.0)][i / 3];
            assert!((f64::from(*sum) - 1.0 - factor * f64::from(*x)).abs() < 1e-6);
        }
        assert!(add_gated(&exec, &mut sum, &x, &[0.0; 4]).is_err());
        assert!(add_gated(&exec, &mut sum, &x, &[]).is_err());
    }
}
