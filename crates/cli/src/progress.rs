//! Progress bars on stderr, only on terminals, and only for what takes over a second.

use std::io::{self, IsTerminal};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output;

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

    /// Counts items that may each take longer than a second; shows the time.
    pub(crate) fn long_items(what: &'static str, total: u64) -> Progress {
        let template = "{msg} [{bar:30}] {pos}/{len} {elapsed}";
        let progress = Progress::new(what, total, template);
        let bar = progress.bar.downgrade();
        if io::stderr().is_terminal() && !output::is_quiet() {
            thread::spawn(move || {
                thread::sleep(PATIENCE);
                if let Some(bar) = bar.upgrade()
                    && !bar.is_finished()
                {
                    bar.set_draw_target(ProgressDrawTarget::stderr());
                    bar.enable_steady_tick(PATIENCE);
                }
            });
        }
        progress
    }

    fn new(what: &'static str, total: u64, template: &str) -> Progress {
        let style = ProgressStyle::with_template(template).expect("the templates are valid");
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
        if self.bar.is_hidden() && !output::is_quiet() && self.start.elapsed() > PATIENCE {
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
