//! How fast threads read memory, without computing.
//!
//! There is no single figure: memory in huge pages reads faster than in ordinary ones, in which hardware
//! prefetching ends with every page, and prefetch instructions help on some machines and hurt on others. All
//! of these are measured, and the best is what a machine can do.

use std::hint::black_box;
use std::sync::{Arc, Barrier, mpsc};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use bytes::Bytes;
use memmap2::MmapMut;
use serde::Serialize;
use sterna_kernels::Isa;
use sterna_kernels::peak::{self, ReadAhead};

/// Minimum bytes of each kind of memory that are read, and minimum size of a file: less could stay in a
/// cache.
const MIN_BYTES: u64 = 64 << 20;

/// What memory is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Pages {
    /// The process's own, in pages of the size that the system gives unasked.
    Ordinary,
    /// The process's own, in the largest pages that the system gives on request.
    Huge,
    /// The model's files, as they are mapped.
    File,
}

/// A method of reading memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(crate) struct Reading {
    pub(crate) pages: Pages,
    /// Whether each line is also prefetched by an instruction.
    pub(crate) prefetch: bool,
}

/// Threads that read memory, each its own part, to measure how fast that goes.
///
/// They live as long as this does, so that starting them is not measured, and fill their parts
/// themselves, so that the system puts the pages near them.
pub(crate) struct MemoryReaders {
    readers: Vec<Reader>,
    /// Kinds of memory that there are, with the bytes that all threads have of them together.
    memory: Vec<(Pages, u64)>,
}

/// One of the threads: it begins a pass when told to, and ends when `begin` is dropped.
struct Reader {
    begin: mpsc::Sender<Reading>,
    /// When each pass began and ended.
    passes: mpsc::Receiver<(Instant, Instant)>,
}

/// What one thread reads.
#[derive(Default)]
struct Part {
    ordinary: Option<MmapMut>,
    huge: Option<MmapMut>,
    file: Vec<Bytes>,
}

impl Part {
    /// Written, not only allocated: untouched pages all map to the same zeros.
    fn fill(&mut self) {
        for map in [&mut self.ordinary, &mut self.huge].into_iter().flatten() {
            map.fill(1);
        }
    }

    fn read(&self, isa: Isa, reading: Reading) {
        let ahead = match reading.prefetch {
            false => ReadAhead::Hardware,
            true => ReadAhead::Software,
        };
        let read = |bytes: &[u8]| {
            black_box(peak::read(isa, bytes, ahead));
        };
        match reading.pages {
            Pages::Ordinary => self.ordinary.iter().for_each(|map| read(map)),
            Pages::Huge => self.huge.iter().for_each(|map| read(map)),
            Pages::File => self.file.iter().for_each(|bytes| read(bytes)),
        }
    }
}

impl MemoryReaders {
    /// Starts `n_threads` threads that share about `n_bytes` of memory, but at least 128 MiB, half of it in
    /// pages of either kind, and as much of `files` as of one kind, if they are large enough for meaningful
    /// results.
    pub(crate) fn start(
        n_threads: usize,
        isa: Isa,
        n_bytes: u64,
        files: &[Bytes],
    ) -> Result<MemoryReaders> {
        let each_kind = (n_bytes / 2).max(MIN_BYTES);
        let share = usize::try_from(each_kind.div_ceil(n_threads as u64))
            .context("too much memory to read for this system")?;
        let mut parts = Vec::with_capacity(n_threads);
        for _ in 0..n_threads {
            parts.push(Part {
                ordinary: allocate(Pages::Ordinary, share)?,
                huge: allocate(Pages::Huge, share)?,
                file: Vec::new(),
            });
        }
        let mut memory = vec![(Pages::Ordinary, (share * n_threads) as u64)];
        if parts.iter().all(|part| part.huge.is_some()) {
            memory.push((Pages::Huge, (share * n_threads) as u64));
        }
        let file_bytes = share_out(files, each_kind, &mut parts);
        if file_bytes >= MIN_BYTES {
            memory.push((Pages::File, file_bytes));
        }
        let together = Arc::new(Barrier::new(n_threads));
        let start = |mut part: Part| {
            let together = Arc::clone(&together);
            let (begin, orders) = mpsc::channel();
            let (results, passes) = mpsc::channel();
            let work = move || {
                part.fill();
                // Both ends are dropped at the same time, which ends the thread.
                while let Ok(reading) = orders.recv() {
                    together.wait();
                    let start = Instant::now();
                    part.read(isa, reading);
                    if results.send((start, Instant::now())).is_err() {
                        break;
                    }
                }
            };
            thread::Builder::new()
                .spawn(work)
                .context("cannot start a thread to measure memory with")?;
            Ok(Reader { begin, passes })
        };
        let readers = parts.into_iter().map(start).collect::<Result<_>>()?;
        let readers = MemoryReaders { readers, memory };
        // Waits until every part is filled, and touches the pages of the files.
        for reading in readers.readings() {
            readers.pass(reading)?;
        }
        Ok(readers)
    }

