//! Converting models: to an RDRR package ([`to_package`], [`adapter_to_package`]), to a GGUF file
//! ([`to_gguf`]), or to the files of a subprocess engine ([`to_bundle`], [`quantize()`]).
//!
//! Output gets its name only once it is complete. Nothing is printed here: progress and warnings are
//! [`Event`]s, and the result is a summary. The model, the keys to trust and the number of threads are
//! arguments.
//!
//! [`Packing`] converts to a package without files or threads, in a browser too: the rest is for native programs.
//!
//! ```no_run
//! use std::{path::Path, sync::Arc};
//! use sterna::native::{LocalModel, Located};
//! use sterna_convert::{PackageOptions, to_package};
//! use sterna_kernels::{Exec, Isa};
//!
//! # fn main() -> sterna::Result<()> {
//! let name = "Llama-3.2-1B";
//! let model = LocalModel::open(name, Located::at(Path::new(name))?, None, None)?;
//! let exec = Arc::new(Exec::new(4, Isa::detect()));
//! let out = Path::new("llama-package");
//! let summary = to_package(&model, out, &PackageOptions::default(), exec, &|_| {})?;
//! println!("{}: {} tensors", summary.model_id, summary.n_tensors);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

#[cfg(not(target_family = "wasm"))]
mod bundle;
mod event;
#[cfg(not(target_family = "wasm"))]
mod gguf;
mod package;
#[cfg(not(target_family = "wasm"))]
mod quantize;
mod row_chunks;
#[cfg(not(target_family = "wasm"))]
mod staging;
mod types;

#[cfg(not(target_family = "wasm"))]
pub use bundle::{BundleOptions, BundleSummary, ManifestForm, to_bundle};
pub use event::{Event, Notify, Step, Warning};
#[cfg(not(target_family = "wasm"))]
pub use gguf::{GgufOptions, GgufSummary, to_gguf};
#[cfg(not(target_family = "wasm"))]
pub use package::{AdapterPackageOptions, PackageSummary, adapter_to_package, to_package};
pub use package::{
    GroupVersion, GroupVersions, ManifestDetail, PackageOptions, PackageSink, Packed, Packing,
    Precisions, Statements, package_bytes,
};
#[cfg(not(target_family = "wasm"))]
pub use quantize::{AdapterOutput, QuantizeSettings, QuantizeSummary, quantize};
pub use types::{Target, Targets};
