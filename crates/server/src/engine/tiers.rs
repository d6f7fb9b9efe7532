//! Where sequences go that engines have no room for: into memory of the host, and from there to disk.
//!
//! All engines share it. What was computed by the same model, adapters and settings on the same kind of device has the
//! same [`Identity`], and is found by its tokens. Two threads read and write the disk; an engine copies to and from
//! memory, and is woken when what it waits for was read.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Bound;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna::native::{SequenceFolder, SequenceLabel, StoredSequence};
use sterna::sequence::SavedSequence;
use sterna::{Error, ErrorCode, Result};

use super::prefix::n_common;
use super::rates::Copied;
use crate::metrics::{DropReason, Metrics, Tier};
use crate::settings::{Log, tell};

/// Shorter sequences are computed again about as fast as they are copied.
const WORTH_KEEPING: usize = 64;
/// Bytes that wait to be written, unless it is one sequence alone: what the disk doesn't keep up with is forgotten.
const MAX_UNWRITTEN: u64 = 1 << 30;
/// Beginnings of a sequence that are kept beside it, of a model with states: it goes on from where it has any.
const MAX_BEGINNINGS: usize = 3;

/// Where sequences are kept on disk.
#[derive(Debug, Clone)]
pub struct CacheFolder {
    /// The folder, which other processes may share. It is made if there is none.
    pub path: PathBuf,
    /// Bytes of all sequences in it: those that were used least recently make room for others.
    pub max_bytes: u64,
}

/// What a sequence was computed by: only one that is computed by the same may go on with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    label: SequenceLabel,
    /// How often the model's weights had been replaced.
    pub(super) generation: u64,
    /// It means the same to another process.
    is_lasting: bool,
    /// Its model has states: a sequence can't be cut off where it likes, and is continued as a whole.
    is_whole: bool,
}

/// What makes an [`Identity`].
pub(super) struct Computing<'a> {
    /// The digest of the model's files, if it is known.
    pub(super) model: Option<&'a str>,
    /// The number of the model in this process.
    pub(super) number: usize,
    /// How often its weights have been replaced.
    pub(super) generation: u64,
    /// The model's own adapters, that of the request, and settings.
    pub(super) settings: &'a str,
    /// The kind of device.
    pub(super) device: &'a str,
    pub(super) has_states: bool,
}

impl Identity {
    pub(super) fn of(computing: &Computing<'_>) -> Identity {
        let Computing {
            model,
            number,
            generation,
            settings,
            device,
            has_states,
        } = *computing;
        let mut hasher = blake3::Hasher::new();
        let mut add = |text: &str| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        // Another version may compute other bits.
        add(crate::VERSION);
        match model {
            Some(digest) => add(digest),
            None => add(&format!("model {number} of this process")),
        }
        add(settings);
        add(device);
        add(&generation.to_string());
        Identity {
            label: *hasher.finalize().as_bytes(),
            generation,
            is_lasting: model.is_some() && generation == 0,
            is_whole: has_states,
        }
    }
}

/// The tiers, and what is known of them.
pub(super) struct Tiers {
    state: Mutex<State>,
    /// There is something to read.
    readable: Condvar,
    /// There is something to write, or something was written.
    writable: Condvar,
    host_bytes: u64,
    disk: Option<Disk>,
    metrics: Arc<Metrics>,
    log: Log,
}

struct Disk {
    folder: SequenceFolder,
    max_bytes: u64,
}

#[derive(Default)]
struct State {
    shelves: HashMap<SequenceLabel, Shelf>,
    /// What is in memory of the host, by when it was used last.
    recent: BTreeMap<u64, (SequenceLabel, Arc<[u32]>)>,
    /// All files in the folder, by name.
    files: HashMap<String, Stored>,
    /// Counts uses.
    clock: u64,
    /// Bytes in memory of the host.
    n_host_bytes: u64,
    /// Bytes that wait to be written.
    n_unwritten: u64,
    reads: VecDeque<Read>,
    writes: VecDeque<Write>,
    /// Engines that may still ask.
    n_engines: usize,
    is_closed: bool,
    /// All that was to be written is, since it was closed.
    is_done: bool,
}

/// Sequences of an identity by their tokens, in whose order the longest prefix of a prompt is found.
type Shelf = BTreeMap<Arc<[u32]>, Place>;

