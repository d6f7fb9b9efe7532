//! Manifests written and engine files read by the tables of `docs/formats/engine-bundle.md`, without the
//! code that the program does it with.

// Each test file uses its own part of this module.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};

use sterna_format::DType;
use sterna_format::safetensors::{SafeTensors, Writer};

/// An entry of a manifest, field by field.
#[derive(Clone, Copy, Default)]
pub(crate) struct Entry {
    pub(crate) action: u8,
    pub(crate) dtype: u8,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) padded: (u32, u32),
    pub(crate) data: (u16, u64, u64),
    pub(crate) scale: Option<(u16, u64, u64)>,
}

/// A manifest up to its tensors.
pub(crate) fn manifest(shards: &[PathBuf], entries: &[Entry]) -> Vec<u8> {
    let mut out = (shards.len() as u16).to_le_bytes().to_vec();
    for path in shards {
        let path = path.to_str().unwrap();
        out.extend((path.len() as u16).to_le_bytes());
        out.extend(path.as_bytes());
    }
    out.extend((entries.len() as u32).to_le_bytes());
    for entry in entries {
        out.extend([entry.action, entry.dtype]);
        for dim in [entry.rows, entry.cols, entry.padded.0, entry.padded.1] {
            out.extend(dim.to_le_bytes());
        }
        put_range(&mut out, entry.data);
        out.push(entry.scale.is_some().into());
        put_range(&mut out, entry.scale.unwrap_or_default());
    }
    out
}

/// The table of sections of a language model.
pub(crate) fn sections(n_tensors: u32) -> Vec<u8> {
    let mut out = 1_u32.to_le_bytes().to_vec();
    out.push(1);
    out.extend(0_u32.to_le_bytes());
    out.extend(n_tensors.to_le_bytes());
    out
}

fn put_range(out: &mut Vec<u8>, (shard, offset, size): (u16, u64, u64)) {
    out.extend(shard.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out.extend(size.to_le_bytes());
}

/// A matrix of an adapter in a manifest: type, rows, columns, and its range in shard 0.
pub(crate) fn lora_matrix(dtype: u8, rows: u32, cols: u32, offset: u64, size: u64) -> Vec<u8> {
    let mut out = vec![dtype];
    out.extend(rows.to_le_bytes());
    out.extend(cols.to_le_bytes());
    put_range(&mut out, (0, offset, size));
    out
}

/// A record of `qmodel.tensors` and its data.
pub(crate) struct Stored {
    pub(crate) action: u32,
    pub(crate) type_id: u32,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) padded: (u32, u32),
    pub(crate) data: Vec<u8>,
}

impl Stored {
    /// The trits of an I2_S tensor, row by row, and its scale. Padding must be zeros.
    pub(crate) fn trits(&self) -> (Vec<i8>, f32) {
        assert_eq!(self.type_id, 36);
        let stride = self.cols.div_ceil(128) * 32;
        let (codes, trailer) = self.data.split_at(self.rows * stride);
        let mut trits = Vec::new();
        for row in codes.chunks(stride) {
            for i in 0..stride * 4 {
                let (block, within) = (i / 128, i % 128);
                let code = row[block * 32 + within % 32] >> (6 - 2 * (within / 32)) & 3;
                assert!(code < 3);
                match i < self.cols {
                    true => trits.push(code as i8 - 1),
                    false => assert_eq!(code, 1, "padding"),
                }
            }
        }
        assert_eq!(trailer.len(), 32);
        assert_eq!(trailer[4..], [0; 28]);
        (trits, f32::from_le_bytes(trailer[..4].try_into().unwrap()))
    }
}

pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> usize {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize
}

/// The tensors of the file at `path`, whose bytes must all be accounted for.
pub(crate) fn read_tensors(path: &Path) -> Vec<Stored> {
    let bytes = fs::read(path).unwrap();
    assert_eq!(bytes[..8], *b"TRLM\x01\0\0\0");
    assert_eq!((u32_at(&bytes, 12), u32_at(&bytes, 16)), (0, 1));
    let n = u32_at(&bytes, 20) as usize;
    let mut free = 64 + 40 * n;
    let tensors = (0..n).map(|i| {
        let at = 64 + 40 * i;
        let (offset, size) = (u64_at(&bytes, at + 24), u64_at(&bytes, at + 32));
        assert_eq!(offset, free.next_multiple_of(64));
        assert!(bytes[free..offset].iter().all(|&b| b == 0));
        free = offset + size;
        Stored {
            action: u32_at(&bytes, at),
            type_id: u32_at(&bytes, at + 4),
            rows: u32_at(&bytes, at + 8) as usize,
            cols: u32_at(&bytes, at + 12) as usize,
            padded: (u32_at(&bytes, at + 16), u32_at(&bytes, at + 20)),
            data: bytes[offset..free].to_vec(),
        }
    });
    let tensors = tensors.collect();
    assert_eq!(free.max(64), bytes.len());
    tensors
}

/// Writes a safetensors file of tensors by name, type, shape and bytes.
pub(crate) fn write_safetensors(path: &Path, tensors: &[(String, DType, Vec<usize>, Vec<u8>)]) {
    let mut writer = Writer::new(std::collections::BTreeMap::new());
    for (name, dtype, shape, _) in tensors {
        writer.tensor(name, *dtype, shape).unwrap();
    }
    let layout = writer.finish();
    let mut out = layout.header;
    out.resize(layout.file_len as usize, 0);
    for (entry, (.., bytes)) in layout.tensors.iter().zip(tensors) {
        out[entry.offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    fs::write(path, out).unwrap();
}

/// The header of a safetensors file, and its bytes.
pub(crate) fn read_safetensors(path: &Path) -> (SafeTensors, Vec<u8>) {
    let bytes = fs::read(path).unwrap();
    let header = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
    (header, bytes)
}

/// The number that manifests have for a type.
pub(crate) fn type_code(dtype: DType) -> u8 {
    let types = [DType::F32, DType::F16, DType::BF16, DType::I8, DType::U8];
    types.iter().position(|&of| of == dtype).unwrap() as u8
}
