//! Progress bars on stderr, only on terminals, and only for what takes over a second.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// How long to wait before showing a bar.
const PATIENCE: Duration = Duration::from_secs(1);

/// A bar that appears after a second, if stderr is a terminal, and is erased at the end.
pub(crate) struct Progress {
    bar: ProgressBar,
    start: Instant,
}

impl Progress {
    /// Counts bytes up to `total`.
    pub(crate) fn bytes(what: &'static str, total: u64) -> Progress {
        Progress::new(what, total, "{msg} [{bar:30}] {bytes}/{total_bytes} {eta}")
    }

    /// Counts items, such as tokens, up to `total`.
    pub(crate) fn items(what: &'static str, total: u64) -> Progress {
        Progress::new(what, total, "{msg} [{bar:30}] {pos}/{len} {eta}")
    }

    fn new(what: &'static str, total: u64, template: &str) -> Progress {
        let style = ProgressStyle::with_template(template).expect("both templates are valid");
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden())
            .with_style(style.progress_chars("=> "))
            .with_message(what);
        Progress {
            bar,
            start: Instant::now(),
        }
    }

    /// Adds `n` to the progress.
    pub(crate) fn add(&self, n: u64) {
        if self.bar.is_hidden() && self.start.elapsed() > PATIENCE {
            // Hidden automatically where stderr is no terminal.
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.inc(n);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