enum Place {
    /// In memory of the host, used last at this time.
    Host {
        saved: Arc<SavedSequence>,
        used: u64,
        is_lasting: bool,
    },
    /// On its way to disk.
    Leaving(Arc<SavedSequence>),
    /// In the file with this name.
    Disk(String),
}

/// A file.
struct Stored {
    label: SequenceLabel,
    ids: Arc<[u32]>,
    n_bytes: u64,
}

struct Read {
    name: String,
    label: SequenceLabel,
    to: Sender<(Arc<SavedSequence>, Duration)>,
    /// Tells who waits that it is there, or isn't.
    wake: Box<dyn FnOnce() + Send>,
}

enum Write {
    Sequence(SequenceLabel, Arc<SavedSequence>),
    Touch(String),
    Remove(String),
}

/// What was found of a prompt.
pub(super) enum Found {
    /// In memory, of this tier.
    Here(Arc<SavedSequence>, Tier),
    /// It is being read from disk.
    Fetched(Fetch),
}

/// A sequence that is being read.
pub(super) struct Fetch {
    from: Receiver<(Arc<SavedSequence>, Duration)>,
}

impl Fetch {
    /// What was read, and how long that took, `None` if it can't be; nothing yet if that isn't known.
    pub(super) fn get(&self) -> Option<Option<(Arc<SavedSequence>, Duration)>> {
        match self.from.try_recv() {
            Ok(read) => Some(Some(read)),
            Err(TryRecvError::Disconnected) => Some(None),
            Err(TryRecvError::Empty) => None,
        }
    }
}

