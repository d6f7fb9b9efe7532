//! The server on loopback, as its clients see it.

mod anthropic;
mod common;
mod gpus;
mod lora;
mod models;
mod openai;
mod openapi;
mod operations;
mod receipts;
mod responses;
mod signal;
mod swap;
mod tools;
