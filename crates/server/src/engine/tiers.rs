//! Where sequences go that engines have no room for: into memory of the host, and from there to disk.
//!
//! All engines share it. What was computed by the same model, adapters and settings on the same kind of device has the
//! same [`Identity`], and is found by its tokens. Two threads read and write the disk; an engine copies to and from
//! memory, and is woken when what it waits for was read.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;
use sterna::native::{SequenceFolder, SequenceLabel, StoredSequence};
use sterna::sequence::SavedSequence;
use sterna::{Error, ErrorCode, Result};

use super::prefix::{Near, Prefixes};
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
    pub(super) is_whole: bool,
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
    /// All sequences, each by a number of its own, by what computed them and their tokens: no two are of the same.
    sequences: Prefixes<SequenceLabel, u64>,
    kept: HashMap<u64, Kept>,
    /// The number of the last one.
    last: u64,
    /// What is in memory of the host, by when it was used last.
    recent: BTreeMap<u64, u64>,
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

/// A sequence.
struct Kept {
    label: SequenceLabel,
    place: Place,
}

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
    /// The number of its sequence.
    number: u64,
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
    Sequence {
        number: u64,
        label: SequenceLabel,
        saved: Arc<SavedSequence>,
    },
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
        // One that goes on may be cut.
        let nearest = state.sequences.nearest(&identity.label, ids);
        let part = nearest.filter(|near| near.n_common == ids.len());
        let known = part.filter(|near| !identity.is_whole || near.len == ids.len());
        match known {
            Some(known) => {
                self.use_again(&mut state, known.id);
                false
            }
            None => true,
        }
    }

    /// Takes `saved`, which was computed as `identity` says.
    pub(super) fn put(&self, identity: &Identity, saved: SavedSequence) {
        let (label, saved) = (identity.label, Arc::new(saved));
        let ids = saved.ids();
        let mut state = self.state();
        // What is a part of it is of no use any more, unless it is one that can be gone on from.
        let n_kept = if identity.is_whole { MAX_BEGINNINGS } else { 0 };
        let beginnings = state.sequences.beginnings(&label, ids);
        let (same, parts): (Vec<_>, Vec<_>) = beginnings.partition(|near| near.len == ids.len());
        for near in same.iter().chain(parts.iter().skip(n_kept)) {
            self.forget(&mut state, near.id);
        }
        let n_bytes = saved.n_bytes();
        if n_bytes <= self.host_bytes {
            state.n_host_bytes += n_bytes;
            let (used, number) = (state.tick(), state.number(label, ids));
            state.recent.insert(used, number);
            let place = Place::Host {
                saved,
                used,
                is_lasting: identity.is_lasting,
            };
            state.kept.insert(number, Kept { label, place });
        } else if identity.is_lasting {
            self.send_to_disk(&mut state, label, saved);
        }
        self.bound_host(&mut state, self.host_bytes);
        self.figure(&state);
    }

    /// Moves sequences out of memory, the least recently used first, until there are at most `most` bytes.
    fn bound_host(&self, state: &mut State, most: u64) {
        while state.n_host_bytes > most {
            let Some((label, saved)) = state.take_oldest() else {
                return;
            };
            if let Some(saved) = saved {
                self.send_to_disk(state, label, saved);
            }
        }
    }

    /// Has `saved` written to disk, if there is one with room for it, and it keeps up.
    fn send_to_disk(&self, state: &mut State, label: SequenceLabel, saved: Arc<SavedSequence>) {
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
        let number = state.number(label, saved.ids());
        state.kept.insert(number, Kept { label, place });
        let write = Write::Sequence {
            number,
            label,
            saved,
        };
        state.writes.push_back(write);
        self.writable.notify_all();
    }

    /// Records that a sequence was used.
    fn use_again(&self, state: &mut State, number: u64) {
        let now = state.tick();
        match state.kept.get_mut(&number).map(|kept| &mut kept.place) {
            Some(Place::Host { used, .. }) => {
                let before = std::mem::replace(used, now);
                state.recent.remove(&before);
                state.recent.insert(now, number);
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
    fn forget(&self, state: &mut State, number: u64) {
        if let Some(Place::Disk(name)) = state.take(number) {
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
        let mut state = self.state();
        let near = state.longest(identity, prompt)?;
        let place = &state.kept.get(&near.id)?.place;
        let (tier, n_bytes) = match place {
            Place::Host { saved, .. } | Place::Leaving(saved) => (Tier::Host, saved.n_bytes()),
            Place::Disk(name) => (Tier::Disk, state.files.get(name)?.n_bytes),
        };
        let copied = Copied {
            tier,
            n_bytes,
            n_tokens: near.len,
            n_saved: near.n_common.saturating_sub(n_held),
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
                    label: identity.label,
                    to,
                    wake: Box::new(wake),
                };
                state.reads.push_back(read);
                self.readable.notify_all();
                return Some(Found::Fetched(Fetch { from }));
            }
        };
        self.use_again(&mut state, near.id);
        Some(found)
    }

    /// Drops a sequence that an engine refuses, whatever it says to be.
    pub(super) fn refuse(&self, identity: &Identity, ids: &[u32], error: &Error) {
        let mut state = self.state();
        if let Some(number) = state.exact(&identity.label, ids) {
            self.forget(&mut state, number);
        }
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
        while let Some((label, saved)) = state.take_oldest() {
            if let Some(saved) = saved {
                while state.n_unwritten > 0 && self.disk.is_some() {
                    state = self.wait(&self.writable, state, None);
                }
                self.send_to_disk(&mut state, label, saved);
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
            if let Write::Sequence {
                number,
                label,
                saved,
            } = write
            {
                let is_wanted = state.is_leaving(number);
                drop(state);
                let written = is_wanted.then(|| self.write_sequence(disk, &label, &saved));
                state = self.state();
                state.n_unwritten -= saved.n_bytes();
                self.settle_written(&mut state, number, (&label, &saved), written);
                self.figure(&state);
                self.writable.notify_all();
                continue;
            }
            drop(state);
            let done = match &write {
                Write::Touch(name) => disk.folder.touch(name),
                Write::Remove(name) => disk.folder.remove(name),
                Write::Sequence { .. } => Ok(()),
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

    /// Records where the sequence `number`, which was `saved`, is once it was `written`, or was not to be.
    fn settle_written(
        &self,
        state: &mut State,
        number: u64,
        (label, saved): (&SequenceLabel, &SavedSequence),
        written: Option<Result<String>>,
    ) {
        let is_wanted = state.is_leaving(number);
        match written {
            Some(Ok(name)) if is_wanted => {
                let stored = Stored {
                    number,
                    n_bytes: SequenceFolder::file_bytes(saved),
                };
                state.files.insert(name.clone(), stored);
                if let Some(kept) = state.kept.get_mut(&number) {
                    kept.place = Place::Disk(name);
                }
            }
            // It was forgotten meanwhile, unless what came instead is on its way to the same file.
            Some(Ok(name)) if state.exact(label, saved.ids()).is_none() => {
                state.writes.push_back(Write::Remove(name));
            }
            None | Some(Ok(_)) => {}
            Some(Err(error)) => {
                if is_wanted {
                    state.take(number);
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

    /// A number for a sequence of `label`, which there is none of with the same tokens.
    fn number(&mut self, label: SequenceLabel, ids: &[u32]) -> u64 {
        self.last += 1;
        self.sequences.insert(label, self.last, ids);
        self.last
    }

    /// Takes a sequence out of its place.
    fn take(&mut self, number: u64) -> Option<Place> {
        let Kept { label, place } = self.kept.remove(&number)?;
        self.sequences.remove(&label, number);
        if let Place::Host { saved, used, .. } = &place {
            self.n_host_bytes -= saved.n_bytes();
            self.recent.remove(used);
        }
        Some(place)
    }

    /// Takes what was used least recently out of memory of the host: what it was computed by, and it itself if it may go
    /// to disk.
    fn take_oldest(&mut self) -> Option<(SequenceLabel, Option<Arc<SavedSequence>>)> {
        let number = *self.recent.first_key_value()?.1;
        let label = self.kept.get(&number)?.label;
        let saved = match self.take(number)? {
            Place::Host {
                saved,
                is_lasting: true,
                ..
            } => Some(saved),
            _ => None,
        };
        Some((label, saved))
    }

    /// Whether a sequence is on its way to disk, and wasn't forgotten meanwhile.
    fn is_leaving(&self, number: u64) -> bool {
        let kept = self.kept.get(&number);
        kept.is_some_and(|kept| matches!(kept.place, Place::Leaving(_)))
    }

    fn add_file(&mut self, label: SequenceLabel, ids: &[u32], stored: &StoredSequence) {
        let number = self.exact(&label, ids).unwrap_or_else(|| {
            let number = self.number(label, ids);
            let place = Place::Disk(stored.name.clone());
            self.kept.insert(number, Kept { label, place });
            number
        });
        let file = Stored {
            number,
            n_bytes: stored.n_bytes,
        };
        self.files.insert(stored.name.clone(), file);
    }

    /// Forgets the file called `name`.
    fn remove_file(&mut self, name: &str) {
        let Some(Stored { number, .. }) = self.files.remove(name) else {
            return;
        };
        let place = self.kept.get(&number).map(|kept| &kept.place);
        if matches!(place, Some(Place::Disk(own)) if own == name) {
            self.take(number);
        }
    }

    /// The sequence of these tokens.
    fn exact(&self, label: &SequenceLabel, ids: &[u32]) -> Option<u64> {
        let longest = self.sequences.beginnings(label, ids).next();
        longest
            .filter(|near| near.len == ids.len())
            .map(|near| near.id)
    }

    /// The sequence of `identity` from which most of `prompt` can be taken: of those that can be cut, any; of others, one
    /// that is a beginning of it.
    fn longest(&self, identity: &Identity, prompt: &[u32]) -> Option<Near<u64>> {
        let sequences = &self.sequences;
        let mut longest = sequences.continued(&identity.label, prompt, identity.is_whole);
        longest.next()
    }
}