impl Tiers {
    /// Tiers of `n_engines`, with `host_bytes` of memory and `folder`, either of which may be missing. Starts the
    /// threads of the disk.
    ///
    /// Errors: the folder can't be used; the system has no thread left.
    pub(super) fn start(
        n_engines: usize,
        host_bytes: u64,
        folder: Option<&CacheFolder>,
        metrics: &Arc<Metrics>,
        log: &Log,
    ) -> Result<Arc<Tiers>> {
        let open = |of: &CacheFolder| {
            Ok::<Disk, Error>(Disk {
                folder: SequenceFolder::open(&of.path)?,
                max_bytes: of.max_bytes,
            })
        };
        let tiers = Arc::new(Tiers {
            state: Mutex::new(State {
                n_engines,
                ..State::default()
            }),
            readable: Condvar::new(),
            writable: Condvar::new(),
            host_bytes,
            disk: folder.map(open).transpose()?,
            metrics: Arc::clone(metrics),
            log: Arc::clone(log),
        });
        tiers.figure(&tiers.state());
        if let Some(disk) = &tiers.disk {
            tiers.make_room(disk, 0)?;
            let spawn = |name: &str, run: fn(&Tiers, &Disk)| {
                let tiers = Arc::clone(&tiers);
                let run = move || tiers.disk.iter().for_each(|disk| run(&tiers, disk));
                let thread = thread::Builder::new().name(name.to_owned());
                thread.spawn(run).map(drop)
            };
            spawn("cache reader", Tiers::read)?;
            spawn("cache writer", Tiers::write)?;
        }
        Ok(tiers)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where what is put here is at first.
    pub(super) fn first(&self) -> Tier {
        match self.host_bytes {
            0 => Tier::Disk,
            _ => Tier::Host,
        }
    }

    /// Whether a sequence of `identity` with the tokens `ids` is to be kept, and isn't yet. One that is kept already
    /// counts as used.
    pub(super) fn lacks(&self, identity: &Identity, ids: &[u32]) -> bool {
        let may_keep = self.host_bytes > 0 || (self.disk.is_some() && identity.is_lasting);
        if !may_keep || ids.len() < WORTH_KEEPING {
            return false;
        }
        let mut state = self.state();
        let known = state.shelves.get(&identity.label).and_then(|shelf| {
            let next = after(shelf, Bound::Included(ids))?;
            let is_known = match identity.is_whole {
                true => next[..] == *ids,
                false => next.starts_with(ids),
            };
            is_known.then(|| Arc::clone(next))
        });
        match known {
            Some(known) => {
                self.use_again(&mut state, &identity.label, &known);
                false
            }
            None => true,
        }
    }

    /// Takes `saved`, which was computed as `identity` says.
    pub(super) fn put(&self, identity: &Identity, saved: SavedSequence) {
        let (label, saved) = (&identity.label, Arc::new(saved));
        let ids: Arc<[u32]> = saved.ids().into();
        let mut state = self.state();
        // What is a part of it is of no use any more, unless it is one that can be gone on from.
        let n_kept = if identity.is_whole { MAX_BEGINNINGS } else { 0 };
        for part in state.prefixes(label, &ids).iter().skip(n_kept) {
            self.forget(&mut state, label, part);
        }
        self.forget(&mut state, label, &ids);
        let n_bytes = saved.n_bytes();
        if n_bytes <= self.host_bytes {
            state.n_host_bytes += n_bytes;
            let used = state.tick();
            state.recent.insert(used, (*label, Arc::clone(&ids)));
            let place = Place::Host {
                saved,
                used,
                is_lasting: identity.is_lasting,
            };
            state.shelf(label).insert(ids, place);
        } else if identity.is_lasting {
            self.send_to_disk(&mut state, label, saved);
        }
        self.bound_host(&mut state, self.host_bytes);
        self.figure(&state);
    }

    /// Moves sequences out of memory, the least recently used first, until there are at most `most` bytes.
    fn bound_host(&self, state: &mut State, most: u64) {
        while state.n_host_bytes > most {
            let Some((label, ids)) = state.recent.first_key_value().map(|(_, of)| of.clone())
            else {
                return;
            };
            if let Some(Place::Host {
                saved, is_lasting, ..
            }) = state.take(&label, &ids)
                && is_lasting
            {
                self.send_to_disk(state, &label, saved);
            }
        }
    }

    /// Has `saved` written to disk, if there is one with room for it, and it keeps up.
    fn send_to_disk(&self, state: &mut State, label: &SequenceLabel, saved: Arc<SavedSequence>) {
        let Some(disk) = &self.disk else { return };
        let n_bytes = saved.n_bytes();
        if SequenceFolder::file_bytes(&saved) > disk.max_bytes {
            return;
        }
        if state.n_unwritten > 0 && state.n_unwritten + n_bytes > MAX_UNWRITTEN {
            self.metrics.count_cache_drop(DropReason::Slow);
            return;
        }
        state.n_unwritten += n_bytes;
        let place = Place::Leaving(Arc::clone(&saved));
        state.shelf(label).insert(saved.ids().into(), place);
        state.writes.push_back(Write::Sequence(*label, saved));
        self.writable.notify_all();
    }

    /// Records that a sequence was used.
    fn use_again(&self, state: &mut State, label: &SequenceLabel, ids: &Arc<[u32]>) {
        let now = state.tick();
        let place = state
            .shelves
            .get_mut(label)
            .and_then(|shelf| shelf.get_mut(ids));
        match place {
            Some(Place::Host { used, .. }) => {
                let before = std::mem::replace(used, now);
                if let Some(of) = state.recent.remove(&before) {
                    state.recent.insert(now, of);
                }
            }
            Some(Place::Disk(name)) => {
                let touch = Write::Touch(name.clone());
                state.writes.push_back(touch);
                self.writable.notify_all();
            }
            Some(Place::Leaving(_)) | None => {}
        }
    }

    /// Forgets a sequence, wherever it is.
    fn forget(&self, state: &mut State, label: &SequenceLabel, ids: &[u32]) {
        if let Some(Place::Disk(name)) = state.take(label, ids) {
            state.files.remove(&name);
            state.writes.push_back(Write::Remove(name));
            self.writable.notify_all();
        }
    }

    /// A sequence of `identity` from which more of `prompt` can be taken than the `n_held` tokens that are held elsewhere,
    /// if it `pays` to copy it. `wake` is called once what isn't in memory was read, or can't be.
    pub(super) fn find(
        &self,
        identity: &Identity,
        prompt: &[u32],
        n_held: usize,
        pays: impl FnOnce(Copied) -> bool,
        wake: impl FnOnce() + Send + 'static,
    ) -> Option<Found> {
        let label = &identity.label;
        let mut state = self.state();
        let (ids, n_common) = state.longest(identity, prompt)?;
        let place = state.shelves.get(label)?.get(&ids)?;
        let (tier, n_bytes) = match place {
            Place::Host { saved, .. } | Place::Leaving(saved) => (Tier::Host, saved.n_bytes()),
            Place::Disk(name) => (Tier::Disk, state.files.get(name)?.n_bytes),
        };
        let copied = Copied {
            tier,
            n_bytes,
            n_tokens: ids.len(),
            n_saved: n_common.saturating_sub(n_held),
        };
        if !pays(copied) {
            return None;
        }
        let found = match place {
            Place::Host { saved, .. } => Found::Here(Arc::clone(saved), Tier::Host),
            Place::Leaving(saved) => Found::Here(Arc::clone(saved), Tier::Disk),
            Place::Disk(_) if state.is_closed => return None,
            Place::Disk(name) => {
                let (to, from) = channel();
                let read = Read {
                    name: name.clone(),
                    label: *label,
                    to,
                    wake: Box::new(wake),
                };
                state.reads.push_back(read);
                self.readable.notify_all();
                return Some(Found::Fetched(Fetch { from }));
            }
        };
        self.use_again(&mut state, label, &ids);
        Some(found)
    }

    /// Drops a sequence that an engine refuses, whatever it says to be.
    pub(super) fn refuse(&self, identity: &Identity, ids: &[u32], error: &Error) {
        let mut state = self.state();
        self.forget(&mut state, &identity.label, ids);
        self.figure(&state);
        drop(state);
        self.tell_drop(None, error);
    }

    fn tell_drop(&self, file: Option<&str>, error: &Error) {
        self.metrics.count_cache_drop(DropReason::Refused);
        let mut record = json!({"event": "cache", "action": "drop"});
        if let Some(file) = file {
            record["file"] = file.into();
        }
        record["message"] = format!("{error:#}").into();
        tell(&self.log, record);
    }

    fn tell_failure(&self, action: &str, error: &Error) {
        self.metrics.count_cache_drop(DropReason::Failed);
        let message = format!("{error:#}");
        tell(
            &self.log,
            json!({"event": "cache", "action": action, "message": message}),
        );
    }

    /// Tells that a sequence could not be copied out of an engine.
    pub(super) fn tell_unsaved(&self, error: &Error) {
        self.tell_failure("save_failed", error);
    }

    fn figure(&self, state: &State) {
        let n = state.recent.len();
        self.metrics.set_tier(Tier::Host, n, state.n_host_bytes);
        let n_bytes = state.files.values().map(|file| file.n_bytes).sum();
        self.metrics
            .set_tier(Tier::Disk, state.files.len(), n_bytes);
    }

    /// Waits until little is left to be written, so that nothing more is dropped because the disk is slow.
    pub(super) fn settle(&self) {
        let mut state = self.state();
        while state.n_unwritten > 0 && self.disk.is_some() {
            state = self.wait(&self.writable, state, None);
        }
    }

    fn wait<'a>(
        &self,
        changed: &Condvar,
        state: MutexGuard<'a, State>,
        patience: Option<Duration>,
    ) -> MutexGuard<'a, State> {
        match patience {
            None => changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(patience) => {
                let waited = changed.wait_timeout(state, patience);
                waited.unwrap_or_else(PoisonError::into_inner).0
            }
        }
    }

    /// An engine asks no more. After the last one what is in memory goes to disk.
    pub(super) fn end(&self) {
        let mut state = self.state();
        state.n_engines -= 1;
        if state.n_engines > 0 {
            return;
        }
        while let Some((_, (label, ids))) = state.recent.first_key_value() {
            let (label, ids) = (*label, Arc::clone(ids));
            if let Some(Place::Host {
                saved, is_lasting, ..
            }) = state.take(&label, &ids)
                && is_lasting
            {
                while state.n_unwritten > 0 && self.disk.is_some() {
                    state = self.wait(&self.writable, state, None);
                }
                self.send_to_disk(&mut state, &label, saved);
            }
        }
        state.is_closed = true;
        state.is_done = self.disk.is_none();
        self.readable.notify_all();
        self.writable.notify_all();
    }

    /// Waits until all engines have ended and all is on disk, but no longer than `patience`; whether it is.
    pub(super) fn wait_until_done(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let mut state = self.state();
        while !state.is_done {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self.wait(&self.writable, state, Some(left));
        }
        true
    }

    /// Reads what is asked for, until nobody can ask.
    fn read(&self, disk: &Disk) {
        let mut state = self.state();
        loop {
            let Some(read) = state.reads.pop_front() else {
                if state.is_closed {
                    return;
                }
                state = self.wait(&self.readable, state, None);
                continue;
            };
            drop(state);
            let Read {
                name,
                label,
                to,
                wake,
            } = read;
            let begun = Instant::now();
            match disk.folder.read(&name, &label) {
                Ok(saved) => {
                    let took = begun.elapsed();
                    if let Err(error) = disk.folder.touch(&name) {
                        self.tell_failure("touch_failed", &error);
                    }
                    // Whoever is gone needs it no more.
                    let _ = to.send((Arc::new(saved), took));
                }
                Err(error) => self.drop_file(disk, &name, &error),
            }
            // Who is woken finds out that nothing was sent.
            drop(to);
            wake();
            state = self.state();
        }
    }

    /// Writes what there is to write, until nothing more can come.
    fn write(&self, disk: &Disk) {
        let mut state = self.state();
        loop {
            let Some(write) = state.writes.pop_front() else {
                if state.is_closed {
                    state.is_done = true;
                    self.writable.notify_all();
                    return;
                }
                state = self.wait(&self.writable, state, None);
                continue;
            };
            if let Write::Sequence(label, saved) = write {
                let is_wanted = state.is_leaving(&label, &saved);
                drop(state);
                let written = is_wanted.then(|| self.write_sequence(disk, &label, &saved));
                state = self.state();
                state.n_unwritten -= saved.n_bytes();
                self.settle_written(&mut state, &label, &saved, written);
                self.figure(&state);
                self.writable.notify_all();
                continue;
            }
            drop(state);
            let done = match &write {
                Write::Touch(name) => disk.folder.touch(name),
                Write::Remove(name) => disk.folder.remove(name),
                Write::Sequence(..) => Ok(()),
            };
            if let Err(error) = done {
                self.tell_failure("change_failed", &error);
            }
            state = self.state();
        }
    }

    fn write_sequence(
        &self,
        disk: &Disk,
        label: &SequenceLabel,
        saved: &SavedSequence,
    ) -> Result<String> {
        self.make_room(disk, SequenceFolder::file_bytes(saved))?;
        disk.folder.write(label, saved)
    }

    /// Records where `saved` is once it was `written`, or was not to be.
    fn settle_written(
        &self,
        state: &mut State,
        label: &SequenceLabel,
        saved: &Arc<SavedSequence>,
        written: Option<Result<String>>,
    ) {
        let is_wanted = state.is_leaving(label, saved);
        match written {
            None => {}
            Some(Ok(name)) if is_wanted => {
                let ids: Arc<[u32]> = saved.ids().into();
                let stored = Stored {
                    label: *label,
                    ids: Arc::clone(&ids),
                    n_bytes: SequenceFolder::file_bytes(saved),
                };
                state.files.insert(name.clone(), stored);
                state.shelf(label).insert(ids, Place::Disk(name));
            }
            Some(Ok(name)) => {
                // It was forgotten meanwhile, unless what came instead is on its way to the same file.
                let leaves = state
                    .shelves
                    .get(label)
                    .is_some_and(|shelf| shelf.contains_key(saved.ids()));
                if !leaves {
                    state.writes.push_back(Write::Remove(name));
                }
            }
            Some(Err(error)) => {
                if is_wanted {
                    state.take(label, saved.ids());
                }
                self.tell_failure("write_failed", &error);
            }
        }
    }

    /// Makes room for `n_bytes` in the folder: what was used least recently goes, whoever wrote it. What other processes
    /// have written or removed is known afterwards.
    fn make_room(&self, disk: &Disk, n_bytes: u64) -> Result<()> {
        let listed = disk.folder.list()?;
        let mut n_used: u64 = listed.iter().map(|stored| stored.n_bytes).sum();
        let mut kept = HashSet::new();
        for stored in listed {
            if n_used + n_bytes > disk.max_bytes {
                disk.folder.remove(&stored.name)?;
                n_used -= stored.n_bytes;
                continue;
            }
            let is_known = self.state().files.contains_key(&stored.name);
            if !is_known {
                match disk.folder.peek(&stored.name) {
                    Ok((label, ids)) => self.state().add_file(label, &ids, &stored),
                    Err(error) => {
                        self.drop_file(disk, &stored.name, &error);
                        continue;
                    }
                }
            }
            kept.insert(stored.name);
        }
        let mut state = self.state();
        let gone = state.files.keys().filter(|name| !kept.contains(*name));
        let gone: Vec<String> = gone.cloned().collect();
        for name in gone {
            state.remove_file(&name);
        }
        self.figure(&state);
        Ok(())
    }

    /// Removes a file that isn't what it should be. One that is gone was removed by another process.
    fn drop_file(&self, disk: &Disk, name: &str, error: &Error) {
        let mut state = self.state();
        state.remove_file(name);
        self.figure(&state);
        drop(state);
        if error.code() == ErrorCode::NotFound {
            return;
        }
        self.tell_drop(Some(name), error);
        if let Err(error) = disk.folder.remove(name) {
            self.tell_failure("change_failed", &error);
        }
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn shelf(&mut self, label: &SequenceLabel) -> &mut Shelf {
        self.shelves.entry(*label).or_default()
    }

    /// Takes a sequence out of its place.
    fn take(&mut self, label: &SequenceLabel, ids: &[u32]) -> Option<Place> {
        let shelf = self.shelves.get_mut(label)?;
        let place = shelf.remove(ids)?;
        if shelf.is_empty() {
            self.shelves.remove(label);
        }
        if let Place::Host { saved, used, .. } = &place {
            self.n_host_bytes -= saved.n_bytes();
            self.recent.remove(used);
        }
        Some(place)
    }

    /// Whether `saved` is on its way to disk, and wasn't forgotten meanwhile.
    fn is_leaving(&self, label: &SequenceLabel, saved: &Arc<SavedSequence>) -> bool {
        let place = self
            .shelves
            .get(label)
            .and_then(|shelf| shelf.get(saved.ids()));
        matches!(place, Some(Place::Leaving(own)) if Arc::ptr_eq(own, saved))
    }

    fn add_file(&mut self, label: SequenceLabel, ids: &[u32], stored: &StoredSequence) {
        let ids: Arc<[u32]> = ids.into();
        let file = Stored {
            label,
            ids: Arc::clone(&ids),
            n_bytes: stored.n_bytes,
        };
        self.files.insert(stored.name.clone(), file);
        let place = Place::Disk(stored.name.clone());
        self.shelf(&label).entry(ids).or_insert(place);
    }

    /// Forgets the file called `name`.
    fn remove_file(&mut self, name: &str) {
        let Some(Stored { label, ids, .. }) = self.files.remove(name) else {
            return;
        };
        let place = self.shelves.get(&label).and_then(|shelf| shelf.get(&ids));
        if matches!(place, Some(Place::Disk(own)) if own == name) {
            self.take(&label, &ids);
        }
    }

    /// The sequences that are beginnings of `ids`, the longest first.
    fn prefixes(&self, label: &SequenceLabel, ids: &[u32]) -> Vec<Arc<[u32]>> {
        let mut all = Vec::new();
        let Some(shelf) = self.shelves.get(label) else {
            return all;
        };
        let mut bound = Bound::Excluded(ids);
        while let Some(own) = before(shelf, bound) {
            let n = n_common(own, ids);
            bound = match n == own.len() {
                true => {
                    all.push(Arc::clone(own));
                    Bound::Excluded(&ids[..n])
                }
                false => Bound::Included(&ids[..n]),
            };
        }
        all
    }

    /// The sequence of `identity` from which most of `prompt` can be taken, and how many tokens.
    fn longest(&self, identity: &Identity, prompt: &[u32]) -> Option<(Arc<[u32]>, usize)> {
        let shelf = self.shelves.get(&identity.label)?;
        if identity.is_whole {
            let mut bound = prompt;
            loop {
                let own = before(shelf, Bound::Included(bound))?;
                let n = n_common(own, prompt);
                if n == own.len() {
                    return Some((Arc::clone(own), n));
                }
                bound = &prompt[..n];
            }
        }
        // Nothing has more in common with it than its neighbours.
        let neighbours = [
            before(shelf, Bound::Included(prompt)),
            after(shelf, Bound::Excluded(prompt)),
        ];
        let common = |own: &Arc<[u32]>| (Arc::clone(own), n_common(own, prompt));
        let all = neighbours.into_iter().flatten().map(common);
        all.max_by_key(|(_, n)| *n)
    }
}

/// The last in `shelf` up to `bound`.
fn before<'a>(shelf: &'a Shelf, bound: Bound<&[u32]>) -> Option<&'a Arc<[u32]>> {
    let range = shelf.range::<[u32], _>((Bound::Unbounded, bound));
    Some(range.into_iter().next_back()?.0)
}

/// The first in `shelf` from `bound` on.
fn after<'a>(shelf: &'a Shelf, bound: Bound<&[u32]>) -> Option<&'a Arc<[u32]>> {
    let mut range = shelf.range::<[u32], _>((bound, Bound::Unbounded));
    Some(range.next()?.0)
}
