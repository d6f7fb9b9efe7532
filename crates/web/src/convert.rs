//! Converting a model whose files JavaScript has to a package in the browser's storage.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use js_sys::Function;
use sterna::{Error, ErrorCode, Header, ModelFiles, OpenOptions, Result, bail};
use sterna_convert::{Event, Notify, PackageOptions, PackageSink, Packed, Packing, package_bytes};
use sterna_engine::plan::TensorRequest;
use sterna_format::rdrr::shard_file_name;
use sterna_kernels::{Exec, Isa};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::files::{PIECE, drive};
use crate::js::{self, Disk, Files, failure, from_js, to_js};
use crate::model::entry;
use crate::options::{ConversionOptions, Converted, ConvertedFile};

/// How often progress is told.
const TICK: Duration = Duration::from_millis(100);

/// Converts a model to a package.
#[wasm_bindgen]
pub struct Conversion {
    from: Files,
    model: ModelFiles,
    options: PackageOptions,
    n_bytes: u64,
    is_cancelled: Rc<Cell<bool>>,
}

/// A file, or a part of one, that is to be stored.
enum Piece {
    Bytes { name: String, bytes: Bytes },
    End { name: String },
}

/// What was made of a package and isn't stored yet: slices of the tensor that was made last.
#[derive(Default)]
struct Pieces(VecDeque<Piece>);

impl PackageSink for Pieces {
    fn append(&mut self, index: usize, bytes: Bytes) -> Result<()> {
        let name = shard_file_name(index);
        self.0.push_back(Piece::Bytes { name, bytes });
        Ok(())
    }

    fn end_shard(&mut self, index: usize, _: u64) -> Result<()> {
        let name = shard_file_name(index);
        self.0.push_back(Piece::End { name });
        Ok(())
    }

    fn put(&mut self, name: &str, bytes: Bytes) -> Result<()> {
        let name = name.to_owned();
        self.0.push_back(Piece::Bytes {
            name: name.clone(),
            bytes,
        });
        self.0.push_back(Piece::End { name });
        Ok(())
    }
}

#[wasm_bindgen]
impl Conversion {
    /// Reads what `files` are.
    pub async fn open(files: Files, options: JsValue) -> Result<Conversion, JsValue> {
        let options: ConversionOptions = from_js("options", &options)?;
        let opened = Conversion::new(files, options).await;
        opened.map_err(|error| failure(&error))
    }

    /// About how many bytes the package will have, rather too many.
    pub fn bytes(&self) -> f64 {
        self.n_bytes as f64
    }

    /// Writes the package to `disk`, the manifest last; `progress` is called with the bytes that were read and
    /// those of all.
    pub async fn run(&self, disk: Disk, progress: Function) -> Result<JsValue, JsValue> {
        let converted = self.convert(&disk, &progress).await;
        to_js(&converted.map_err(|error| match self.is_cancelled.get() {
            true => js::coded("cancelled", "the conversion was cancelled"),
            false => failure(&error),
        })?)
    }

    /// Ends [`Conversion::run`].
    pub fn cancel(&self) {
        self.is_cancelled.set(true);
    }
}

impl Conversion {
    async fn new(from: Files, options: ConversionOptions) -> Result<Conversion> {
        let ConversionOptions {
            name,
            entry: at,
            id,
        } = options;
        let opening = ModelFiles::open(entry(at.as_deref()), OpenOptions::new(name));
        let model = drive(opening, &from).await?;
        if let Header::Package(_) = model.header() {
            bail!(
                InvalidRequest,
                "{}: expected a model to convert, found a package",
                model.name()
            );
        }
        let options = PackageOptions {
            model_id: id,
            ..PackageOptions::default()
        };
        Ok(Conversion {
            n_bytes: package_bytes(&model, &options.plan)?,
            from,
            model,
            options,
            is_cancelled: Rc::default(),
        })
    }

