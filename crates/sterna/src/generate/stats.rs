//! What an answer took, and why it ended.

use std::fmt;
use std::time::Duration;

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// The model said so, by one of the stop ids.
    StopToken,
    /// A stop string appeared.
    StopString,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The context holds no more tokens.
    ContextFull,
}

impl StopReason {
    /// True if there might have been more to say.
    pub const fn is_cut_off(self) -> bool {
        matches!(self, StopReason::MaxTokens | StopReason::ContextFull)
    }

    /// In words, to follow "stopped".
    pub const fn describe(self) -> &'static str {
        match self {
            StopReason::StopToken => "at the end of the answer",
            StopReason::StopString => "at a stop string",
            StopReason::MaxTokens => "at the token limit",
            StopReason::ContextFull => "at the end of the context",
        }
    }

    /// For programs; the same in every version.
    pub const fn as_str(self) -> &'static str {
        match self {
            StopReason::StopToken => "stop_token",
            StopReason::StopString => "stop_string",
            StopReason::MaxTokens => "max_tokens",
            StopReason::ContextFull => "context_full",
        }
    }
}

/// What an answer took, so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Those among them that the sequence held already.
    pub n_reused: usize,
    /// Tokens of the prompt computed.
    pub n_prefilled: usize,
    /// Tokens generated, a stop token not counted.
    pub n_generated: usize,
    /// Tokens of the answer computed.
    pub n_decoded: usize,
    /// Tokens drafted.
    pub n_drafted: usize,
    /// Those among them that were right, and so computed before they were chosen.
    pub n_accepted: usize,
    /// The share of the output head that was read where only the largest logits were wanted, if the head
    /// has a screen, whose bytes count.
    pub head_share: Option<f64>,
    /// Time spent on the prompt, as far as there is a clock.
    pub prefill: Duration,
    /// Time spent on the answer.
    pub decode: Duration,
    /// Why it ended; `None` if nobody let it.
    pub stop: Option<StopReason>,
}

impl Stats {
    /// Prompt tokens computed per second.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.n_prefilled, self.prefill)
    }

    /// Tokens decoded per second.
    pub fn decode_rate(&self) -> f64 {
        rate(self.n_decoded, self.decode)
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(f, "prompt {} tokens", self.n_prompt)?;
        if self.n_reused > 0 {
            write!(f, ", {} of them reused", self.n_reused)?;
        }
        write!(
            f,
            ", {:.0} ms, {:.1}/s; ",
            ms(self.prefill),
            self.prefill_rate()
        )?;
        write!(f, "answer {} tokens", self.n_generated)?;
        write!(
            f,
            ", {:.0} ms, {:.1}/s",
            ms(self.decode),
            self.decode_rate()
        )?;
        if self.n_drafted > 0 {
            write!(
                f,
                ", {} of {} drafts right",
                self.n_accepted, self.n_drafted
            )?;
        }
        if let Some(share) = self.head_share {
            write!(f, ", {:.0} % of the head read", share * 100.0)?;
        }
        match self.stop {
            Some(reason) => write!(f, "; stopped {}", reason.describe()),
            None => write!(f, "; interrupted"),
        }
    }
}

fn rate(n: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        n as f64 / time.as_secs_f64()
    }
}
