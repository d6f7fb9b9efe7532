//! Fetching a model into the store.

use std::{
    collections::{HashMap, HashSet},
    fs::{self, File},
    io::{self, Write},
    iter,
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::{
    hash::{Algorithm, Verified, digest_of},
    positioned,
};

use super::{
    Blob, Entry, Piece, StoreError,
    blob::Layout,
    disk::{self, Lock},
    incoming::{Incoming, Trust},
    revision,
};

/// The file in which a pull lists the blobs it needs, so that none is deleted meanwhile.
pub(super) const CLAIMS: &str = "claims";
/// Maximum size of that file: 700,000 blobs.
pub(super) const MAX_CLAIMS_BYTES: u64 = 64 << 20;
/// Blobs whose files are open at a time, two each: a process may open a few hundred, and a model may have
/// thousands.
const MAX_OPEN: usize = 24;
/// Bytes copied at once from one blob to another.
const COPY: u64 = 1 << 20;

/// A model being fetched into the store; one process, and one `Pull` in it, at a time for each model.
///
/// Its methods may be called from several threads. If it is dropped before [`publish`](Self::publish), what
/// has arrived stays for the next pull of the same name to resume, as when the process is killed.
#[derive(Debug)]
pub struct Pull {
    layout: Layout,
    name: String,
    folder: PathBuf,
    claims: Mutex<Claims>,
    arriving: Mutex<HashMap<Blob, Arc<Mutex<Option<Incoming>>>>>,
    /// Blobs that were named by something else than their digest.
    unhashed: Mutex<HashSet<Blob>>,
    _lock: Lock,
}

#[derive(Debug)]
struct Claims {
    file: File,
    path: PathBuf,
    blobs: HashSet<Blob>,
}

impl Pull {
    /// To be called with both locks held: the store's shared, and the one of the model.
    pub(super) fn begin(layout: Layout, name: &str, lock: Lock) -> Result<Self, StoreError> {
        let folder = layout.fetching(name);
        disk::create_folder(&folder)?;
        // What an interrupted pull brought is still needed. Cut short by a crash, this says too little, and
        // what is swept then is fetched again.
        let path = folder.join(CLAIMS);
        disk::clear_way(&path).map_err(StoreError::io("take away the folder", &path))?;
        let blobs: HashSet<_> = match read_claims(&folder) {
            // Damaged: too large to be ours.
            Err(StoreError::Index { .. }) => HashSet::new(),
            claims => claims?.into_iter().collect(),
        };
        let mut file = File::create(&path).map_err(StoreError::io("create", &path))?;
        let text: String = blobs.iter().map(claim_line).collect();
        (file.write_all(text.as_bytes())).map_err(StoreError::io("write", &path))?;
        Ok(Self {
            layout,
            name: name.to_owned(),
            folder,
            claims: Mutex::new(Claims { file, path, blobs }),
            arriving: Mutex::default(),
            unhashed: Mutex::default(),
            _lock: lock,
        })
    }

    /// The name that the model will have.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Contiguous bytes of `blob` that are there, from the first on: all of them only if they are verified
    /// and in the store.
    ///
    /// From now on, nothing of `blob` is deleted before this pull ends.
    pub fn present(&self, blob: &Blob) -> Result<u64, StoreError> {
        if self.claim(blob)? {
            return Ok(blob.size);
        }
        let slot = self.slot(blob);
        let mut slot = lock(&slot);
        // Nothing is created to find that nothing is there, and nothing stays open.
        let prefix = match &*slot {
            Some(incoming) => incoming.extents().prefix(),
            None if blob.size > 0 && !Incoming::exists(&self.folder, blob)? => return Ok(0),
            None => Incoming::open(&self.folder, *blob)?.extents().prefix(),
        };
        if prefix < blob.size {
            return Ok(prefix);
        }
        // Killed just before it was committed.
        match self.open_in(&mut slot, blob)?.verify() {
            Ok(()) => self.finish(&mut slot, blob).map(|_| blob.size),
            Err(StoreError::Mismatch { .. }) => Ok(0),
            Err(error) => Err(error),
        }
    }

    /// Which bytes of `blob` have arrived: ranges that neither overlap nor touch, in order.
    pub fn extents(&self, blob: &Blob) -> Result<Vec<Range<u64>>, StoreError> {
        if self.claim(blob)? {
            return Ok(iter::once(0..blob.size).collect());
        }
        let slot = self.slot(blob);
        let slot = lock(&slot);
        Ok(match &*slot {
            Some(incoming) => incoming.extents().ranges().to_vec(),
            None if !Incoming::exists(&self.folder, blob)? => Vec::new(),
            None => Incoming::open(&self.folder, *blob)?
                .extents()
                .ranges()
                .to_vec(),
        })
    }

    /// Stores bytes of `blob` at `offset`. They may arrive in any order, and repeatedly.
    ///
    /// Errors: [`StoreError::OutOfBounds`] past the end of the blob; [`StoreError::Io`] where the system has
    /// no space for them. Earlier bytes are not affected.
    pub fn write_at(&self, blob: &Blob, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let end = blob.end_of(offset, bytes.len() as u64)?;
        let (file, path) = self.file(blob)?;
        positioned::write_all_at(&file, bytes, offset).map_err(StoreError::io("write", path))?;
        let noted = self.arriving(blob, |incoming| incoming.note(offset..end));
        // Not before: a file without users may be truncated where nothing is noted.
        drop(file);
        noted
    }

    /// Reads what has arrived of `blob` at `offset`; what has not is an error or zeros.
    pub fn read_at(&self, blob: &Blob, offset: u64, bytes: &mut [u8]) -> Result<(), StoreError> {
        blob.end_of(offset, bytes.len() as u64)?;
        let (file, path) = self.file(blob)?;
        positioned::read_exact_at(&file, bytes, offset).map_err(StoreError::io("read", path))
    }

    /// The file that collects the bytes of `blob`.
    fn file(&self, blob: &Blob) -> Result<(Arc<File>, PathBuf), StoreError> {
        self.arriving(blob, |incoming| {
            let (file, path) = incoming.file();
            Ok((file, path.to_owned()))
        })
    }

    /// Copies `piece` to `offset` of `blob`; false if the store doesn't have it any more. As with any bytes,
    /// they are verified when `blob` is committed.
    ///
    /// Errors: as for [`write_at`](Self::write_at).
    pub fn copy_from(&self, blob: &Blob, offset: u64, piece: &Piece) -> Result<bool, StoreError> {
        blob.end_of(offset, piece.len)?;
        let Some(mut from) = self.reader(std::slice::from_ref(piece))? else {
            return Ok(false);
        };
        // At most `COPY`, which fits an address.
        let mut buffer = vec![0; piece.len.min(COPY) as usize];
        let mut at = 0;
        while at < piece.len {
            let bytes = &mut buffer[..(piece.len - at).min(COPY) as usize];
            from.read(bytes)?;
            self.write_at(blob, offset + at, bytes)?;
            at += bytes.len() as u64;
        }
        Ok(true)
    }

    /// The bytes of `pieces`, one after another; `None` if the store doesn't have all of them any more.
    ///
    /// Errors: [`StoreError::OutOfBounds`] for a piece that isn't within its blob.
    pub(crate) fn reader<'a>(
        &self,
        pieces: &'a [Piece],
    ) -> Result<Option<PieceReader<'a>>, StoreError> {
        for piece in pieces {
            piece.blob.end_of(piece.offset, piece.len)?;
            if !self.claim(&piece.blob)? {
                return Ok(None);
            }
        }
        Ok(Some(PieceReader {
            layout: self.layout.clone(),
            pieces,
            taken: 0,
            open: None,
        }))
    }

    /// Forgets the bytes of `range`. A blob that is in the store stays.
    pub fn discard(&self, blob: &Blob, range: Range<u64>) -> Result<(), StoreError> {
        self.arriving(blob, |incoming| incoming.discard(&range))
    }

    /// Reads and verifies `blob`, makes it durable and puts it into the store; returns the path of its file,
    /// whose bytes never change.
    ///
    /// Errors: [`StoreError::Incomplete`] if bytes are missing; [`StoreError::Mismatch`] if they are
    /// wrong, and then they are discarded.
    pub fn commit(&self, blob: &Blob) -> Result<PathBuf, StoreError> {
        self.commit_if(blob, Incoming::verify)
    }

    /// As [`commit`](Self::commit), for callers that have verified every byte on its way here, including what
    /// an earlier pull had fetched ([`read_at`](Self::read_at)), and say how. They are read again only if
    /// that was not by the digest.
    pub fn commit_verified(&self, blob: &Blob, verified: Verified) -> Result<PathBuf, StoreError> {
        match verified {
            Verified::Digest(algorithm) if algorithm == blob.digest.algorithm() => {
                self.commit_if(blob, |incoming| incoming.check_whole())
            }
            Verified::Blake3Variant if blob.digest.algorithm() == Algorithm::Blake3 => {
                self.commit_if(blob, |incoming| incoming.check_whole())
            }
            Verified::LabelledSha256 if blob.digest.algorithm() == Algorithm::Sha256 => {
                self.commit_if(blob, |incoming| incoming.check_whole())
            }
            _ => self.commit(blob),
        }
    }

    fn commit_if(
        &self,
        blob: &Blob,
        check: impl FnOnce(&mut Incoming) -> Result<(), StoreError>,
    ) -> Result<PathBuf, StoreError> {
        let slot = self.slot(blob);
        let mut slot = lock(&slot);
        if self.claim(blob)? {
            if let Some(incoming) = slot.take() {
                incoming.remove()?;
            }
            return Ok(self.layout.blob(&blob.digest));
        }
        check(self.open_in(&mut slot, blob)?)?;
        self.finish(&mut slot, blob)
    }

    /// A blob of `size` bytes with an unknown digest: it is gathered under a name made of `identity`, which must
    /// differ for other bytes, until [`commit_unhashed`](Self::commit_unhashed).
    pub(crate) fn unhashed(&self, identity: &str, size: u64) -> Blob {
        let digest = digest_of(Algorithm::Sha256, identity.as_bytes());
        let blob = Blob { digest, size };
        lock(&self.unhashed).insert(blob);
        blob
    }

    /// Hashes an [unhashed](Self::unhashed) blob whose bytes have all arrived and puts it into the store, durably.
    /// Returns it by its digest.
    ///
    /// Errors: [`StoreError::Incomplete`] if bytes are missing.
    pub(crate) fn commit_unhashed(&self, unhashed: &Blob) -> Result<Blob, StoreError> {
        let slot = self.slot(unhashed);
        let mut slot = lock(&slot);
        let blob = Blob {
            digest: self
                .open_in(&mut slot, unhashed)?
                .digest(Algorithm::Sha256)?,
            size: unhashed.size,
        };
        if !self.claim(&blob)? {
            self.finish(&mut slot, &blob)?;
        } else if let Some(incoming) = slot.take() {
            incoming.remove()?;
        }
        Ok(blob)
    }

    /// Puts verified bytes into the store.
    fn finish(&self, slot: &mut Option<Incoming>, blob: &Blob) -> Result<PathBuf, StoreError> {
        let path = self.layout.blob(&blob.digest);
        self.open_in(slot, blob)?.sync()?;
        let folder = path.parent().expect("blobs lie in folders");
        let _shared = disk::lock_shared(&self.layout.lock())?;
        disk::create_folder(folder)?;
        if let Some(incoming) = slot.take() {
            incoming.finish(&path)?;
        }
        Ok(path)
    }

    /// Puts `bytes` into the store as a blob, durably.
    pub fn put(&self, algorithm: Algorithm, bytes: &[u8]) -> Result<Blob, StoreError> {
        let blob = Blob::of(algorithm, bytes);
        if !self.claim(&blob)? {
            self.write_at(&blob, 0, bytes)?;
            self.commit_verified(&blob, Verified::Digest(algorithm))?;
        }
        Ok(blob)
    }

    /// Publishes `entry` under this name, replacing what the store had. Readers of that keep it until they
    /// are done. When this returns, the new one survives a crash of the system.
    ///
    /// Errors: [`StoreError::MissingBlob`] if a file is not in the store completely; [`StoreError::Name`] and
    /// [`StoreError::NameTaken`] for file names that some system can't have. After these errors, the store is
    /// unchanged; after [`StoreError::Io`] it may have the new entry, if the system could not ensure that it
    /// survives a crash.
    pub fn publish(self, entry: &Entry) -> Result<(), StoreError> {
        let bytes = entry.to_json(&self.name)?;
        let _shared = disk::lock_shared(&self.layout.lock())?;
        for (file, blob) in &entry.files {
            if !self.layout.has(blob)? {
                return Err(StoreError::MissingBlob {
                    file: file.clone(),
                    blob: *blob,
                });
            }
        }
        revision::publish(&self.layout, &self.name, &self.folder, &bytes)?;
        // What is published needs no claims, and unused parts of the rest are not needed.
        lock(&self.arriving).clear();
        // The model is published, whatever becomes of this folder; the next pull or sweep deletes it.
        for name in disk::names_in(&self.folder).unwrap_or_default() {
            if is_ours(&name) {
                let _ = disk::delete(&self.folder.join(name));
            }
        }
        let _ = fs::remove_dir(&self.folder);
        Ok(())
    }

    /// Records everything, so that another process can resume from here; also done when this is dropped, but
    /// then errors are lost.
    pub fn pause(self) -> Result<(), StoreError> {
        for slot in lock(&self.arriving).values() {
            if let Some(incoming) = lock(slot).as_mut() {
                incoming.pause()?;
            }
        }
        Ok(())
    }

    /// Records that `blob` is needed; true if it is in the store. One that was written to since it was
    /// verified is hashed again, and set aside if it is damaged.
    fn claim(&self, blob: &Blob) -> Result<bool, StoreError> {
        // In this order: either a sweep sees the claim, or this sees that the blob is gone.
        {
            let _shared = disk::lock_shared(&self.layout.lock())?;
            let mut claims = lock(&self.claims);
            if !claims.blobs.contains(blob) {
                let line = claim_line(blob);
                let Claims { file, path, blobs } = &mut *claims;
                file.write_all(line.as_bytes())
                    .map_err(StoreError::io("write", &*path))?;
                blobs.insert(*blob);
            }
            if !self.layout.has(blob)? {
                return Ok(false);
            }
        }
        Ok(self.layout.problem_with(blob, Trust::Seal)?.is_none())
    }

    fn slot(&self, blob: &Blob) -> Arc<Mutex<Option<Incoming>>> {
        lock(&self.arriving).entry(*blob).or_default().clone()
    }

    /// Runs a function on what has arrived of `blob`.
    fn arriving<T>(
        &self,
        blob: &Blob,
        act: impl FnOnce(&mut Incoming) -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        let slot = self.slot(blob);
        let mut slot = lock(&slot);
        act(self.open_in(&mut slot, blob)?)
    }

    fn open_in<'a>(
        &self,
        slot: &'a mut Option<Incoming>,
        blob: &Blob,
    ) -> Result<&'a mut Incoming, StoreError> {
        let incoming = match slot.take() {
            Some(incoming) => incoming,
            None => {
                self.close_some()?;
                let mut incoming = Incoming::open(&self.folder, *blob)?;
                if lock(&self.unhashed).contains(blob) {
                    incoming.sync_before_journal();
                }
                incoming
            }
        };
        Ok(slot.insert(incoming))
    }

    /// Closes the files of unused blobs, if many are open. A file in use must not be opened a second time, as
    /// that would hide its use.
    fn close_some(&self) -> Result<(), StoreError> {
        let slots: Vec<_> = lock(&self.arriving).values().cloned().collect();
        let mut n_open = 0;
        for slot in slots {
            // Locked ones are in use.
            let Ok(mut slot) = slot.try_lock() else {
                continue;
            };
            if let Some(incoming) = slot.as_mut() {
                n_open += 1;
                if n_open >= MAX_OPEN && !incoming.is_in_use() {
                    incoming.pause()?;
                    *slot = None;
                }
            }
        }
        Ok(())
    }
}

