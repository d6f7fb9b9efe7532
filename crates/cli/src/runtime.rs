//! Schedulers for this program, and statistics of answers.

use serde::Serialize;
use sterna::generate::{Stats, StopReason};
use sterna::native::{self, Device};
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::sequence::Sequence;
use sterna_engine::Session;

/// How a scheduler fills the steps of the device of `session`.
pub(crate) fn scheduling(session: &Session<Device>) -> SchedulerOptions {
    if native::has_gpu(session.model().backend()) {
        SchedulerOptions::gpu()
    } else {
        SchedulerOptions::default()
    }
}

/// A scheduler for `session` alone, so the device may sample tokens.
pub(crate) fn alone(session: Session<Device>) -> (Scheduler<Device>, SequenceId) {
    let mut scheduler = Scheduler::new(SchedulerOptions {
        draw_on_device: true,
        ..scheduling(&session)
    });
    let sequence = scheduler.add(Sequence::new(session));
    (scheduler, sequence)
}

/// [`Stats`] as JSON.
#[derive(Debug, Serialize)]
pub(crate) struct StatsReport {
    n_prompt: usize,
    n_reused: usize,
    n_prefilled: usize,
    n_generated: usize,
    n_decoded: usize,
    n_drafted: usize,
    n_accepted: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    head_share: Option<f64>,
    prefill_ms: f64,
    decode_ms: f64,
    stop: Option<&'static str>,
}

impl From<Stats> for StatsReport {
    fn from(stats: Stats) -> StatsReport {
        StatsReport {
            n_prompt: stats.n_prompt,
            n_reused: stats.n_reused,
            n_prefilled: stats.n_prefilled,
            n_generated: stats.n_generated,
            n_decoded: stats.n_decoded,
            n_drafted: stats.n_drafted,
            n_accepted: stats.n_accepted,
            head_share: stats.head_share,
            prefill_ms: stats.prefill.as_secs_f64() * 1e3,
            decode_ms: stats.decode.as_secs_f64() * 1e3,
            stop: stats.stop.map(StopReason::as_str),
        }
    }
}
