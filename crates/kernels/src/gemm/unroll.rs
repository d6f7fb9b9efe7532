//! Loops over four rows, unrolled by hand.

/// An array of an expression for each of four rows.
///
/// A compiler that doesn't unroll a loop, as for WebAssembly, keeps the arrays it indexes in memory, not in
/// registers.
macro_rules! each_row {
    ($r:ident => $value:expr) => {
        [
            {
                let $r = 0;
                $value
            },
            {
                let $r = 1;
                $value
            },
            {
                let $r = 2;
                $value
            },
            {
                let $r = 3;
                $value
            },
        ]
    };
}
pub(super) use each_row;
