//! A model that is being fetched while it is loaded: each file can be had once it has been verified.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use anyhow::{Context, Result, anyhow};
use sterna_delivery::fetch::Limits;
use sterna_delivery::store::Store;

use super::{Pulled, pull};

/// What has arrived of a model so far. Shared by the thread that fetches and those that wait.
#[derive(Debug, Default)]
pub(crate) struct Arrival {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// All files of the model and their sizes, once it is known what belongs to it.
    files: Option<BTreeMap<String, u64>>,
    /// Where those are that have been verified.
    here: HashMap<String, PathBuf>,
    /// True once nothing more will come.
    ended: bool,
    fetching: Option<JoinHandle<Result<Pulled>>>,
}

/// Tells those who wait that nothing more comes, however fetching ends.
struct End<'a>(&'a Arrival);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.changed.notify_all();
    }
}

impl Arrival {
    /// Begins to fetch the model at `address` into `store`, under `name` if one is given.
    pub(crate) fn begin(
        store: Store,
        address: &str,
        name: Option<&str>,
        limits: Limits,
    ) -> Arc<Arrival> {
        let arrival = Arc::new(Arrival::default());
        let (shared, sources) = (Arc::clone(&arrival), vec![address.to_owned()]);
        let name = name.map(str::to_owned);
        let fetching = thread::spawn(move || {
            let _end = End(&shared);
            pull(
                &store,
                &sources,
                name.as_deref(),
                None,
                &limits,
                Some(&shared),
            )
        });
        arrival.lock().fetching = Some(fetching);
        arrival
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` says something or nothing more comes.
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

    /// Says what belongs to the model.
    pub(super) fn announce(&self, files: BTreeMap<String, u64>) {
        self.lock().files = Some(files);
        self.changed.notify_all();
    }

    /// Says that a file has been verified and where it is.
    pub(super) fn add(&self, name: &str, path: PathBuf) {
        self.lock().here.insert(name.to_owned(), path);
        self.changed.notify_all();
    }

    /// The files of the model and their sizes; fails if it can't be had.
    pub(crate) fn files(&self) -> Result<BTreeMap<String, u64>> {
        match self.wait(|state| state.files.clone()) {
            Some(files) => Ok(files),
            None => Err(self.failure()),
        }
    }

    /// Where the file called `name` is, once it has been verified; fails if it can't be had.
    pub(crate) fn path(&self, name: &str) -> Result<PathBuf> {
        match self.wait(|state| state.here.get(name).cloned()) {
            Some(path) => Ok(path),
            None => Err(self.failure()).with_context(|| format!("{name}: not fetched")),
        }
    }

    /// Waits until the model is in the store.
    pub(crate) fn finish(&self) -> Result<()> {
        let fetching = self.lock().fetching.take();
        match fetching {
            Some(thread) => match thread.join() {
                Ok(result) => result.map(|_| ()),
                Err(_) => Err(anyhow!("fetching failed; its message is above")),
            },
            // Somebody else has waited, and been told.
            None => Ok(()),
        }
    }

    /// Why nothing more came.
    fn failure(&self) -> anyhow::Error {
        match self.finish() {
            Err(error) => error,
            Ok(()) => anyhow!("fetching has ended"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn files_are_waited_for_and_failures_told_once() {
        let arrival = Arc::new(Arrival::default());
        let waiting = {
            let arrival = Arc::clone(&arrival);
            thread::spawn(move || arrival.path("shard"))
        };
        thread::sleep(Duration::from_millis(20));
        arrival.add("other", "/elsewhere".into());
        arrival.add("shard", "/somewhere".into());
        assert_eq!(
            waiting.join().unwrap().unwrap(),
            PathBuf::from("/somewhere")
        );
        let fetching = thread::spawn(|| Err(anyhow!("the line was cut")));
        arrival.lock().fetching = Some(fetching);
        arrival.lock().ended = true;
        // What has come stays.
        assert!(arrival.path("other").is_ok());
        let error = format!("{:#}", arrival.path("never").unwrap_err());
        assert_eq!(error, "never: not fetched: the line was cut");
        assert!(arrival.files().is_err() && arrival.finish().is_ok());
    }
}
