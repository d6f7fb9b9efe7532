//! `qmodel.lora`: the matrices of a low-rank adapter.

use super::error::ensure;
use super::extent::{Extent, Owner};
use super::manifest::{check_lora_head, out_of_order};
use super::read::{Cursor, header};
use super::{BundleError, Location, LoraTarget, SourceType};
use crate::DType;
use crate::gguf::type_id;

const MAGIC: &[u8; 4] = b"TRLA";
/// Version of what follows the header.
const BODY_VERSION: u32 = 1;
/// Bytes before the first record.
const FIXED_BYTES: u64 = 64;
/// Bytes of a record.
const RECORD_BYTES: u64 = 64;

/// What `qmodel.lora` says, checked: every matrix is within the file, aligned, and doesn't overlap others.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraFile {
    /// Layers of the model that the adapter is for.
    pub n_layers: u32,
    /// Factor on the products of the matrices, alpha and rank included.
    pub scale: f64,
    /// The projections that the adapter changes, by layer and in each in the order of
    /// [`LoraTarget::ALL`].
    pub pairs: Vec<LoraPair>,
}

/// The two matrices of a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoraPair {
    /// The layer.
    pub layer: u32,
    /// The projection.
    pub target: LoraTarget,
    /// `[rank, in]`
    pub a: StoredMatrix,
    /// `[out, rank]`
    pub b: StoredMatrix,
}

/// A matrix of floats and its location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoredMatrix {
    /// F32, F16 or BF16.
    pub dtype: DType,
    /// Its rows.
    pub rows: u32,
    /// Elements of a row.
    pub cols: u32,
    /// First byte, from the start of the file; a multiple of 64.
    pub offset: u64,
    /// Number of bytes.
    pub size: u64,
}

impl LoraFile {
    /// Parses the part before the data of a file of `file_len` bytes that begins with `prefix`.
    ///
    /// Memory stays within 8 MiB, whatever the file says.
    ///
    /// # Errors
    ///
    /// [`BundleError::NeedMore`] if the records continue after the prefix; every other error means that
    /// the file is bad, and says where and why.
    pub fn parse(prefix: &[u8], file_len: u64) -> Result<LoraFile, BundleError> {
        let mut cursor = Cursor::new(prefix, file_len);
        let place = Location::Header;
        cursor.magic(MAGIC)?;
        cursor.fixed(place, "reserved field", 0)?;
        cursor.fixed(place, "version of the body", BODY_VERSION)?;
        let n_layers = cursor.u32(place)?;
        let n_targets = LoraTarget::ALL.len() as u32;
        cursor.fixed(place, "targets of a layer", n_targets)?;
        let scale = cursor.f64(place)?;
        check_lora_head(n_layers, scale)?;
        for _ in 0..8 {
            cursor.fixed(place, "reserved field", 0)?;
        }
        let n = n_layers * n_targets;
        let n = cursor.ensure_items(n, RECORD_BYTES, Location::Lora)?;
        let mut pairs = Vec::new();
        let mut free = data_offset(n);
        for layer in 0..n_layers {
            for target in LoraTarget::ALL {
                let place = Location::Pair(layer, target);
                let present = cursor.u32(place)?;
                ensure(present < 2, place, "present", "0 or 1", present)?;
                if present == 0 {
                    cursor.bytes(RECORD_BYTES as u32 - 4, place)?;
                    continue;
                }
                let a = read_matrix(&mut cursor, place, "A: element type")?;
                cursor.fixed(place, "reserved field", 0)?;
                let b = read_matrix(&mut cursor, place, "B: element type")?;
                let pair = LoraPair {
                    layer,
                    target,
                    a,
                    b,
                };
                check_pair(&pair)?;
                for (matrix, owner) in [&a, &b].into_iter().zip(owners(place)) {
                    let StoredMatrix { offset, size, .. } = *matrix;
                    free = Extent { offset, size }.check(owner, matrix.bytes(), free, file_len)?;
                }
                pairs.push(pair);
            }
        }
        Ok(LoraFile {
            n_layers,
            scale,
            pairs,
        })
    }

