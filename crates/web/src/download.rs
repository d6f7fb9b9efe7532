//! Fetching a model's files into the browser's storage, with the planner that native programs use.

mod signal;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use js_sys::Function;
use sterna::{Error, ErrorCode, Result};
use sterna_delivery::fetch::{
    Action, Blob, Failure, Fault, Fetch, HashJob, Head, Limits, RangeSet, RateLimit, Transfer,
};
use sterna_delivery::hash::{Digest, Expected, Verified, Verifier};
use sterna_delivery::peers::{Reply, Request};
use sterna_delivery::sign::{PublicKey, TrustList};
use sterna_delivery::source::Url;
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;
use wasm_bindgen_futures::spawn_local;

use crate::js::{self, Body, Disk, Http, Peer, coded, failure, from_js, to_js};
use crate::options::{DownloadOptions, DownloadProgress, ListedFile, SourceBytes, Trusted};
use crate::remote::{Remote, head};

use self::signal::Signal;

/// How often progress is told and cancellation looked for.
const TICK: Duration = Duration::from_millis(100);
/// Bytes of a file that may be stored without being noted: what a tab that is killed fetches again.
const NOTE_EVERY: u64 = 1 << 20;
/// Bytes that are read back at once.
const PIECE: u64 = 1 << 20;

/// Fetches a model into a [`Disk`]; nothing becomes a complete file before it is verified.
#[wasm_bindgen]
pub struct Download {
    remote: Remote,
    shared: Rc<Shared>,
    limits: Limits,
    /// Which files are complete, by the order of the blobs.
    here: RefCell<Vec<bool>>,
    is_cancelled: Rc<Cell<bool>>,
}

/// What the tasks of a download share.
struct Shared {
    blobs: Vec<Blob>,
    /// Where bytes come from, by the planner's index.
    places: RefCell<Vec<Place>>,
    disk: Disk,
    http: Http,
    rate_limit: Option<RefCell<RateLimit>>,
    messages: RefCell<VecDeque<Message>>,
    signal: Signal,
    /// What is stored of arriving files, and how much of that isn't noted.
    stored: RefCell<HashMap<usize, (RangeSet, u64)>>,
}

/// A source.
#[derive(Clone)]
enum Place {
    /// A folder on a server.
    Folder(Url),
    /// Another tab, which has the package whose manifest has this SHA-256.
    Peer(Peer, Digest),
}

/// What a task has done, or what JavaScript says.
enum Message {
    Peer(String, Place),
    Progress(u64, u64),
    Transferred(Transfer, Result<(), Stop>),
    Hashed(HashJob, Result<()>),
    Committed(usize, Result<()>),
}

/// Why a transfer ended.
enum Stop {
    Fault(Fault),
    Disk(Error),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Disk(error)
    }
}

#[wasm_bindgen]
impl Download {
    /// Reads what there is to fetch at `addresses`: all but the first are mirrors.
    pub async fn open(
        addresses: Vec<String>,
        disk: Disk,
        http: Http,
        options: JsValue,
    ) -> Result<Download, JsValue> {
        let parsed: DownloadOptions = from_js("options", &options)?;
        let trust = trust_list(&parsed.trust)?;
        let found = Remote::find(&addresses, &disk, &http, parsed.file.as_deref(), &trust).await;
        let remote = found.map_err(|error| failure(&error))?;
        let limits = Limits {
            parallel: parsed.parallel.unwrap_or(Limits::default().parallel),
            bytes_per_second: parsed.bytes_per_second,
            // A file is needed from its beginning, and arrives in parts.
            segment_bytes: 8 << 20,
            seed: parsed.seed,
            ..Limits::default()
        };
        let shared = Rc::new(Shared {
            blobs: remote.blobs.clone(),
            places: RefCell::new(remote.bases.iter().cloned().map(Place::Folder).collect()),
            disk,
            http,
            rate_limit: limits
                .bytes_per_second
                .map(|rate| RefCell::new(RateLimit::new(rate))),
            messages: RefCell::default(),
            signal: Signal::default(),
            stored: RefCell::default(),
        });
        let mut here = Vec::new();
        for blob in &shared.blobs {
            let len = shared.disk.len(blob.name()).await;
            here.push(len.map_err(|error| failure(&error))? == Some(blob.size()));
        }
        Ok(Download {
            remote,
            shared,
            limits,
            here: RefCell::new(here),
            is_cancelled: Rc::default(),
        })
    }

