//! Fetching blobs with known digests.
//!
//! [`Fetch`] plans: it has no sockets, files or clock, and runs wherever bytes are available, including
//! browsers. On machines with threads, [`fetch`] drives it.
//!
//! ```no_run
//! # #[cfg(feature = "http")]
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use sterna_delivery::{
//!     fetch::{Blob, Cancel, Event, FolderSink, Limits, fetch},
//!     hash::{Algorithm, Expected},
//!     source::{HttpOptions, HttpSource, Url},
//! };
//!
//! let digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
//! let expected = Expected::digest(Algorithm::Sha256, digest)?;
//! let blobs = vec![Blob::new("shard_00000.bin", 3, expected)?];
//! let url = Url::parse("https://models.example.org/abc")?;
//! let source = HttpSource::new(url, HttpOptions::default());
//! let sink = FolderSink::new("abc");
//! let mut notify = |event: Event<'_>| println!("{event:?}");
//! fetch(blobs, &[&source], &sink, Limits::default(), &Cancel::new(), &mut notify)?;
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "http"))]
//! # fn main() {}
//! ```

mod blob;
#[cfg(not(target_family = "wasm"))]
mod drive;
mod fault;
#[cfg(not(target_family = "wasm"))]
mod folder;
mod head;
#[cfg(not(target_family = "wasm"))]
mod part;
mod pass;
mod planner;
mod ranges;
mod rate_limit;
#[cfg(not(target_family = "wasm"))]
mod sink;
#[cfg(not(target_family = "wasm"))]
mod small;
mod state;
mod transfer;

pub use self::{
    blob::{Blob, Limits, PlanError, check_name},
    fault::Fault,
    head::{Described, Head},
    pass::HashJob,
    planner::{Action, Failure, Fetch, Progress},
    ranges::RangeSet,
    rate_limit::RateLimit,
    transfer::{Request, Transfer},
};
#[cfg(all(feature = "http", not(target_family = "wasm")))]
pub(crate) use self::{
    drive::fetch_rather,
    small::{Standing, fetch_from, race, read as read_small},
};
#[cfg(not(target_family = "wasm"))]
pub use self::{
    drive::{Cancel, Event, FetchError, Report, fetch},
    folder::FolderSink,
    part::PartFile,
    sink::{Present, Sink, SinkError},
    small::fetch_small,
};
