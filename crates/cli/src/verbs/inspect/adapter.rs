//! What `inspect` shows of an adapter that isn't a package: PEFT's, and those of engine bundles.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::Result;
use serde::Serialize;
use sterna::ADAPTER_CONFIG;
use sterna_engine::lora::Orientation;
use sterna_format::bundle::{LORA_FILE, TENSORS_FILE};

use crate::{model, output};

#[derive(Debug, Serialize)]
pub(super) struct AdapterReport {
    path: String,
    format: &'static str,
    base_model: Option<String>,
    /// Ranks of its modules, each once, ascending.
    ranks: Vec<usize>,
    /// Scaling times rank, each once, ascending.
    alphas: Vec<f64>,
    targets: Vec<&'static str>,
    n_layers: usize,
    n_modules: usize,
    types: Vec<&'static str>,
}

/// Whether an adapter and no model is in this folder, as PEFT saves it or in an engine bundle.
pub(super) fn is_one(folder: &Path) -> bool {
    folder.join(ADAPTER_CONFIG).exists()
        || (folder.join(LORA_FILE).exists() && !folder.join(TENSORS_FILE).exists())
}

impl AdapterReport {
    pub(super) fn new(folder: &Path) -> Result<AdapterReport> {
        let adapter = model::open_adapter(folder)?;
        let pairs = &adapter.source.pairs;
        let rank_at = usize::from(adapter.source.orientation == Orientation::RankLast);
        let shapes = pairs.iter().map(|pair| pair.a.shape.get(rank_at).copied());
        let ranks: Vec<usize> = shapes.map(Option::unwrap_or_default).collect();
        // Alphas are whole numbers nearly always; scalings are their quotients in f32.
        let alpha = |(pair, rank): (&sterna_engine::lora::LoraPair, &usize)| {
            (f64::from(pair.scaling) * *rank as f64 * 1e4).round() as i64
        };
        let alphas: BTreeSet<i64> = pairs.iter().zip(&ranks).map(alpha).collect();
        let targets: BTreeSet<_> = pairs.iter().map(|pair| pair.module.name()).collect();
        let layers: BTreeSet<_> = pairs.iter().map(|pair| pair.layer).collect();
        let matrices = pairs.iter().flat_map(|pair| [&pair.a, &pair.b]);
        let types: BTreeSet<_> = matrices.map(|matrix| matrix.dtype.name()).collect();
        let is_peft = folder.join(ADAPTER_CONFIG).exists();
        Ok(AdapterReport {
            path: folder.display().to_string(),
            format: if is_peft {
                "PEFT adapter"
            } else {
                "adapter in an engine bundle"
            },
            base_model: adapter.base.clone(),
            n_modules: pairs.len(),
            ranks: ranks
                .into_iter()
                .collect::<BTreeSet<_>>()
                .into_iter()
                .collect(),
            alphas: alphas.into_iter().map(|n| n as f64 / 1e4).collect(),
            targets: targets.into_iter().collect(),
            n_layers: layers.len(),
            types: types.into_iter().collect(),
        })
    }

    pub(super) fn text(&self) -> String {
        fn list<T: ToString>(items: &[T]) -> String {
            items
                .iter()
                .map(T::to_string)
                .collect::<Vec<_>>()
                .join(", ")
        }
        let mut rows = vec![
            ("path", self.path.clone()),
            ("format", self.format.to_owned()),
        ];
        if let Some(base) = &self.base_model {
            rows.push(("base model", base.escape_debug().to_string()));
        }
        rows.extend([
            ("rank", list(&self.ranks)),
            ("alpha", list(&self.alphas)),
            ("targets", list(&self.targets)),
            (
                "modules",
                format!(
                    "{} in {} layers, {}",
                    self.n_modules,
                    self.n_layers,
                    list(&self.types)
                ),
            ),
        ]);
        output::table(&rows)
    }
}