    /// All files, in the order in which they are fetched.
    pub fn files(&self) -> Result<JsValue, JsValue> {
        let small = self.remote.small().map(|(name, size)| ListedFile {
            name,
            size,
            here: true,
        });
        let here = self.here.borrow();
        let blobs = self.shared.blobs.iter().zip(&*here);
        let blobs = blobs.map(|(blob, &here)| ListedFile {
            name: blob.name(),
            size: blob.size(),
            here,
        });
        to_js(&small.chain(blobs).collect::<Vec<_>>())
    }

    /// The manifest of a package.
    pub fn manifest(&self) -> Option<String> {
        self.remote.manifest.clone()
    }

    /// The SHA-256 of that manifest.
    pub fn digest(&self) -> Option<String> {
        self.remote.digest.map(|digest| digest.to_string())
    }

    /// One more source of a package, called `name`, also while it is fetched: what it sends counts as far as the
    /// manifest's hashes say so.
    #[wasm_bindgen(js_name = addPeer)]
    pub fn add_peer(&self, name: String, peer: Peer) -> Result<(), JsValue> {
        let digest = self.remote.digest.ok_or_else(|| {
            coded(
                "unsupported",
                "expected a package, which peers share, found a single file",
            )
        })?;
        self.shared
            .tell(Message::Peer(name, Place::Peer(peer, digest)));
        Ok(())
    }

    /// Fetches what isn't here. `committed` is called with the name of each file that is complete, `progress`
    /// about ten times a second, and `lied` with the name of a source that sent something false, and what that was.
    pub async fn run(
        &self,
        committed: Function,
        progress: Function,
        lied: Function,
    ) -> Result<(), JsValue> {
        let stored = self.remote.store(&self.shared.disk).await;
        stored.map_err(|error| failure(&error))?;
        for (name, _) in self.remote.small() {
            js::call(&committed, &[name.into()]);
        }
        let sources = self.remote.bases.iter().map(Url::to_string).collect();
        let fetch = Fetch::new(self.shared.blobs.clone(), sources, self.limits.clone());
        let mut driver = Driver {
            download: self,
            fetch: fetch.map_err(|error| coded("invalid_file", &error.to_string()))?,
            running: BTreeMap::new(),
            committed,
            progress,
            lied,
        };
        let outcome = driver.run().await;
        for running in driver.running.values() {
            running.set(true);
        }
        let noted = self.note_all().await;
        outcome?;
        noted.map_err(|error| failure(&error))
    }

    /// Ends [`Download::run`]; what has arrived stays for the next.
    pub fn cancel(&self) {
        self.is_cancelled.set(true);
        self.shared.signal.wake();
    }

    /// Hashes every complete file again, and removes those that are wrong: their names.
    pub async fn verify(&self) -> Result<Vec<String>, JsValue> {
        let mut wrong = Vec::new();
        for (index, blob) in self.shared.blobs.iter().enumerate() {
            if !self.here.borrow()[index] {
                continue;
            }
            let right = self.shared.is_right(blob).await;
            if !right.map_err(|error| failure(&error))? {
                let removed = self.shared.disk.remove(blob.name()).await;
                removed.map_err(|error| failure(&error))?;
                self.here.borrow_mut()[index] = false;
                wrong.push(blob.name().to_owned());
            }
        }
        Ok(wrong)
    }
}

impl Download {
    async fn note_all(&self) -> Result<()> {
        let arriving: Vec<usize> = self.shared.stored.borrow().keys().copied().collect();
        for blob in arriving {
            self.shared.note(blob).await?;
        }
        Ok(())
    }
}

