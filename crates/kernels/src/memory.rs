//! Memory for weights that are rewritten when they are loaded.

use std::ops::{Deref, DerefMut};

/// Zeros at first, aligned to a cache line at least, and in huge pages where the system has them.
///
/// Pages are the system's until they are written, so threads that fill parts of it share the work of getting them.
pub(crate) struct Pages {
    #[cfg(not(target_family = "wasm"))]
    map: memmap2::MmapMut,
    #[cfg(target_family = "wasm")]
    map: Vec<u8>,
    first: usize,
    len: usize,
}

impl Pages {
    /// Panics if the system has no room for `len` bytes, as a [`Vec`] does.
    pub(crate) fn zeroed(len: usize) -> Pages {
        #[cfg(not(target_family = "wasm"))]
        let map = {
            let map = memmap2::MmapMut::map_anon(len.max(1))
                .unwrap_or_else(|error| panic!("{len} bytes for weights: {error}"));
            // A hint: a system that doesn't support it uses ordinary pages.
            #[cfg(target_os = "linux")]
            let _ = map.advise(memmap2::Advice::HugePage);
            map
        };
        #[cfg(target_family = "wasm")]
        let map = vec![0; len + 64];
        let first = map.as_ptr().align_offset(64);
        Pages { map, first, len }
    }
}

impl Deref for Pages {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map[self.first..][..self.len]
    }
}

impl DerefMut for Pages {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.map[self.first..][..self.len]
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
}
