//! Statistics of an answer, and why it ended.

use std::fmt;
use std::time::Duration;

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StopReason {
    /// The model ended it, by one of the stop ids.
    StopToken,
    /// It matches its constraint, and nothing could be added.
    Complete,
    /// A stop string appeared.
    StopString,
    /// The token limit was reached.
    MaxTokens,
    /// The context is full.
    ContextFull,
}

impl StopReason {
    /// True if the answer may be incomplete.
    pub const fn is_cut_off(self) -> bool {
        matches!(self, StopReason::MaxTokens | StopReason::ContextFull)
    }

    /// In words, to follow "stopped".
    pub const fn describe(self) -> &'static str {
        match self {
            StopReason::StopToken | StopReason::Complete => "at the end of the answer",
            StopReason::StopString => "at a stop string",
            StopReason::MaxTokens => "at the token limit",
            StopReason::ContextFull => "at the end of the context",
        }
    }

    /// A stable name for programs.
    pub const fn as_str(self) -> &'static str {
        match self {
            StopReason::StopToken => "stop_token",
            StopReason::Complete => "complete",
            StopReason::StopString => "stop_string",
            StopReason::MaxTokens => "max_tokens",
            StopReason::ContextFull => "context_full",
        }
    }
}

/// Statistics of an answer, so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stats {
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Those that the sequence already held.
    pub n_reused: usize,
    /// Tokens of the prompt computed.
    pub n_prefilled: usize,
    /// Tokens generated, without a stop token.
    pub n_generated: usize,
    /// Tokens of the answer computed.
    pub n_decoded: usize,
    /// Tokens drafted.
    pub n_drafted: usize,
    /// Those that were accepted.
    pub n_accepted: usize,
    /// The share of the output head that was read where only the largest logits were needed, if the head has
    /// a screen, including the screen.
    pub head_share: Option<f64>,
    /// Time spent on the prompt, if there is a clock.
    pub prefill: Duration,
    /// Time spent on the answer.
    pub decode: Duration,
    /// Why it ended; `None` if it was interrupted.
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
