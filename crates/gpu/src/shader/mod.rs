//! The kernels' WGSL: which files make which shader, and how they are assembled.
//!
//! A shader is its own file in `src/shaders/`, preceded by the files of `src/shaders/lib/` it names. Those
//! contain what differs between devices: reductions by subgroups or through shared memory, packed dot
//! products in one instruction or several. Native and browser builds embed the same files; what their
//! compilers require differently is prepended by [`Shader::assemble`].

mod beside;
#[cfg(not(target_family = "wasm"))]
mod emulated;
mod params;
mod table;
mod text;

pub use params::Param;
pub(crate) use params::{Params, params};
pub use table::ALL;
pub(crate) use table::*;

use std::borrow::Cow;

use crate::{Features, checksum};

/// The compiler of the WGSL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// naga, in `wgpu`: enables subgroups by itself, and has immediates.
    Native,
    /// A browser: requires `enable` directives.
    Browser,
}

/// How a kernel uses a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Reads it.
    Read,
    /// Writes it, and may read it.
    Write,
}

/// Source text that several shaders share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lib {
    /// A file as it is.
    File(&'static str),
    /// Sums and maxima over invocations: by subgroups where available.
    Reduce,
    /// Packed dot products: in one instruction where available.
    Dot4,
}

/// WGSL extensions that a shader requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// 16-bit floats.
    F16,
    /// Cooperative matrices.
    CooperativeMatrix,
}

/// A shader: one entry point, `main`, with its buffers in group 0 and `params` separately.
#[derive(Debug)]
pub struct Shader {
    /// Name, that of its file.
    pub name: &'static str,
    /// Its own file.
    pub source: &'static str,
    /// What is prepended to it.
    pub libs: &'static [Lib],
    /// Its buffers, by binding.
    pub bindings: &'static [Access],
    /// The fields of its `Params`, in order.
    pub params: &'static [Param],
    /// Its required extensions.
    pub needs: &'static [Need],
    /// Another whose workgroups follow its own; bindings and parameters are those of both.
    pub second: Option<&'static Shader>,
}

/// The line by which every shader declares its parameters.
const PARAMS: &str = "@group(1) @binding(0) var<uniform> params: Params;";

/// The same where parameters are immediates.
const IMMEDIATE_PARAMS: &str = "var<immediate> params: Params;";

impl Shader {
    /// The whole text, for devices with `features`.
    pub fn assemble(&self, target: Target, features: Features) -> String {
        let mut text = String::new();
        for need in self.needs {
            text.push_str(match need {
                Need::F16 => "enable f16;\n",
                Need::CooperativeMatrix if features.emulated_matrix => "",
                Need::CooperativeMatrix => "enable wgpu_cooperative_matrix;\n",
            });
        }
        let has_matrices = self.needs.contains(&Need::CooperativeMatrix);
        let by_subgroups = self.libs.contains(&Lib::Reduce) && features.subgroups || has_matrices;
        if target == Target::Browser && by_subgroups {
            text.push_str("enable subgroups;\n");
        }
        for lib in self.libs {
            text.push_str(match lib {
                Lib::File(text) => text,
                Lib::Reduce if features.subgroups => table::REDUCE_SUBGROUP,
                Lib::Reduce => table::REDUCE_SHARED,
                Lib::Dot4 if features.dot4 => table::DOT4_PACKED,
                Lib::Dot4 => table::DOT4_PLAIN,
            });
            text.push('\n');
        }
        let mut source = Cow::Borrowed(self.source);
        #[cfg(not(target_family = "wasm"))]
        if features.emulated_matrix && has_matrices {
            source = Cow::Owned(emulated::emulate(&source));
        }
        if features.immediates {
            source = Cow::Owned(source.replace(PARAMS, IMMEDIATE_PARAMS));
        }
        text += &source;
        match self.second {
            None => text,
            Some(second) => {
                let n_bindings = second.bindings.len();
                beside::beside(&text, &second.assemble(target, features), n_bindings)
            }
        }
    }

    /// Bytes of its `Params`: words, one after the other.
    pub fn params_bytes(&self) -> u32 {
        4 * self.params.len() as u32
    }

    /// Whether a device with `features` can run it.
    pub fn runs_with(&self, features: Features) -> bool {
        self.needs.iter().all(|need| match need {
            Need::F16 => features.f16,
            Need::CooperativeMatrix => features.cooperative_matrix || features.emulated_matrix,
        })
    }
}

/// A hash that differs for other kernels: measurements with some don't apply to others.
pub fn fingerprint() -> u64 {
    let mut sum = checksum::BASIS;
    let mut add = |text: &str| sum = checksum::fnv1a(sum, text.as_bytes());
    for shader in ALL {
        add(shader.name);
        for features in [Features::ALL, Features::NONE] {
            add(&shader.assemble(Target::Native, features));
        }
    }
    sum
}
