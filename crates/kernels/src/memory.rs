//! Memory for weights that are rewritten when they are loaded.

use std::ops::{Deref, DerefMut};

/// Zeros at first, aligned to a cache line at least, and in huge pages where the system has them.
///
/// Pages are the system's until they are written, so threads that fill parts of it share the work of getting them. What is
/// dropped is the system's again: at once on Linux, elsewhere with all that it was mapped with.
pub(crate) struct Pages(part::Part);

impl Pages {
    /// Panics if the system has no room for `len` bytes, as a [`Vec`] does.
    pub(crate) fn zeroed(len: usize) -> Pages {
        Pages(part::Part::zeroed(len))
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.bytes()
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

/// Something for any bytes of which any may be read.
///
/// # Safety
/// That is so.
pub(crate) unsafe trait Plain: Sized + Send + Sync + 'static {}

/// Memory as values that follow one another.
pub(crate) fn plain<T: Plain>(pages: &Pages) -> &[T] {
    // SAFETY: any bytes are such.
    let (before, all, _) = unsafe { pages.align_to() };
    debug_assert!(before.is_empty());
    all
}

/// As [`plain`].
pub(crate) fn plain_mut<T: Plain>(pages: &mut Pages) -> &mut [T] {
    // SAFETY: any bytes are such, and the other way round.
    let (before, all, _) = unsafe { pages.align_to_mut() };
    debug_assert!(before.is_empty());
    all
}

#[cfg(target_family = "wasm")]
mod part {
    pub(super) struct Part {
        all: Vec<u8>,
        first: usize,
        len: usize,
    }

    impl Part {
        pub(super) fn zeroed(len: usize) -> Part {
            let all = vec![0; len + 64];
            let first = all.as_ptr().align_offset(64);
            Part { all, first, len }
        }

        pub(super) fn bytes(&self) -> &[u8] {
            &self.all[self.first..][..self.len]
        }

        pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
            &mut self.all[self.first..][..self.len]
        }
    }
}

/// Parts of large mappings: a matrix of a few megabytes by itself would be in small pages for the most part, which take
/// longer to find and end what a processor prefetches.
#[cfg(not(target_family = "wasm"))]
mod part {
    use std::sync::{Arc, Mutex, PoisonError};

    use memmap2::MmapRaw;

    /// Bytes of a huge page, on the systems and processors that matter here.
    const HUGE_PAGE: usize = 2 << 20;

    /// Where parts begin: pages of their own, so that they can be given back by themselves. Systems for other processors
    /// have pages of up to 64 KiB.
    const PAGE: usize = match cfg!(target_arch = "x86_64") {
        true => 4 << 10,
        false => 64 << 10,
    };

    /// Bytes of a mapping; more than half of it gets one of its own.
    const MAPPING: usize = 64 << 20;

    /// `len` bytes of a mapping from `first` on, which are nobody else's, then or later.
    pub(super) struct Part {
        mapping: Arc<MmapRaw>,
        first: usize,
        len: usize,
    }

    /// A mapping that parts are taken of, and where what is left begins.
    struct Open {
        mapping: Arc<MmapRaw>,
        next: usize,
    }

    static OPEN: Mutex<Option<Open>> = Mutex::new(None);

    impl Part {
        pub(super) fn zeroed(len: usize) -> Part {
            if len > MAPPING / 2 {
                let (mapping, first) = mapped(len);
                return Part {
                    mapping,
                    first,
                    len,
                };
            }
            let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
            let has_room = |open: &Open| open.mapping.len() - open.next >= len;
            let Open { mapping, next } = match &mut *open {
                Some(open) if has_room(open) => open,
                closed => {
                    let (mapping, next) = mapped(MAPPING);
                    closed.insert(Open { mapping, next })
                }
            };
            let (mapping, first) = (Arc::clone(mapping), *next);
            *next = (first + len).next_multiple_of(PAGE).min(mapping.len());
            Part {
                mapping,
                first,
                len,
            }
        }

        pub(super) fn bytes(&self) -> &[u8] {
            // SAFETY: within the mapping, which lives as long, and nobody else's.
            unsafe { std::slice::from_raw_parts(self.mapping.as_ptr().add(self.first), self.len) }
        }

        pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
            let first = self.mapping.as_mut_ptr();
            // SAFETY: as above.
            unsafe { std::slice::from_raw_parts_mut(first.add(self.first), self.len) }
        }
    }

    #[cfg(target_os = "linux")]
    impl Drop for Part {
        fn drop(&mut self) {
            let end = (self.first + self.len).next_multiple_of(PAGE);
            let len = end.min(self.mapping.len()) - self.first;
            let what = memmap2::UncheckedAdvice::DontNeed;
            // A hint, of whose failure nothing comes but memory that is kept until the mapping goes.
            // SAFETY: nobody has these pages any more.
            let _ = unsafe { self.mapping.unchecked_advise_range(what, self.first, len) };
        }
    }

    /// A mapping with `len` bytes from the first huge page on, which begins at the offset.
    fn mapped(len: usize) -> (Arc<MmapRaw>, usize) {
        let map = memmap2::MmapMut::map_anon(len.max(1).saturating_add(HUGE_PAGE))
            .unwrap_or_else(|error| panic!("{len} bytes for weights: {error}"));
        // A hint: a system that doesn't support it uses ordinary pages.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        let first = map.as_ptr().align_offset(HUGE_PAGE);
        (Arc::new(MmapRaw::from(map)), first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_zero_aligned_and_as_long_as_asked() {
        for len in [0, 1, 4096, 3 << 20] {
            let mut pages = Pages::zeroed(len);
            assert_eq!(pages.len(), len);
            assert_eq!(pages.as_ptr().align_offset(64), 0);
            assert!(pages.iter().all(|byte| *byte == 0));
            pages.fill(7);
            assert!(pages.iter().all(|byte| *byte == 7));
        }
    }

    #[test]
    fn parts_have_nothing_in_common() {
        let lens = (1..200).map(|i| i * 7919);
        let mut all: Vec<Pages> = lens.map(Pages::zeroed).collect();
        for (i, pages) in all.iter_mut().enumerate() {
            assert!(pages.iter().all(|byte| *byte == 0), "{i}");
            pages.fill(i as u8);
        }
        // What is dropped takes nothing of the others along.
        let left: Vec<(usize, Pages)> = all.into_iter().enumerate().step_by(3).collect();
        for (i, pages) in &left {
            assert!(pages.iter().all(|byte| *byte == *i as u8), "{i}");
        }
    }
}
