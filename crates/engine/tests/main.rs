//! Models from their files to logits.

mod adapters;
mod asynchronous;
mod common;
mod compare;
mod export;
mod gpu;
mod gpu_decode;
mod gpu_encoders;
mod gpu_loss;
mod gpu_states;
mod gpu_tune;
mod head_screen;
mod heads;
mod hostile_models;
mod hybrid;
mod reference_gguf;
mod reference_logits;
mod self_test;
mod sessions;
mod swap;
mod trained_models;
