//! Ctrl-C: stops an answer in progress, and otherwise the program, a transfer first.

use std::process;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use sterna_delivery::fetch::Cancel;

use crate::output;

/// What shells expect of a program that Ctrl-C ended.
pub(crate) const EXIT_CODE: u8 = 130;

/// How long transfers may take to record what has arrived.
const PATIENCE: Duration = Duration::from_secs(3);

// The handler runs on a thread of its own and shares only these with the program.
static ANSWERING: AtomicBool = AtomicBool::new(false);
static ASKED: AtomicBool = AtomicBool::new(false);
static N_TRANSFERS: AtomicUsize = AtomicUsize::new(0);
static N_PUSHES: AtomicUsize = AtomicUsize::new(0);
static CANCEL: LazyLock<Cancel> = LazyLock::new(Cancel::new);

/// Takes over Ctrl-C for the rest of the program.
pub(crate) fn install() -> Result<()> {
    match ctrlc::set_handler(handle) {
        // By an earlier call.
        Ok(()) | Err(ctrlc::Error::MultipleHandlers) => Ok(()),
        Err(error) => Err(error).context("cannot take over Ctrl-C"),
    }
}

fn handle() {
    // The second time, don't wait for the answer to notice.
    if ANSWERING.load(Ordering::SeqCst) && !ASKED.swap(true, Ordering::SeqCst) {
        return;
    }
    if N_TRANSFERS.load(Ordering::SeqCst) > 0 {
        output::note(
            "\ninterrupted; what has arrived is kept: the same command goes on with it, \
             `sterna gc --interrupted` deletes it",
        );
        CANCEL.cancel();
        thread::sleep(PATIENCE);
    } else if N_PUSHES.load(Ordering::SeqCst) > 0 {
        output::note("\ninterrupted; what was sent stays there: the same command sends the rest");
        CANCEL.cancel();
        thread::sleep(PATIENCE);
    }
    process::exit(EXIT_CODE.into());
}

/// True once Ctrl-C has cancelled what was being fetched: the program is about to end.
pub(crate) fn is_ending() -> bool {
    CANCEL.is_cancelled()
}

/// While this lives, Ctrl-C cancels what is being fetched or sent, so that it can be resumed, and ends the program.
pub(crate) struct Transfer(&'static AtomicUsize);

impl Transfer {
    /// Of what is fetched.
    pub(crate) fn begin() -> Result<Transfer> {
        Transfer::counted(&N_TRANSFERS)
    }

    /// Of what is sent.
    #[cfg(feature = "stores")]
    pub(crate) fn begin_push() -> Result<Transfer> {
        Transfer::counted(&N_PUSHES)
    }

    fn counted(counter: &'static AtomicUsize) -> Result<Transfer> {
        install()?;
        counter.fetch_add(1, Ordering::SeqCst);
        Ok(Transfer(counter))
    }

    /// What cancels it.
    pub(crate) fn cancel(&self) -> Cancel {
        CANCEL.clone()
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
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