fn trust_list(keys: &[Trusted]) -> Result<TrustList, JsValue> {
    let mut list = TrustList::default();
    for trusted in keys {
        let key = PublicKey::parse(&trusted.key);
        let key = key.map_err(|error| coded("invalid_request", &error.to_string()))?;
        list.insert(trusted.name.clone(), key);
    }
    Ok(list)
}

/// The loop that does what the planner says.
struct Driver<'a> {
    download: &'a Download,
    fetch: Fetch,
    /// Transfers in progress, and whether they are to end.
    running: BTreeMap<u64, Rc<Cell<bool>>>,
    committed: Function,
    progress: Function,
    lied: Function,
}

impl Driver<'_> {
    async fn run(&mut self) -> Result<(), JsValue> {
        let shared = Rc::clone(&self.download.shared);
        for index in 0..shared.blobs.len() {
            if self.download.here.borrow()[index] {
                self.fetch.committed(index);
                self.tell_committed(index);
            } else {
                let left = shared.left(index).await.map_err(|error| failure(&error))?;
                self.fetch.stored(index, &left);
            }
        }
        let mut told = None;
        loop {
            if self.download.is_cancelled.get() {
                return Err(coded("cancelled", "the download was cancelled"));
            }
            while let Some((source, why)) = self.fetch.next_liar() {
                let name = self.fetch.received_by().nth(source);
                let name = name.map_or("", |(name, _)| name);
                js::call(&self.lied, &[name.into(), why.into()]);
            }
            let now = js::now();
            match self.fetch.poll(now) {
                Action::Transfer(transfer) => self.start(transfer),
                Action::Hash(job) => {
                    let shared = Rc::clone(&shared);
                    spawn_local(async move {
                        let mut job = job;
                        let outcome = shared.read_back(&mut job).await;
                        shared.tell(Message::Hashed(job, outcome));
                    });
                }
                Action::Cancel(id) => {
                    if let Some(running) = self.running.get(&id) {
                        running.set(true);
                    }
                }
                Action::Discard { blob, range } => {
                    if let Some((ranges, _)) = shared.stored.borrow_mut().get_mut(&blob) {
                        ranges.remove(range);
                    }
                    shared.note(blob).await.map_err(|error| failure(&error))?;
                }
                Action::Commit { blob, .. } => {
                    let shared = Rc::clone(&shared);
                    spawn_local(async move {
                        let outcome = shared.disk.commit(shared.blobs[blob].name()).await;
                        shared.stored.borrow_mut().remove(&blob);
                        shared.tell(Message::Committed(blob, outcome));
                    });
                }
                Action::Wait(until) => {
                    if told.is_none_or(|told| now >= told + TICK) {
                        told = Some(now);
                        self.tell_progress()?;
                    }
                    let left = until.map_or(TICK, |until| until.saturating_sub(now).min(TICK));
                    shared.signal.wait(left).await;
                    loop {
                        let message = shared.messages.borrow_mut().pop_front();
                        let Some(message) = message else {
                            break;
                        };
                        self.take(message)?;
                    }
                }
                Action::Done => return self.tell_progress(),
                Action::Failed(error) => {
                    let code = match &error {
                        Failure::Exhausted { .. } => "io",
                        _ => "hash_mismatch",
                    };
                    return Err(coded(code, &error.to_string()));
                }
                _ => {
                    return Err(coded(
                        "unsupported",
                        "the planner asks for something unknown",
                    ));
                }
            }
        }
    }

    fn tell_progress(&self) -> Result<(), JsValue> {
        let so_far = self.fetch.so_far();
        let sources = self.fetch.received_by();
        let sources = sources.map(|(name, bytes)| SourceBytes {
            name: name.to_owned(),
            bytes,
        });
        let progress = to_js(&DownloadProgress {
            done_bytes: so_far.done_bytes,
            total_bytes: so_far.total_bytes,
            received_bytes: so_far.received_bytes,
            sources: sources.collect(),
        })?;
        js::call(&self.progress, &[progress]);
        Ok(())
    }

    fn tell_committed(&self, index: usize) {
        let name = self.download.shared.blobs[index].name();
        js::call(&self.committed, &[name.into()]);
    }

    fn start(&mut self, transfer: Transfer) {
        let flag = Rc::new(Cell::new(false));
        self.running.insert(transfer.id(), Rc::clone(&flag));
        let shared = Rc::clone(&self.download.shared);
        spawn_local(async move {
            let mut transfer = transfer;
            let outcome = shared.transfer(&mut transfer, &flag).await;
            shared.tell(Message::Transferred(transfer, outcome));
        });
    }

    fn take(&mut self, message: Message) -> Result<(), JsValue> {
        let now = js::now();
        match message {
            Message::Peer(name, place) => {
                self.fetch.add_stranger(name);
                self.download.shared.places.borrow_mut().push(place);
            }
            Message::Progress(id, received) => self.fetch.progress(id, received, now),
            Message::Transferred(transfer, outcome) => {
                self.running.remove(&transfer.id());
                let outcome = match outcome {
                    Ok(()) => Ok(()),
                    Err(Stop::Fault(fault)) => Err(fault),
                    Err(Stop::Disk(error)) => return Err(failure(&error)),
                };
                self.fetch.transferred(transfer, outcome, now);
            }
            Message::Hashed(job, outcome) => {
                outcome.map_err(|error| failure(&error))?;
                self.fetch.hashed(job);
            }
            Message::Committed(blob, outcome) => {
                outcome.map_err(|error| failure(&error))?;
                self.fetch.committed(blob);
                self.download.here.borrow_mut()[blob] = true;
                self.tell_committed(blob);
            }
        }
        Ok(())
    }
}

