//! Fetching blobs that are known by their digests.
//!
//! [`Fetch`] plans: it has no sockets, files or clock, and runs wherever bytes can be had, in a browser
//! too. On machines with threads, [`fetch`] drives it.

mod blob;
#[cfg(not(target_family = "wasm"))]
mod drive;
mod fault;
#[cfg(not(target_family = "wasm"))]
mod folder;
mod head;
mod pace;
#[cfg(not(target_family = "wasm"))]
mod part;
mod pass;
mod planner;
mod ranges;
#[cfg(not(target_family = "wasm"))]
mod sink;
#[cfg(not(target_family = "wasm"))]
mod small;
mod state;
mod transfer;

#[cfg(all(feature = "http", not(target_family = "wasm")))]
pub(crate) use self::small::{fetch_from, read as read_small};
pub use self::{
    blob::{Blob, Limits, PlanError, check_name},
    fault::Fault,
    head::Head,
    pace::Pace,
    pass::HashJob,
    planner::{Action, Failure, Fetch, Progress},
    ranges::RangeSet,
    transfer::{Request, Transfer},
};
#[cfg(not(target_family = "wasm"))]
pub use self::{
    drive::{Cancel, Event, FetchError, Report, fetch},
    folder::FolderSink,
    part::PartFile,
    sink::{Present, Sink, SinkError},
    small::fetch_small,
};
