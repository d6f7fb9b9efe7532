//! Checking that buffers have the shapes an operation needs.

/// A buffer or matrix whose size doesn't fit the operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}: expected {expected} elements, found {found}")]
pub struct ShapeError {
    /// The operation and the argument.
    pub what: &'static str,
    /// Elements (or bytes, where `what` says so) that the other arguments require.
    pub expected: usize,
    /// Elements found.
    pub found: usize,
}

/// `Ok` if `found == expected`.
pub(crate) fn expect_len(
    what: &'static str,
    expected: usize,
    found: usize,
) -> Result<(), ShapeError> {
    if expected == found {
        Ok(())
    } else {
        Err(ShapeError {
            what,
            expected,
            found,
        })
    }
}

/// Rows of `width` in `len` elements; an error if there is a remainder.
pub(crate) fn rows(what: &'static str, len: usize, width: usize) -> Result<usize, ShapeError> {
    let n = len.checked_div(width).unwrap_or(0);
    expect_len(what, n * width, len)?;
    Ok(n)
}