impl Shared {
    fn tell(&self, message: Message) {
        self.messages.borrow_mut().push_back(message);
        self.signal.wake();
    }

    async fn transfer(&self, transfer: &mut Transfer, cancel: &Cell<bool>) -> Result<(), Stop> {
        let request = transfer.request();
        let index = request.blob;
        let blob = &self.blobs[index];
        let place = self.places.borrow()[request.source].clone();
        let range = request.range.clone();
        let (head, body) = match place {
            Place::Folder(base) => {
                let url = base.below(&request.name).to_string();
                let answer = self.http.open(&url, range).await;
                let answer = answer.map_err(|message| Fault::Unreachable { message })?;
                (Ok(head(&answer)), Body::from(answer))
            }
            Place::Peer(peer, manifest) => {
                let request = Request::new(manifest, &request.name, range.clone());
                let answer = peer.ask(&request.to_json()).await?;
                let reply = Reply::read(answer.reply().as_bytes());
                let head = reply.and_then(|reply| Ok(Reply::head(reply.size()?, range)));
                (head, Body::from(answer))
            }
        };
        let outcome = self
            .receive(transfer, head, &body, index, blob, cancel)
            .await;
        if outcome.is_err() || !transfer.is_complete() {
            body.cancel();
        }
        outcome
    }

    async fn receive(
        &self,
        transfer: &mut Transfer,
        head: Result<Head, Fault>,
        body: &Body,
        index: usize,
        blob: &Blob,
        cancel: &Cell<bool>,
    ) -> Result<(), Stop> {
        transfer.begin(&head?)?;
        while !transfer.is_complete() {
            if cancel.get() {
                return Err(Fault::Cancelled.into());
            }
            let piece = match body.read().await {
                Ok(Some(piece)) => piece,
                Ok(None) => return Ok(transfer.end()?),
                Err(message) => return Err(Fault::Unreachable { message }.into()),
            };
            let offset = transfer.offset();
            let wanted = transfer.wanted(&piece)?;
            self.disk.write_at(blob.name(), offset, wanted).await?;
            let end = offset + wanted.len() as u64;
            let is_due = {
                let mut stored = self.stored.borrow_mut();
                let (ranges, fresh) = stored.entry(index).or_default();
                ranges.insert(offset..end);
                *fresh += end - offset;
                *fresh >= NOTE_EVERY
            };
            if is_due {
                self.note(index).await?;
            }
            transfer.stored(wanted)?;
            self.tell(Message::Progress(transfer.id(), transfer.received()));
            if let Some(rate_limit) = &self.rate_limit {
                let wait = rate_limit.borrow_mut().take(piece.len(), js::now());
                js::sleep(wait.as_secs_f64() * 1000.0).await;
            }
        }
        Ok(())
    }

