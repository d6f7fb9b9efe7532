//! Parameters of shaders: structs whose fields are known by name, to be compared with the WGSL.

use bytemuck::NoUninit;

/// A field of a shader's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Its name, as in the WGSL.
    pub name: &'static str,
    /// Bytes from the beginning of the struct.
    pub offset: usize,
    /// Its type, as the WGSL spells it: `u32` or `f32`.
    pub ty: &'static str,
}

/// The `Params` of a shader.
pub(crate) trait Params: NoUninit {
    /// Its fields, in order.
    const FIELDS: &'static [Param];
}

/// Defines the `Params` of a shader: `u32` and `f32` fields, one after the other.
macro_rules! params {
    ($name:ident { $($field:ident: $ty:ident),* $(,)? }) => {
        #[repr(C)]
        #[derive(Clone, Copy, bytemuck::NoUninit)]
        pub(crate) struct $name {
            $(pub(crate) $field: $ty),*
        }

        impl $crate::shader::Params for $name {
            const FIELDS: &'static [$crate::shader::Param] = &[
                $($crate::shader::Param {
                    name: stringify!($field),
                    offset: std::mem::offset_of!($name, $field),
                    ty: stringify!($ty),
                }),*
            ];
        }
    };
}
pub(crate) use params;
