//! Which files make which shader.

use super::Access::{Read, Write};
use super::{Lib, Shader};

pub(super) const REDUCE_SUBGROUP: &str = include_str!("../shaders/lib/reduce_subgroup.wgsl");
pub(super) const REDUCE_SHARED: &str = include_str!("../shaders/lib/reduce_shared.wgsl");
pub(super) const DOT4_PACKED: &str = include_str!("../shaders/lib/dot4_packed.wgsl");
pub(super) const DOT4_PLAIN: &str = include_str!("../shaders/lib/dot4_plain.wgsl");

const EXACT: Lib = Lib::File(include_str!("../shaders/lib/exact.wgsl"));
const ACTIVATION: Lib = Lib::File(include_str!("../shaders/lib/activation.wgsl"));
const EPILOGUE: Lib = Lib::File(include_str!("../shaders/lib/epilogue.wgsl"));
const GRID: Lib = Lib::File(include_str!("../shaders/lib/grid.wgsl"));
const IO_SEPARATE: Lib = Lib::File(include_str!("../shaders/lib/io_separate.wgsl"));
const IO_IN_PLACE: Lib = Lib::File(include_str!("../shaders/lib/io_in_place.wgsl"));

/// Defines shaders, and [`ALL`] of them.
macro_rules! shaders {
    ($($(#[$doc:meta])* $name:ident = $file:literal, [$($lib:expr),*], [$($access:expr),*],
        $params:literal, [$($need:expr),*];)*) => {
        $(
            $(#[$doc])*
            #[cfg_attr(target_arch = "wasm32", allow(dead_code))]
            pub(crate) static $name: Shader = Shader {
                name: stringify!($name),
                source: include_str!(concat!("../shaders/", $file, ".wgsl")),
                libs: &[$($lib),*],
                bindings: &[$($access),*],
                params_bytes: $params,
                needs: &[$($need),*],
            };
        )*
        /// Every shader.
        pub static ALL: &[&Shader] = &[$(&$name),*];
    };
}

shaders! {
    RMS_NORM = "rms_norm", [Lib::Reduce, GRID, IO_SEPARATE], [Read, Write, Read], 28, [];
    RMS_NORM_IN_PLACE = "rms_norm", [Lib::Reduce, GRID, IO_IN_PLACE], [Read, Write], 28, [];
    QUANTIZE = "quantize", [Lib::Reduce, GRID, EXACT], [Read, Read, Write, Write], 24, [];
    ELEMENTWISE = "elementwise", [ACTIVATION], [Write, Read], 28, [];
    TERNARY_GEMV = "ternary_gemv", [Lib::Reduce, Lib::Dot4, GRID, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], 28, [];
    TERNARY_GEMM = "ternary_gemm", [Lib::Dot4, EXACT, ACTIVATION, EPILOGUE],
        [Read, Read, Read, Read, Write], 28, [];
}