/// Reads pieces of blobs, which stay in the store as long as the pull that gave it.
pub(crate) struct PieceReader<'a> {
    layout: Layout,
    /// What is left.
    pieces: &'a [Piece],
    /// Bytes that were read of the first.
    taken: u64,
    /// The file of the blob that was read last.
    open: Option<(Blob, File)>,
}

impl PieceReader<'_> {
    /// Fills `bytes` with the next ones.
    ///
    /// Errors: [`StoreError::Io`], also if there are no more.
    pub(crate) fn read(&mut self, mut bytes: &mut [u8]) -> Result<(), StoreError> {
        while !bytes.is_empty() {
            let Some((piece, rest)) = self.pieces.split_first() else {
                let end = io::ErrorKind::UnexpectedEof.into();
                return Err(StoreError::io("read on", self.layout.blobs())(end));
            };
            let path = self.layout.blob(&piece.blob.digest);
            // Of what is asked for, so it fits an address.
            let n = (piece.len - self.taken).min(bytes.len() as u64) as usize;
            let (now, later) = bytes.split_at_mut(n);
            let file = match self.open.take() {
                Some((blob, file)) if blob == piece.blob => file,
                _ => File::open(&path).map_err(StoreError::io("open", &path))?,
            };
            positioned::read_exact_at(&file, now, piece.offset + self.taken)
                .map_err(StoreError::io("read", &path))?;
            self.open = Some((piece.blob, file));
            self.taken += n as u64;
            if self.taken == piece.len {
                (self.pieces, self.taken) = (rest, 0);
            }
            bytes = later;
        }
        Ok(())
    }
}

