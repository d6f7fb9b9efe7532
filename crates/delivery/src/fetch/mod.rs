//! Fetching blobs that are known by their digests.
//!
//! [`Fetch`] plans: it has no sockets, files or clock, and runs wherever bytes can be had, in a browser
//! too. On machines with threads, `fetch` drives it.

mod blob;
mod fault;
mod head;
mod pace;
mod pass;
mod planner;
mod ranges;
mod state;
mod transfer;

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
