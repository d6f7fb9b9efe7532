//! Fetching over the network, from servers that misbehave in every way known.
#![cfg(feature = "http")]

#[cfg(target_os = "linux")]
mod cost;
mod gguf_file;
mod http;
mod hugging_face;
mod package;
#[cfg(target_os = "linux")]
mod process;
mod server;
mod slow;