impl Drop for Pull {
    fn drop(&mut self) {
        for slot in lock(&self.arriving).values() {
            if let Some(incoming) = lock(slot).as_mut() {
                // What is not recorded is fetched again, and errors can't be reported here.
                let _ = incoming.pause();
            }
        }
    }
}

/// True if a pull gives this name to a file in its folder.
pub(super) fn is_ours(name: &str) -> bool {
    name == CLAIMS || revision::SCRATCH.contains(&name) || Incoming::is_name(name)
}

/// The blobs that the pull in `folder` said it needs. A line cut short by a crash says nothing.
pub(super) fn read_claims(folder: &Path) -> Result<Vec<Blob>, StoreError> {
    let path = folder.join(CLAIMS);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(StoreError::io("open", &path)(e)),
    };
    let bytes = disk::read_bounded(&file, &path, MAX_CLAIMS_BYTES)?;
    let text = String::from_utf8_lossy(&bytes);
    let lines = text
        .split_inclusive('\n')
        .filter_map(|line| line.strip_suffix('\n'));
    Ok(lines.filter_map(parse_claim).collect())
}

/// One claim. The empty line before it ends one that could not be written completely.
fn claim_line(blob: &Blob) -> String {
    format!("\n{blob} {}\n", blob.size)
}

fn parse_claim(line: &str) -> Option<Blob> {
    let (digest, size) = line.split_once(' ')?;
    let (algorithm, hex) = digest.split_once(':')?;
    let algorithm = algorithm.parse().ok()?;
    Some(Blob {
        digest: crate::hash::Digest::from_hex(algorithm, hex).ok()?,
        size: size.parse().ok()?,
    })
}

/// The state under the mutex is consistent between any two steps, so a panic did no harm.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