    /// Lays a file out with these matrices, one after the other; their offsets and sizes are set
    /// whatever they were.
    ///
    /// # Errors
    ///
    /// [`BundleError`] if [`LoraFile::parse`] would refuse what comes of it.
    pub fn layout(
        n_layers: u32,
        scale: f64,
        mut pairs: Vec<LoraPair>,
    ) -> Result<LoraFile, BundleError> {
        check_lora_head(n_layers, scale)?;
        let mut free = data_offset(n_layers as usize * LoraTarget::ALL.len());
        let mut last = None;
        for pair in &mut pairs {
            let this = (pair.layer, pair.target);
            if pair.layer >= n_layers || last.is_some_and(|last| last >= this) {
                return Err(out_of_order(pair.layer, pair.target, n_layers));
            }
            last = Some(this);
            let place = Location::Pair(pair.layer, pair.target);
            for (matrix, owner) in [&mut pair.a, &mut pair.b].into_iter().zip(owners(place)) {
                let (extent, end) = Extent::next(owner, matrix.bytes(), free)?;
                (matrix.offset, matrix.size, free) = (extent.offset, extent.size, end);
            }
            check_pair(pair)?;
        }
        Ok(LoraFile {
            n_layers,
            scale,
            pairs,
        })
    }

    /// Everything before the data of the first matrix. Bytes between matrices are zero, and the file
    /// ends with the last one.
    pub fn header(&self) -> Vec<u8> {
        let n_targets = LoraTarget::ALL.len();
        let mut out = header(MAGIC);
        for word in [0, BODY_VERSION, self.n_layers, n_targets as u32] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&self.scale.to_le_bytes());
        let n_records = self.n_layers as usize * n_targets;
        out.resize(data_offset(n_records) as usize, 0);
        for pair in &self.pairs {
            let record = pair.layer as usize * n_targets + pair.target as usize;
            let at = (FIXED_BYTES + record as u64 * RECORD_BYTES) as usize;
            let record = &mut out[at..at + RECORD_BYTES as usize];
            record[0] = 1;
            pair.a.write(&mut record[4..32]);
            pair.b.write(&mut record[36..64]);
        }
        out
    }

    /// Bytes of the whole file.
    pub fn file_len(&self) -> u64 {
        match self.pairs.last() {
            Some(LoraPair { b, .. }) => b.offset + b.size,
            None => data_offset(self.n_layers as usize * LoraTarget::ALL.len()),
        }
    }
}

impl StoredMatrix {
    fn bytes(&self) -> Option<u64> {
        (self.dtype).tensor_bytes(u64::from(self.rows) * u64::from(self.cols))
    }

    /// Writes type, shape and place into 28 bytes.
    fn write(&self, out: &mut [u8]) {
        let id = type_id(self.dtype).expect("floats have ids");
        for (out, word) in out.chunks_exact_mut(4).zip([id, self.rows, self.cols]) {
            out.copy_from_slice(&word.to_le_bytes());
        }
        out[12..20].copy_from_slice(&self.offset.to_le_bytes());
        out[20..28].copy_from_slice(&self.size.to_le_bytes());
    }
}

/// What the bytes of the two matrices at `place` belong to.
fn owners(place: Location) -> [Owner; 2] {
    [("A: offset", "A: size"), ("B: offset", "B: size")].map(|(offset_field, size_field)| Owner {
        place,
        offset_field,
        size_field,
    })
}

/// Where data may begin after `n` records.
fn data_offset(n: usize) -> u64 {
    FIXED_BYTES + n as u64 * RECORD_BYTES
}

fn read_matrix(
    cursor: &mut Cursor<'_>,
    place: Location,
    field: &'static str,
) -> Result<StoredMatrix, BundleError> {
    let id = cursor.u32(place)?;
    let floats = SourceType::ALL.into_iter().filter(|s| s.is_float());
    let dtype = { floats }
        .map(SourceType::dtype)
        .find(|&dtype| type_id(dtype) == Some(id));
    Ok(StoredMatrix {
        dtype: dtype.ok_or_else(|| {
            BundleError::field(place, field, "0, 1 or 30 for F32, F16 or BF16", id)
        })?,
        rows: cursor.u32(place)?,
        cols: cursor.u32(place)?,
        offset: cursor.u64(place)?,
        size: cursor.u64(place)?,
    })
}

fn check_pair(pair: &LoraPair) -> Result<(), BundleError> {
    let place = Location::Pair(pair.layer, pair.target);
    for (matrix, [type_field, rows, cols]) in [
        (&pair.a, ["A: element type", "A: rows", "A: columns"]),
        (&pair.b, ["B: element type", "B: rows", "B: columns"]),
    ] {
        let is_float = SourceType::from_dtype(matrix.dtype).is_some_and(SourceType::is_float);
        let expected = "F32, F16 or BF16";
        ensure(is_float, place, type_field, expected, matrix.dtype)?;
        ensure(matrix.rows > 0, place, rows, "at least 1", matrix.rows)?;
        ensure(matrix.cols > 0, place, cols, "at least 1", matrix.cols)?;
    }
    let (rank, found) = (pair.a.rows, pair.b.cols);
    let expected = format_args!("the {rank} rows of A");
    ensure(rank == found, place, "B: columns", expected, found)
}
