//! Files of one tensor, which verbs write.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sterna_delivery::PartialFile;
use sterna_format::DType;
use sterna_format::safetensors::Writer;

/// A safetensors file of one f32 tensor, written row by row.
pub(crate) struct TensorFile {
    path: PathBuf,
    out: BufWriter<Out>,
}

/// The destination of the bytes.
enum Out {
    /// A file that gets its name when it is complete.
    Whole(PartialFile),
    /// Something other than a file, such as a device or a pipe, which must not be replaced.
    Straight(File),
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Out::Whole(file) => file.write(bytes),
            Out::Straight(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Out::Whole(file) => file.flush(),
            Out::Straight(file) => file.flush(),
        }
    }
}

impl TensorFile {
    /// Begins the file at `path` with the tensor `name`, of `shape`.
    pub(crate) fn create(path: &Path, name: &str, shape: [usize; 2]) -> Result<TensorFile> {
        let mut writer = Writer::new(BTreeMap::new());
        writer.tensor(name, DType::F32, &shape)?;
        let create = || -> io::Result<(PathBuf, Out)> {
            // If it is a link, the linked file is replaced.
            let path = match fs::canonicalize(path) {
                Ok(path) => path,
                Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
                Err(error) => return Err(error),
            };
            if path.exists() && !path.is_file() {
                let file = OpenOptions::new().write(true).open(&path)?;
                return Ok((path, Out::Straight(file)));
            }
            let file = PartialFile::create(&path)?;
            Ok((path, Out::Whole(file)))
        };
        let (resolved, out) =
            create().with_context(|| format!("{}: cannot write", path.display()))?;
        let mut file = TensorFile {
            path: resolved,
            out: BufWriter::new(out),
        };
        file.write_bytes(&writer.finish().header)?;
        Ok(file)
    }

    fn write_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.out
            .write_all(bytes)
            .with_context(|| format!("{}: cannot write", self.path.display()))
    }

    /// Appends values.
    pub(crate) fn write(&mut self, values: &[f32]) -> Result<()> {
        values
            .iter()
            .try_for_each(|value| self.write_bytes(&value.to_le_bytes()))
    }

    /// Gives the file its name.
    pub(crate) fn finish(self) -> Result<()> {
        let path = self.path;
        let named = |out: Out| match out {
            Out::Whole(file) => file.finish(),
            Out::Straight(_) => Ok(()),
        };
        self.out
            .into_inner()
            .map_err(io::Error::from)
            .and_then(named)
            .with_context(|| format!("{}: cannot write", path.display()))
    }
}
