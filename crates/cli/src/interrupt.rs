//! Ctrl-C: stops an answer in progress, and otherwise the program.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use crate::output;

/// What shells expect of a program that Ctrl-C ended.
const EXIT_CODE: i32 = 130;

// The handler runs on a thread of its own and shares only the flags with the program.
static ANSWERING: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicBool = AtomicBool::new(false);

/// Takes over Ctrl-C for the rest of the program.
pub(crate) fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        let first = ANSWERING.load(Ordering::SeqCst) && !ASKED.swap(true, Ordering::SeqCst);
        // The second time, don't wait for the answer to notice.
        if !first {
            process::exit(EXIT_CODE);
        }
    })
    .context("cannot take over Ctrl-C")
}

/// Has Ctrl-C say `text` before it ends the program.
pub(crate) fn say(text: &'static str) -> Result<()> {
    ctrlc::set_handler(move || {
        output::note(text);
        process::exit(EXIT_CODE);
    })
    .context("cannot take over Ctrl-C")
}

/// While this lives, the first Ctrl-C only asks to stop.
pub(crate) struct Answering(());

impl Answering {
    pub(crate) fn begin() -> Answering {
        ASKED.store(false, Ordering::SeqCst);
        ANSWERING.store(true, Ordering::SeqCst);
        Answering(())
    }

    /// True once Ctrl-C was pressed.
    pub(crate) fn asked_to_stop(&self) -> bool {
        ASKED.load(Ordering::SeqCst)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        ANSWERING.store(false, Ordering::SeqCst);
    }
}
