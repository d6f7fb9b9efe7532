//! Registries and object stores: real servers, clients of others, and processes that are killed at any request.
#![cfg(all(feature = "oci", feature = "object-store", target_os = "linux"))]

mod client;
mod interrupted;
mod others;
mod proxy;
mod round_trip;
mod writers;
