//! Progress and warnings of conversions on a terminal, and folders for what is converted on its way elsewhere.

use std::cell::RefCell;
use std::fmt;
use std::fs::{self, File, TryLockError};
use std::path::PathBuf;

use anyhow::{Context, Result};
use sterna_convert::{Event, Warning};
use sterna_delivery::hash::{Algorithm, digest_of};

use crate::progress::Progress;
use crate::{folders, model, output};

/// Shows the progress of a conversion, and prints its warnings.
pub(crate) fn notify() -> impl Fn(Event) {
    let bar: RefCell<Option<Progress>> = RefCell::new(None);
    move |event| match event {
        Event::Started { step, n_bytes } => {
            bar.replace(Some(Progress::bytes(step.name(), n_bytes)));
        }
        Event::Advanced { n_bytes } => {
            if let Some(bar) = &*bar.borrow() {
                bar.add(n_bytes);
            }
        }
        Event::Warning(warning) => {
            // Not in the middle of a bar.
            bar.take();
            say(&warning);
        }
        _ => {}
    }
}

/// Explains a warning in terms of the flags.
fn say(warning: &Warning) {
    let no_head = "the model has no separate output head: it uses its embedding table";
    let say = |text: fmt::Arguments<'_>| output::remark(warning.is_warning(), text);
    match warning {
        Warning::Model(warning) => model::tell(warning),
        Warning::NoHead { is_ignored: false } => {
            say(format_args!("{no_head}, and --head is for the table"));
        }
        Warning::NoHead { is_ignored: true } => say(format_args!(
            "{no_head}; --head is ignored, as --embeddings gives the type of the table"
        )),
        Warning::Described { .. } => say(format_args!(
            "{warning}; --arch qwen3 leaves the weights as they are"
        )),
        warning => say(format_args!("{warning}")),
    }
}

/// Where the package of one model is made, by one process at a time.
pub(crate) struct Staging {
    pub(crate) folder: PathBuf,
    /// Unlocked when it is closed.
    _lock: File,
}

impl Staging {
    /// That of the model at `origin`; waits while another process is at it.
    pub(crate) fn lock(origin: &str) -> Result<Staging> {
        let parent = folders::data()?.with_file_name("converting");
        fs::create_dir_all(&parent)
            .with_context(|| format!("{}: cannot create", parent.display()))?;
        let folder = parent.join(digest_of(Algorithm::Sha256, origin.as_bytes()).to_string());
        let path = folder.with_extension("lock");
        let cannot_lock = || format!("{}: cannot lock", path.display());
        let lock = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .with_context(cannot_lock)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                output::note("waiting for another process that converts this model");
                lock.lock().with_context(cannot_lock)?;
            }
            Err(TryLockError::Error(error)) => return Err(error).with_context(cannot_lock),
        }
        Ok(Staging {
            folder,
            _lock: lock,
        })
    }

    /// Removes the folder, if it is there.
    pub(crate) fn clear(&self) -> Result<()> {
        if !self.folder.exists() {
            return Ok(());
        }
        fs::remove_dir_all(&self.folder)
            .with_context(|| format!("{}: cannot remove", self.folder.display()))
    }
}
