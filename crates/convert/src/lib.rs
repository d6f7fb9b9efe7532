//! Converting models: to an RDRR package ([`to_package`], [`adapter_to_package`]), to a GGUF file
//! ([`to_gguf`]), or to the files of a subprocess engine ([`to_bundle`], [`quantize()`]).
//!
//! Output gets its name only once it is complete. Nothing is printed here: progress and warnings are
//! [`Event`]s, and the result is a summary. The model, the keys to trust and the number of threads are
//! arguments.
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

mod bundle;
mod event;
mod gguf;
mod package;
mod quantize;
mod row_chunks;
mod staging;
mod types;

pub use bundle::{BundleOptions, BundleSummary, ManifestForm, to_bundle};
pub use event::{Event, Notify, Step, Warning};
pub use gguf::{GgufOptions, GgufSummary, to_gguf};
pub use package::{
    AdapterPackageOptions, GroupVersion, GroupVersions, ManifestDetail, PackageOptions,
    PackageSummary, Precisions, Statements, adapter_to_package, to_package,
};
pub use quantize::{AdapterOutput, QuantizeSettings, QuantizeSummary, quantize};
pub use types::{Target, Targets};
