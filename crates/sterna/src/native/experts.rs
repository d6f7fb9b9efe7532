//! Experts that stay in their files, of which some are in memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sterna_delivery::LocalFile;
use sterna_engine::backend::ExpertMemory;

/// How many bytes of experts may be in memory between two steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ExpertsInMemory {
    /// So many.
    Bytes(u64),
    /// This share of all, 0 to 1.
    Share(f64),
}

/// Experts in mapped files. Of each layer those that were used last are in memory, as many as the layer's part of the
/// bound allows: which experts follow one another in a layer is what repeats from token to token, while layers come in
/// turn, so that of all experts the one that was used longest ago is the next.
#[derive(Debug)]
pub(super) struct MappedExperts {
    files: Vec<LocalFile>,
    bound: ExpertsInMemory,
    layers: Mutex<Layers>,
}

#[derive(Debug, Default)]
struct Layers {
    all: Vec<Layer>,
    /// Every matrix, by its address.
    matrices: HashMap<usize, Place>,
    /// Bytes of all that are in the files.
    n_bytes: u64,
    /// Bytes of those that aren't: they were stored in a form that is computed in another.
    n_elsewhere: u64,
}

/// Where a matrix is.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    layer: usize,
    file: usize,
    range: Range<usize>,
}

/// The experts of a layer.
#[derive(Debug, Default)]
struct Layer {
    n_bytes: u64,
    /// Those in memory, the one that was used last at the end.
    held: Vec<Place>,
    /// Those of them that weren't there before the step that is being computed.
    fresh: Vec<Place>,
}

/// What a system that keeps a file in blocks of many pages may map with the one that is touched.
const NEIGHBOURS: usize = 2 << 20;

impl MappedExperts {
    /// Of the experts in `files`, as many as `bound` says.
    pub(super) fn new(files: Vec<LocalFile>, bound: ExpertsInMemory) -> MappedExperts {
        files.iter().for_each(LocalFile::in_small_pages);
        MappedExperts {
            files,
            bound,
            layers: Mutex::default(),
        }
    }

    /// What of the experts that have been loaded isn't bounded.
    pub(super) fn oddity(&self) -> Option<String> {
        let Layers {
            n_bytes,
            n_elsewhere,
            ..
        } = *self.layers();
        match (n_bytes, n_elsewhere) {
            (0, 0) => Some(
                "no experts are computed on the CPU, so that none are left in their file"
                    .to_owned(),
            ),
            (_, 0) => None,
            (_, n) => Some(format!(
                "{n} bytes of experts stay in memory: they are computed in another form than that of their file, or \
                 the file is still arriving"
            )),
        }
    }

    /// Takes what may have come with a matrix out of memory, but for what `layers` hold.
    fn release_around(&self, layers: &[Layer], place: &Place) {
        let Range { start, end } = place.range;
        let window = start.saturating_sub(NEIGHBOURS)..end.saturating_add(NEIGHBOURS);
        let held = layers.iter().flat_map(|layer| &layer.held);
        let held = held.filter(|other| {
            let is_near = other.range.start < window.end && window.start < other.range.end;
            other.file == place.file && is_near
        });
        let mut held: Vec<&Range<usize>> = held.map(|other| &other.range).collect();
        held.sort_by_key(|range| range.start);
        let mut free = window.start;
        for range in held {
            if free < range.start {
                self.files[place.file].release(free..range.start);
            }
            free = free.max(range.end);
        }
        if free < window.end {
            self.files[place.file].release(free..window.end);
        }
    }

