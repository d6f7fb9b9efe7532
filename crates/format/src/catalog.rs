//! Where each tensor of a model is.

use std::collections::HashMap;

use crate::DType;

/// One stored tensor, under its GGUF name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorEntry {
    /// GGUF name, such as `blk.0.attn_q.weight`; a name no table knows is kept as the file has it.
    pub name: String,
    /// What the file calls it, where `name` was made of that: `model.layers.0.self_attn.q_proj.weight`.
    pub renamed_from: Option<String>,
    /// Encoding of the stored bytes.
    pub dtype: DType,
    /// Row-major, outermost first: a linear weight is `[n, k]`.
    pub shape: Vec<usize>,
    /// Index of the file in the list the catalog was made from.
    pub file: usize,
    /// First byte, counted from the start of that file.
    pub offset: u64,
    /// Bytes stored, I2_S trailer included.
    pub len: u64,
}

impl TensorEntry {
    /// What the file calls the tensor, for messages.
    pub fn name_in_file(&self) -> &str {
        self.renamed_from.as_deref().unwrap_or(&self.name)
    }
}

/// A file about to be written: its header, and where the tensors go.
#[derive(Debug, Clone)]
pub struct FileLayout {
    /// Everything before the data section.
    pub header: Vec<u8>,
    /// Where each tensor's bytes go, in the order they were added. Bytes between tensors are zero.
    pub tensors: Vec<TensorEntry>,
    /// Length of the whole file in bytes, padding of the last tensor included.
    pub file_len: u64,
}

/// The tensors of a model, possibly spread over several files.
#[derive(Debug, Clone, Default)]
pub struct TensorCatalog {
    entries: Vec<TensorEntry>,
    by_name: HashMap<String, usize>,
}

impl TensorCatalog {
    /// Adds `entry`; gives it back if its name is taken.
    pub fn insert(&mut self, entry: TensorEntry) -> Result<(), TensorEntry> {
        if self.by_name.contains_key(&entry.name) {
            return Err(entry);
        }
        self.by_name.insert(entry.name.clone(), self.entries.len());
        self.entries.push(entry);
        Ok(())
    }

    /// The tensor called `name`.
    pub fn get(&self, name: &str) -> Option<&TensorEntry> {
        self.by_name.get(name).map(|&i| &self.entries[i])
    }

    /// Every tensor, in the order the files list them.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &TensorEntry> {
        self.entries.iter()
    }

    /// Values in all tensors together, as a person counts a model's size: ternary weights packed four to a byte
    /// count as four, their scales not at all.
    pub fn n_parameters(&self) -> u64 {
        let count = |tensor: &TensorEntry| {
            let n: u64 = tensor.shape.iter().map(|&dim| dim as u64).product();
            let is_packed = self.get(&format!("{}_scale", tensor.name)).is_some();
            match tensor.name.ends_with(".weight_scale") {
                true => 0,
                false if is_packed => n * 4,
                false => n,
            }
        };
        self.iter().map(count).sum()
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Elements of a tensor with these dimensions, in any order.
///
/// `None` if this machine can't count them in a `usize`. Zeros don't hide that the other dimensions
/// are too large, so that multiplying them in another order is safe as well.
pub(crate) fn n_elements(dims: impl Iterator<Item = u64> + Clone) -> Option<u64> {
    let n = dims
        .clone()
        .try_fold(1_u64, |n, d| n.checked_mul(d.max(1)))?;
    usize::try_from(n).ok()?;
    Some(if dims.clone().any(|d| d == 0) { 0 } else { n })
}
