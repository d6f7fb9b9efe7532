//! A model that is loaded while it is being fetched: each file is available once it has been verified.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use super::{Event, PullError, PullOptions, Pulled, pull};
use crate::sign::TrustList;
use crate::store::Store;

/// What has arrived of a model so far. Shared by the thread that fetches and those that wait.
#[derive(Debug, Default)]
pub struct IncomingPackage {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// All files of the model and their sizes, once known.
    files: Option<BTreeMap<String, u64>>,
    /// The paths of verified files.
    verified: HashMap<String, PathBuf>,
    /// True once nothing more will arrive.
    ended: bool,
    fetching: Option<JoinHandle<Result<Pulled, PullError>>>,
}

/// Wakes those who wait when fetching ends, however it ends.
struct End<'a>(&'a IncomingPackage);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_all();
    }
}

impl IncomingPackage {
    /// Begins to fetch the model at `address` into `store`, on a separate thread, which calls `notify`.
    /// [`PullOptions::mirrors`] may add sources.
    pub fn begin(
        store: Store,
        address: String,
        options: PullOptions,
        trust: TrustList,
        notify: impl Fn(Event<'_>) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let incoming = Arc::new(Self::default());
        let shared = Arc::clone(&incoming);
        let fetching = thread::spawn(move || {
            let _end = End(&shared);
            let notify = |event: Event<'_>| {
                match &event {
                    Event::Listed(files) => shared.announce((*files).clone()),
                    Event::Verified { file, path } => shared.add(file, path.to_path_buf()),
                    _ => {}
                }
                notify(event);
            };
            pull(&store, &address, &options, &trust, &notify)
        });
        incoming.lock().fetching = Some(fetching);
        incoming
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` returns something or nothing more will arrive.
    fn wait<T>(&self, ready: impl Fn(&State) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(found) = ready(&state) {
                return Some(found);
            }
            if state.ended {
                return None;
            }
            state = self
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Sets the files of the model.
    fn announce(&self, files: BTreeMap<String, u64>) {
        self.lock().files = Some(files);
        self.changed.notify_all();
    }

    /// Records that a file has been verified and where it is.
    fn add(&self, name: &str, path: PathBuf) {
        self.lock().verified.insert(name.to_owned(), path);
        self.changed.notify_all();
    }

    /// The files of the model and their sizes; fails if it can't be fetched.
    pub fn files(&self) -> Result<BTreeMap<String, u64>, PullError> {
        match self.wait(|state| state.files.clone()) {
            Some(files) => Ok(files),
            None => Err(self.failure()),
        }
    }

    /// The path of the file called `name`, once it has been verified; fails if it can't be fetched.
    pub fn path(&self, name: &str) -> Result<PathBuf, PullError> {
        match self.wait(|state| state.verified.get(name).cloned()) {
            Some(path) => Ok(path),
            None => Err(PullError::NotFetched {
                file: name.to_owned(),
                source: Box::new(self.failure()),
            }),
        }
    }

    /// Waits until the model is in the store. The error of fetching is returned once; later calls succeed.
    pub fn finish(&self) -> Result<(), PullError> {
        let fetching = self.lock().fetching.take();
        match fetching {
            Some(thread) => match thread.join() {
                Ok(result) => result.map(|_| ()),
                Err(_) => Err(PullError::Panicked),
            },
            // Another call has waited, and returned the error.
            None => Ok(()),
        }
    }

    /// Why nothing more arrived.
    fn failure(&self) -> PullError {
        match self.finish() {
            Err(error) => error,
            Ok(()) => PullError::Ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;
    use std::time::Duration;

    use super::*;

    #[test]
    fn files_are_waited_for_and_failures_told_once() {
        let incoming = Arc::new(IncomingPackage::default());
        let waiting = {
            let incoming = Arc::clone(&incoming);
            thread::spawn(move || incoming.path("shard"))
        };
        thread::sleep(Duration::from_millis(20));
        incoming.add("other", "/elsewhere".into());
        incoming.add("shard", "/somewhere".into());
        assert_eq!(
            waiting.join().unwrap().unwrap(),
            PathBuf::from("/somewhere")
        );
        let fetching = thread::spawn(|| Err(PullError::NoSource));
        incoming.lock().fetching = Some(fetching);
        incoming.lock().ended = true;
        // What has arrived stays.
        assert!(incoming.path("other").is_ok());
        let error = incoming.path("never").unwrap_err();
        assert_eq!(error.to_string(), "never: not fetched");
        let cause = error.source().map(ToString::to_string);
        assert_eq!(cause.as_deref(), Some("expected a source, found none"));
        assert!(incoming.files().is_err() && incoming.finish().is_ok());
    }
}
