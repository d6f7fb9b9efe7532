//! The store, signatures and the planner of fetches.

mod fetch_planner;
mod regressions;
mod sign;
mod store_basics;
mod store_crash;
mod store_damage;
mod store_fetch;
