//! Sampling flags.

use clap::Args;
use sterna::sampling::SamplingOptions;

use crate::numbers::{number, seed, whole};

/// How to sample tokens. The defaults are the model's recommendations.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingFlags {
    /// Temperature, which divides the logits; 0 is greedy
    #[arg(long, alias = "temp", value_name = "T", value_parser = number)]
    temperature: Option<f32>,

    /// Keep the K best tokens; 0 keeps all
    #[arg(long, value_name = "K", value_parser = whole)]
    top_k: Option<usize>,

    /// Top-p: keep the fewest best tokens whose probabilities add up to P; 1 keeps all
    #[arg(long, value_name = "P", value_parser = number)]
    top_p: Option<f32>,

    /// Min-p: keep tokens at least P times as probable as the best; 0 keeps all
    #[arg(long, value_name = "P", value_parser = number)]
    min_p: Option<f32>,

    /// Repetition penalty: divides positive and multiplies negative logits of recent tokens; 1 disables it
    #[arg(long, value_name = "X", value_parser = number)]
    repeat_penalty: Option<f32>,

    /// Penalty window: how many of the last tokens are recent
    #[arg(long, value_name = "N", value_parser = whole)]
    repeat_last_n: Option<usize>,

    /// Frequency penalty: subtracted from a token's logit for every time it is recent
    #[arg(long, value_name = "X", value_parser = number)]
    frequency_penalty: Option<f32>,

    /// Presence penalty: subtracted from a token's logit if it is recent
    #[arg(long, value_name = "X", value_parser = number)]
    presence_penalty: Option<f32>,

    /// Seed; equal seeds give equal texts [default: a random one]
    #[arg(short, long, value_name = "N", value_parser = seed)]
    seed: Option<u64>,
}

impl SamplingFlags {
    /// The resulting settings.
    pub(crate) fn options(&self) -> SamplingOptions {
        SamplingOptions {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: self.repeat_last_n,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            seed: self.seed,
            ..SamplingOptions::default()
        }
    }
}