    /// What an earlier download left of a file.
    async fn left(&self, index: usize) -> Result<RangeSet> {
        let blob = &self.blobs[index];
        let journal = self.disk.journal(blob.name()).await?;
        let ranges = journal.map_or_else(RangeSet::new, |journal| parse_journal(blob, &journal));
        self.stored.borrow_mut().insert(index, (ranges.clone(), 0));
        Ok(ranges)
    }

    /// Notes what is stored of a file that is arriving.
    async fn note(&self, index: usize) -> Result<()> {
        let blob = &self.blobs[index];
        let journal = {
            let mut stored = self.stored.borrow_mut();
            let Some((ranges, fresh)) = stored.get_mut(&index) else {
                return Ok(());
            };
            *fresh = 0;
            journal(blob, ranges)
        };
        self.disk.note(blob.name(), &journal).await
    }

    async fn read_back(&self, job: &mut HashJob) -> Result<()> {
        let blob = &self.blobs[job.blob()];
        while !job.remaining().is_empty() {
            let range = job.remaining();
            let end = range.end.min(range.start.saturating_add(PIECE));
            let bytes = self.disk.read_back(blob.name(), range.start..end).await?;
            if bytes.is_empty() {
                return Err(Error::new(
                    ErrorCode::Io,
                    format!("{}: ends too soon", blob.name()),
                ));
            }
            job.take(&bytes);
        }
        Ok(())
    }

    /// Whether the complete file is what it is said to be.
    async fn is_right(&self, blob: &Blob) -> Result<bool> {
        if blob.expected() == Expected::SizeOnly {
            return Ok(self.disk.len(blob.name()).await? == Some(blob.size()));
        }
        let mut verifiers = vec![Verifier::new(blob.expected(), blob.size())];
        verifiers.extend(blob.expected().second_verifier());
        let mut at = 0;
        while at < blob.size() {
            let end = blob.size().min(at + PIECE);
            let bytes = self.disk.read(blob.name(), at..end).await?;
            if bytes.is_empty() {
                return Ok(false);
            }
            verifiers
                .iter_mut()
                .for_each(|verifier| verifier.update(&bytes));
            at += bytes.len() as u64;
        }
        let right = |verifier: Verifier| -> bool {
            let verified: Result<Verified, _> = verifier.finish();
            verified.is_ok()
        };
        Ok(verifiers.into_iter().any(right))
    }
}

/// What is stored of `blob`: a line that says what it is, then a line for each range.
fn journal(blob: &Blob, ranges: &RangeSet) -> String {
    let mut text = blob.identity();
    for range in ranges.iter() {
        text.push_str(&format!("{}-{}\n", range.start, range.end));
    }
    text
}

/// Reads a journal; one of another file says nothing.
fn parse_journal(blob: &Blob, journal: &str) -> RangeSet {
    let mut ranges = RangeSet::new();
    let lines = journal.strip_prefix(&blob.identity()).unwrap_or_default();
    for line in lines.lines() {
        let range = line.split_once('-');
        let range = range.and_then(|(start, end)| Some((start.parse().ok()?, end.parse().ok()?)));
        if let Some((start, end)) = range
            && start < end
            && end <= blob.size()
        {
            ranges.insert(start..end);
        }
    }
    ranges
}
