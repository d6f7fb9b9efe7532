//! Sampling flags.

use clap::Args;
use sterna::sampling::SamplingOptions;

/// How to choose tokens. What isn't given is as the model's makers recommend.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingFlags {
    /// Divides the logits; 0 always takes the best token
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    temperature: Option<f32>,

    /// Keep the K best tokens; 0 keeps all
    #[arg(long, value_name = "K")]
    top_k: Option<usize>,

    /// Keep the fewest best tokens whose probabilities reach P together; 1 keeps all
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    top_p: Option<f32>,

    /// Keep tokens at least P times as probable as the best; 0 keeps all
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    min_p: Option<f32>,

    /// Divides positive and multiplies negative logits of recent tokens; 1 changes nothing
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    repeat_penalty: Option<f32>,

    /// Tokens that count as recent
    #[arg(long, value_name = "N")]
    repeat_last_n: Option<usize>,

    /// Subtracted from a token's logit for every time it is recent
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    frequency_penalty: Option<f32>,

    /// Subtracted from a token's logit if it is recent
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    presence_penalty: Option<f32>,

    /// Equal seeds give equal texts [default: another one each time]
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

impl SamplingFlags {
    /// What they say.
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
