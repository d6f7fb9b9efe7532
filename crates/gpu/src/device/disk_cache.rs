//! Compiled pipelines on disk. Browsers keep theirs by themselves.

#[cfg(target_arch = "wasm32")]
pub(super) use absent::DiskCache;
#[cfg(not(target_arch = "wasm32"))]
pub(super) use file::DiskCache;

#[cfg(target_arch = "wasm32")]
mod absent {
    use std::path::Path;

    use crate::wgpu::{Adapter, Device, PipelineCache};

    /// Never made.
    #[derive(Debug)]
    pub(in crate::device) enum DiskCache {}

    impl DiskCache {
        pub(in crate::device) fn open(_: &Device, _: &Adapter, _: &Path) -> Option<DiskCache> {
            None
        }

        pub(in crate::device) fn wgpu(&self) -> &PipelineCache {
            match *self {}
        }

        pub(in crate::device) fn save(&self) -> std::io::Result<bool> {
            match *self {}
        }
    }
}

#[cfg(not(target_arch = "wasm32"))]
mod file {
    use std::io::Write;
    use std::path::{Path, PathBuf};
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};

    use crate::checksum::{BASIS, fnv1a};
    use crate::device::pipelines::lock;
    use crate::device::trusted;

    /// Compiled pipelines in a file: a checksum of eight bytes, then the driver's data.
    #[derive(Debug)]
    pub(in crate::device) struct DiskCache {
        wgpu: wgpu::PipelineCache,
        path: PathBuf,
        /// Checksum of the file's contents.
        saved: Mutex<Option<u64>>,
    }

    impl DiskCache {
        /// `None` if the driver can't cache pipelines.
        pub(in crate::device) fn open(
            device: &wgpu::Device,
            adapter: &wgpu::Adapter,
            folder: &Path,
        ) -> Option<DiskCache> {
            let path = folder.join(wgpu::util::pipeline_cache_key(&adapter.get_info())?);
            // A file that is unreadable or incomplete is ignored and rewritten.
            let file = std::fs::read(&path).unwrap_or_default();
            let data = file
                .split_first_chunk()
                .filter(|(sum, data)| u64::from_le_bytes(**sum) == fnv1a(BASIS, data));
            let wgpu = trusted::pipeline_cache(device, data.map(|(_, data)| data));
            Some(DiskCache {
                wgpu,
                path,
                saved: Mutex::new(data.map(|(sum, _)| u64::from_le_bytes(*sum))),
            })
        }

        /// What pipelines are made with.
        pub(in crate::device) fn wgpu(&self) -> &wgpu::PipelineCache {
            &self.wgpu
        }

        /// Writes what is new; returns whether anything was.
        pub(in crate::device) fn save(&self) -> std::io::Result<bool> {
            let Some(data) = self.wgpu.get_data() else {
                return Ok(false);
            };
            let sum = fnv1a(BASIS, &data);
            let mut saved = lock(&self.saved);
            if *saved == Some(sum) {
                return Ok(false);
            }
            if let Some(folder) = self.path.parent() {
                std::fs::create_dir_all(folder)?;
            }
            // Write under another name first: a reader sees the old file or the new one. The name is unique, as
            // several processes and devices may save at once.
            static SAVES: AtomicU64 = AtomicU64::new(0);
            let n = SAVES.fetch_add(1, Ordering::Relaxed);
            let partial = (self.path).with_extension(format!("{}-{n}.partial", std::process::id()));
            let written = write_whole(&partial, &[&sum.to_le_bytes(), &data])
                .and_then(|()| std::fs::rename(&partial, &self.path));
            if written.is_err() {
                // There may be no file, or no way to remove it; report the first error.
                let _ = std::fs::remove_file(&partial);
            }
            written?;
            *saved = Some(sum);
            Ok(true)
        }
    }

    /// Writes `parts` to a new file and syncs it.
    fn write_whole(path: &Path, parts: &[&[u8]]) -> std::io::Result<()> {
        let mut file = std::fs::File::create(path)?;
        for part in parts {
            file.write_all(part)?;
        }
        file.sync_all()
    }
}
