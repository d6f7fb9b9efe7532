//! Going on where a lost device left off.
//!
//! A GPU may be reset or unplugged while an answer is being made. What was computed on it is gone, but
//! not the tokens: the model is loaded again, they are computed again, and the answer goes on with the
//! very token it was at.

use anyhow::{Context, Result};
use sterna_engine::{EngineError, Logits, Session};

use crate::output;
use sterna::native::Device;

/// Devices lost in one answer that are made up for: more is no accident.
const MAX_LOSSES: usize = 3;

/// How to begin again.
#[derive(Default)]
pub(crate) struct Recovery {
    reload: Option<Reload>,
    /// Devices lost in this answer.
    n_losses: usize,
}

/// Loads the model again, adapters included, and begins an empty session of it.
type Reload = Box<dyn FnMut() -> Result<Session<Device>>>;

impl Recovery {
    /// By `reload`, which returns an empty session of the same model.
    pub(crate) fn by(reload: impl FnMut() -> Result<Session<Device>> + 'static) -> Recovery {
        Recovery {
            reload: Some(Box::new(reload)),
            n_losses: 0,
        }
    }

    /// An answer begins: losses before it don't count.
    pub(crate) fn begin(&mut self) {
        self.n_losses = 0;
    }

    /// Takes `step` with `session`, which holds the tokens `cached`; if its device is lost, again with
    /// another in its place that holds them too.
    ///
    /// Errors: those of `step`; its loss, if too many devices were lost before, or if there is no way to
    /// begin again; and what went wrong in doing so, with it.
    pub(crate) fn run<T>(
        &mut self,
        session: &mut Session<Device>,
        cached: &[u32],
        mut step: impl FnMut(&mut Session<Device>) -> Result<T, EngineError>,
    ) -> Result<T> {
        loop {
            match step(session) {
                Ok(taken) => return Ok(taken),
                Err(error) => self.replace(error, session, cached)?,
            }
        }
    }

    /// Puts a session with the tokens `cached` in the place of `session`, whose device was lost.
    fn replace(
        &mut self,
        mut error: EngineError,
        session: &mut Session<Device>,
        cached: &[u32],
    ) -> Result<()> {
        loop {
            let reload = match &mut self.reload {
                Some(reload) if error.is_lost() && self.n_losses < MAX_LOSSES => reload,
                _ => return Err(error.into()),
            };
            self.n_losses += 1;
            output::note(format_args!("note: {error}; loading the model again"));
            let mut fresh = reload()
                .with_context(|| format!("{error}, and the model cannot be loaded again"))?;
            if !cached.is_empty()
                && let Err(again) = fresh.forward(cached, Logits::None)
            {
                error = again;
                continue;
            }
            *session = fresh;
            return Ok(());
        }
    }
}