    fn layers(&self) -> MutexGuard<'_, Layers> {
        self.layers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ExpertMemory for MappedExperts {
    fn loaded(&self, matrices: &[&[u8]]) {
        let mut layers = self.layers();
        let index = layers.all.len();
        let mut layer = Layer::default();
        for bytes in matrices {
            let n_bytes = bytes.len() as u64;
            let files = self.files.iter().enumerate();
            let mut found = files.filter_map(|(i, file)| Some((i, file.mapped_range(bytes)?)));
            let Some((file, range)) = found.next() else {
                layers.n_elsewhere += n_bytes;
                continue;
            };
            // Loading may have looked at them.
            self.files[file].release(range.clone());
            layer.n_bytes += n_bytes;
            let place = Place {
                layer: index,
                file,
                range,
            };
            layers.matrices.insert(bytes.as_ptr() as usize, place);
        }
        layers.n_bytes += layer.n_bytes;
        layers.all.push(layer);
    }

    fn read(&self, matrices: &[&[u8]]) {
        let Layers {
            all,
            matrices: known,
            ..
        } = &mut *self.layers();
        for bytes in matrices {
            let Some(place) = known.get(&(bytes.as_ptr() as usize)) else {
                continue;
            };
            let held = &mut all[place.layer].held;
            match held.iter().position(|other| other == place) {
                Some(at) => held[at..].rotate_left(1),
                None => {
                    self.files[place.file].will_need(place.range.clone());
                    held.push(place.clone());
                    all[place.layer].fresh.push(place.clone());
                }
            }
        }
    }

    fn done(&self, matrices: &[&[u8]]) {
        let Layers {
            all,
            matrices: known,
            n_bytes,
            ..
        } = &mut *self.layers();
        let places = matrices
            .iter()
            .filter_map(|bytes| known.get(&(bytes.as_ptr() as usize)));
        let Some(Place { layer, .. }) = places.into_iter().next() else {
            return;
        };
        let layer = &mut all[*layer];
        let share = match self.bound {
            ExpertsInMemory::Share(share) => share,
            ExpertsInMemory::Bytes(bytes) => bytes as f64 / (*n_bytes).max(1) as f64,
        };
        let bound = (share * layer.n_bytes as f64) as usize;
        let mut n_held: usize = layer.held.iter().map(|place| place.range.len()).sum();
        let too_many = layer.held.iter().take_while(|place| {
            let is_too_much = n_held > bound;
            n_held -= place.range.len();
            is_too_much
        });
        let n_released =
            too_many.inspect(|place| self.files[place.file].release(place.range.clone()));
        let n_released = n_released.count();
        layer.held.drain(..n_released);
        for place in std::mem::take(&mut layer.fresh) {
            self.release_around(all, &place);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Bytes of the mapping that begins at `start` that are in memory of this process.
    #[cfg(target_os = "linux")]
    fn resident(start: *const u8) -> usize {
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines();
        let begins = format!("{:x}-", start as usize);
        lines.find(|line| line.starts_with(&begins)).unwrap();
        let rss = lines.find(|line| line.starts_with("Rss:")).unwrap();
        let kib: usize = rss.split_whitespace().nth(1).unwrap().parse().unwrap();
        kib << 10
    }

    #[test]
    fn as_many_experts_are_in_memory_as_are_allowed() {
        const MATRIX: usize = 256 << 10;
        let (n_layers, n_experts) = (4, 12);
        let bytes: Vec<u8> = (0..n_layers * n_experts * MATRIX)
            .map(|i| (i / MATRIX) as u8)
            .collect();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("experts");
        fs::write(&path, &bytes).unwrap();
        let file = LocalFile::open(&path).unwrap();
        let all = file.prefix(u64::MAX);
        let matrix = |layer, expert| {
            let first = (layer * n_experts + expert) * MATRIX;
            &all[first..first + MATRIX]
        };
        let sum = |bytes: &[u8]| bytes.iter().map(|byte| u64::from(*byte)).sum::<u64>();
        for (bound, allowed) in [
            (ExpertsInMemory::Share(0.25), 12),
            (ExpertsInMemory::Bytes(25 * MATRIX as u64), 24),
            (ExpertsInMemory::Share(0.0), 0),
            (ExpertsInMemory::Share(1.0), 48),
        ] {
            let experts = MappedExperts::new(vec![file.clone()], bound);
            assert_eq!(sum(&all) as usize, (0..48).sum::<usize>() * MATRIX);
            for layer in 0..n_layers {
                let own: Vec<&[u8]> = (0..n_experts).map(|expert| matrix(layer, expert)).collect();
                experts.loaded(&own);
            }
            assert_eq!(experts.oddity(), None);
            for step in 0..40 {
                for layer in 0..n_layers {
                    let chosen = [step / 5 + layer, 3 * step % 7].map(|expert| expert % n_experts);
                    let chosen = chosen.map(|expert| matrix(layer, expert));
                    experts.read(&chosen);
                    for bytes in chosen {
                        assert_eq!(sum(bytes), u64::from(bytes[0]) * MATRIX as u64);
                    }
                    experts.done(&chosen);
                }
                #[cfg(target_os = "linux")]
                if allowed < 48 {
                    let resident = resident(all.as_ptr());
                    // A page at each end of a matrix may be half another's.
                    let most = allowed * (MATRIX + (16 << 10));
                    assert!(
                        resident <= most,
                        "{bound:?}, step {step}: {resident}, {most}"
                    );
                }
            }
            let held = |layer: &Layer| layer.held.len();
            let held: Vec<usize> = experts.layers().all.iter().map(held).collect();
            assert!(
                held.iter().all(|held| *held <= allowed / n_layers),
                "{bound:?}: {held:?}"
            );
            if allowed > 0 {
                assert!(held.iter().all(|held| *held > 1), "{bound:?}: {held:?}");
            }
        }
        let elsewhere = MappedExperts::new(vec![file], ExpertsInMemory::Share(0.5));
        assert!(elsewhere.oddity().unwrap().contains("no experts"));
        elsewhere.loaded(&[&bytes[..100], matrix(0, 0)]);
        assert!(elsewhere.oddity().unwrap().starts_with("100 bytes"));
        elsewhere.read(&[&bytes[..100]]);
        elsewhere.done(&[&bytes[..100]]);
    }
}