    async fn convert(&self, disk: &Disk, progress: &Function) -> Result<Converted> {
        let total = Cell::new(0);
        let warnings = RefCell::new(Vec::new());
        let notify: &Notify<'_> = &|event| match event {
            Event::Started { n_bytes, .. } => total.set(n_bytes),
            Event::Warning(warning) if warning.is_warning() => {
                warnings.borrow_mut().push(warning.to_string());
            }
            _ => {}
        };
        // Nothing is computed: types are kept.
        let exec = Arc::new(Exec::new(1, Isa::detect()));
        let opened = || Ok(Pieces::default());
        let mut packing = Packing::new(&self.model, &self.options, exec, notify, opened)?;
        let mut store = Store::new(disk, &self.is_cancelled);
        let mut told = Told::new(progress, total.get());
        while let Some(want) = packing.wanted() {
            let bytes = self.read(want, &mut told).await?;
            packing.feed(bytes)?;
            store.all(&mut packing.sink().0).await?;
        }
        let Packed {
            model_id, mut sink, ..
        } = packing.finish()?;
        store.all(&mut sink.0).await?;
        told.tell(true);
        Ok(Converted {
            id: model_id,
            files: store.files,
            warnings: warnings.into_inner(),
        })
    }

    /// The bytes of a tensor.
    async fn read(&self, want: &TensorRequest, told: &mut Told<'_>) -> Result<Bytes> {
        let parts = self.model.parts(want)?;
        let len: u64 = parts.iter().map(|(_, range)| range.end - range.start).sum();
        let mut stored = Vec::new();
        // The largest tensor may be more than a tab's memory has left.
        let reserved = usize::try_from(len).is_ok_and(|len| stored.try_reserve_exact(len).is_ok());
        if !reserved {
            let name = want.name_in_file();
            bail!(OutOfMemory, "{name}: no memory for a tensor of {len} bytes");
        }
        for (file, range) in parts {
            let name = &self.model.files()[file].name;
            self.append(name, range, &mut stored, told).await?;
        }
        self.model.make(want, stored.into())
    }

    /// Appends the bytes `range` of the file called `name` to `bytes`.
    async fn append(
        &self,
        name: &str,
        range: Range<u64>,
        bytes: &mut Vec<u8>,
        told: &mut Told<'_>,
    ) -> Result<()> {
        let mut start = range.start;
        while start < range.end {
            refuse_if(&self.is_cancelled)?;
            let end = range.end.min(start + PIECE);
            let piece = self.from.read(name, start..end).await?;
            if piece.is_empty() || piece.len() as u64 > end - start {
                bail!(
                    Io,
                    "{name}: expected bytes {start}..{end}, found {}",
                    piece.len()
                );
            }
            bytes.extend_from_slice(&piece);
            start += piece.len() as u64;
            told.done += piece.len() as u64;
            told.tell(false);
        }
        Ok(())
    }
}

/// The progress of a conversion.
struct Told<'a> {
    progress: &'a Function,
    done: u64,
    total: u64,
    at: Duration,
}

impl<'a> Told<'a> {
    fn new(progress: &'a Function, total: u64) -> Told<'a> {
        Told {
            progress,
            done: 0,
            total,
            at: js::now(),
        }
    }

    /// Tells it if some time has passed, or `anyway`.
    fn tell(&mut self, anyway: bool) {
        let now = js::now();
        if anyway || now >= self.at + TICK {
            self.at = now;
            let (done, total) = (self.done.min(self.total) as f64, self.total as f64);
            js::call(self.progress, &[done.into(), total.into()]);
        }
    }
}

/// Stores the pieces of a package.
struct Store<'a> {
    disk: &'a Disk,
    is_cancelled: &'a Cell<bool>,
    /// Bytes of the file that is being written.
    len: u64,
    files: Vec<ConvertedFile>,
}

impl<'a> Store<'a> {
    fn new(disk: &'a Disk, is_cancelled: &'a Cell<bool>) -> Store<'a> {
        Store {
            disk,
            is_cancelled,
            len: 0,
            files: Vec::new(),
        }
    }

    /// Stores all `pieces`, in order.
    async fn all(&mut self, pieces: &mut VecDeque<Piece>) -> Result<()> {
        while let Some(piece) = pieces.pop_front() {
            match piece {
                Piece::Bytes { name, bytes } => {
                    for piece in bytes.chunks(PIECE as usize) {
                        refuse_if(self.is_cancelled)?;
                        self.disk.write_at(&name, self.len, piece).await?;
                        self.len += piece.len() as u64;
                    }
                }
                Piece::End { name } => {
                    refuse_if(self.is_cancelled)?;
                    self.disk.commit(&name).await?;
                    let size = std::mem::take(&mut self.len);
                    self.files.push(ConvertedFile { name, size });
                }
            }
        }
        Ok(())
    }
}

/// Fails once the conversion is cancelled; [`Conversion::run`] gives that its code.
fn refuse_if(is_cancelled: &Cell<bool>) -> Result<()> {
    match is_cancelled.get() {
        true => Err(Error::new(ErrorCode::Io, "cancelled")),
        false => Ok(()),
    }
}
