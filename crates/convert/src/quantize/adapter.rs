//! The matrices of an adapter.

use std::path::PathBuf;

use sterna::{Context, Result, bail};
use sterna_format::bundle::{
    LoraBlock, LoraFile, LoraPair, LoraSource, LoraTarget, MatrixSource, StoredMatrix,
};

use super::QuantizeSettings;
use super::output::OutputFile;
use super::shards::Shards;

/// The destination of an adapter's matrices, and what their shapes must agree with.
#[derive(Debug, Clone)]
pub struct AdapterOutput {
    /// The file to write.
    pub path: PathBuf,
    /// Rank of every pair, where it is known.
    pub rank: Option<u32>,
    /// Heads of queries, where they are known.
    pub n_heads: Option<u32>,
    /// Heads of keys and of values, where they are known.
    pub n_kv_heads: Option<u32>,
}

impl AdapterOutput {
    /// Writes the matrices of `block`, unchanged.
    pub(super) fn write(
        &self,
        block: &LoraBlock,
        settings: &QuantizeSettings,
        shards: &Shards,
    ) -> Result<OutputFile> {
        for pair in &block.pairs {
            self.check(pair, settings)?;
        }
        let stored = |matrix: &MatrixSource| StoredMatrix {
            dtype: matrix.dtype.dtype(),
            rows: matrix.rows,
            cols: matrix.cols,
            // Its offset and length are determined by the layout.
            offset: 0,
            size: 0,
        };
        let pairs = block.pairs.iter().map(|pair| LoraPair {
            layer: pair.layer,
            target: pair.target,
            a: stored(&pair.a),
            b: stored(&pair.b),
        });
        let layout = LoraFile::layout(block.n_layers, block.scale, pairs.collect())?;
        let mut out = OutputFile::create(&self.path)?;
        out.write(&layout.header())?;
        for (source, pair) in block.pairs.iter().zip(&layout.pairs) {
            for (source, matrix) in [(&source.a, &pair.a), (&source.b, &pair.b)] {
                out.pad_to(matrix.offset)?;
                let bytes = shards.bytes(&source.data);
                out.write(&bytes.with_context(|| label(pair.layer, pair.target))?)?;
            }
        }
        Ok(out)
    }

    /// Checks the shapes of a pair, as far as the model's are known.
    fn check(&self, pair: &LoraSource, settings: &QuantizeSettings) -> Result<()> {
        let heads = |n: Option<u32>| n?.checked_mul(settings.head_dim?);
        let (q, kv) = (heads(self.n_heads), heads(self.n_kv_heads));
        let model = &settings.model;
        let (hidden, ffn) = (
            Some(model.hidden_dim_orig),
            Some(model.intermediate_dim_orig),
        );
        let (input, output) = match pair.target {
            LoraTarget::Q => (hidden, q),
            LoraTarget::K | LoraTarget::V => (hidden, kv),
            LoraTarget::O => (q, hidden),
            LoraTarget::Gate | LoraTarget::Up => (hidden, ffn),
            LoraTarget::Down => (ffn, hidden),
        };
        for (what, expected, found) in [
            ("rank", self.rank, pair.a.rows),
            ("A: columns", input, pair.a.cols),
            ("B: rows", output, pair.b.rows),
        ] {
            if let Some(expected) = expected.filter(|&expected| expected != found) {
                let label = label(pair.layer, pair.target);
                bail!(
                    InvalidFile,
                    "{label}: {what}: expected {expected}, found {found}"
                );
            }
        }
        Ok(())
    }
}

fn label(layer: u32, target: LoraTarget) -> String {
    format!("layer {layer}, {}", target.module())
}