    /// The available methods of reading. In this order nothing is read that was read just before, which a
    /// large cache might hold.
    pub(crate) fn readings(&self) -> Vec<Reading> {
        let reading = |prefetch| {
            let memory = self.memory.iter();
            memory.map(move |&(pages, _)| Reading { pages, prefetch })
        };
        reading(false).chain(reading(true)).collect()
    }

    /// Reads all memory of a kind once: bytes per second of all threads together.
    pub(crate) fn pass(&self, reading: Reading) -> Result<f64> {
        let gone = "a thread that measures memory ended early";
        let memory = self.memory.iter().find(|memory| memory.0 == reading.pages);
        let &(_, n_bytes) = memory.context("expected memory of a kind that there is")?;
        for reader in &self.readers {
            reader.begin.send(reading).context(gone)?;
        }
        let mut times = Vec::with_capacity(self.readers.len());
        for reader in &self.readers {
            times.push(reader.passes.recv().context(gone)?);
        }
        let start = times.iter().map(|time| time.0).min();
        let end = times.iter().map(|time| time.1).max();
        let (start, end) = start.zip(end).context("expected at least one thread")?;
        Ok(n_bytes as f64 / (end - start).as_secs_f64())
    }
}

/// Memory of the process's own; `None` where the system doesn't allow choosing such pages.
fn allocate(pages: Pages, n_bytes: usize) -> Result<Option<MmapMut>> {
    let map = MmapMut::map_anon(n_bytes).context("cannot get memory to measure with")?;
    #[cfg(target_os = "linux")]
    {
        use memmap2::Advice;
        if pages == Pages::Huge {
            return Ok(map.advise(Advice::HugePage).is_ok().then_some(map));
        }
        // A system that doesn't support the advice has no other pages.
        let _ = map.advise(Advice::NoHugePage);
    }
    Ok((pages == Pages::Ordinary).then_some(map))
}

/// Gives each of `parts` an equal share of the first `limit` bytes of `files`; returns their total.
fn share_out(files: &[Bytes], limit: u64, parts: &mut [Part]) -> u64 {
    let mut left = usize::try_from(limit).unwrap_or(usize::MAX);
    let mut n_bytes = 0;
    for file in files {
        let share = file.len().min(left) / parts.len();
        for (i, part) in parts.iter_mut().enumerate() {
            part.file.push(file.slice(i * share..(i + 1) * share));
        }
        left -= share * parts.len();
        n_bytes += (share * parts.len()) as u64;
    }
    n_bytes
}

/// Bytes to measure `n` sets of [`MemoryReaders`] with, for each: a GiB, but all together not more
/// than a quarter of the free memory.
pub(crate) fn readable_bytes(n: usize, free_memory_bytes: u64) -> u64 {
    (free_memory_bytes / 4 / n.max(1) as u64).min(1 << 30)
}

/// Bytes per second that `n_threads` threads read from memory together: the median of five passes of each
/// method, and the best of these.
pub(crate) fn read_bandwidth(n_threads: usize, isa: Isa, free_memory_bytes: u64) -> Result<f64> {
    let readers = MemoryReaders::start(n_threads, isa, readable_bytes(1, free_memory_bytes), &[])?;
    let readings = readers.readings();
    let mut rates = vec![[0.0; 5]; readings.len()];
    for i in 0..5 {
        for (rates, reading) in rates.iter_mut().zip(&readings) {
            rates[i] = readers.pass(*reading)?;
        }
    }
    let medians = rates.iter_mut().map(|rates| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    });
    Ok(medians.fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_is_positive() {
        assert!(read_bandwidth(2, Isa::detect(), 0).unwrap() > 0.0);
        assert_eq!(readable_bytes(2, 8 << 30), 1 << 30);
        assert_eq!(readable_bytes(4, 8 << 30), 1 << 29);
    }

    #[test]
    fn files_are_read_if_they_are_large() {
        let file = Bytes::from(vec![1; MIN_BYTES as usize + 5]);
        let readers = MemoryReaders::start(2, Isa::SCALAR, 0, &[file.slice(..9), file]).unwrap();
        for prefetch in [false, true] {
            let reading = Reading {
                pages: Pages::File,
                prefetch,
            };
            assert!(readers.readings().contains(&reading));
            assert!(readers.pass(reading).unwrap() > 0.0);
        }
        let small = [Bytes::from_static(b"not much to read")];
        let readers = MemoryReaders::start(3, Isa::SCALAR, 0, &small).unwrap();
        let is_file = |reading: &Reading| reading.pages == Pages::File;
        assert!(!readers.readings().iter().any(is_file));
    }

    #[test]
    fn files_are_shared_out_up_to_a_limit() {
        let files = [10, 7].map(|n| Bytes::from(vec![1; n]));
        for (limit, lens) in [(100, [3, 2]), (11, [3, 0]), (9, [3, 0]), (8, [2, 0])] {
            let mut parts = [(); 3].map(|()| Part::default());
            let n_bytes = share_out(&files, limit, &mut parts);
            for part in &parts {
                let found: Vec<usize> = part.file.iter().map(Bytes::len).collect();
                assert_eq!(found, lens, "{limit}");
            }
            assert_eq!(n_bytes, 3 * (lens[0] + lens[1]) as u64);
        }
    }
}
