//! Embeddings of texts: one vector for each, of the last hidden states of its tokens.

use sterna_engine::backend::Backend;
use sterna_engine::{EngineError, Session};
use sterna_format::gguf::Metadata;
use sterna_format::rdrr::Manifest;

use crate::error::{Result, bail};

/// What makes one vector of those of all tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// Their mean.
    Mean,
    /// That of the first token.
    First,
    /// That of the last token.
    Last,
}

impl Pooling {
    /// Every one, with the name that command lines have for it.
    pub const NAMES: [(&str, Pooling); 3] = [
        ("mean", Pooling::Mean),
        ("cls", Pooling::First),
        ("last", Pooling::Last),
    ];

    /// What packages call it in `metadata`.
    pub const MEMBER: &str = "pooling";

    /// Its name.
    pub fn name(self) -> &'static str {
        let found = Pooling::NAMES.iter().find(|(_, pooling)| *pooling == self);
        found.map_or("", |(name, _)| name)
    }

    /// Of a model with the GGUF architecture `architecture`, the key of its kind and the value there.
    pub fn to_gguf(self, architecture: &str) -> (String, u32) {
        let kind = match self {
            Pooling::Mean => 1,
            Pooling::First => 2,
            Pooling::Last => 3,
        };
        (format!("{architecture}.pooling_type"), kind)
    }

    /// What the manifest of a package says (`metadata.pooling`), if it says something.
    ///
    /// Errors: a name that isn't among [`Pooling::NAMES`].
    pub fn of_package(manifest: &Manifest) -> Result<Option<Pooling>> {
        let metadata = manifest.metadata.as_ref();
        let Some(said) = metadata.and_then(|metadata| metadata.get(Pooling::MEMBER)) else {
            return Ok(None);
        };
        let found = Pooling::NAMES.iter().find(|(name, _)| said == name);
        match found {
            Some((_, pooling)) => Ok(Some(*pooling)),
            None => bail!(
                Unsupported,
                "metadata.pooling: expected mean, cls or last, found {said}"
            ),
        }
    }

    /// What the metadata of a GGUF file says (`pooling_type`), if it says something.
    ///
    /// Errors: a kind that isn't one of these.
    pub fn of_gguf(metadata: &Metadata) -> Result<Option<Pooling>> {
        let Some(architecture) = metadata.architecture()? else {
            return Ok(None);
        };
        let key = format!("{architecture}.pooling_type");
        Ok(match metadata.get_u64(&key)? {
            None | Some(0) => None,
            Some(1) => Some(Pooling::Mean),
            Some(2) => Some(Pooling::First),
            Some(3) => Some(Pooling::Last),
            Some(found) => bail!(
                Unsupported,
                "{key}: expected 1 (mean), 2 (cls) or 3 (last), found {found}"
            ),
        })
    }

    /// What `1_Pooling/config.json` of a checkpoint says (Sentence Transformers).
    ///
    /// Errors: it isn't JSON, or says something other than one of these.
    pub fn of_checkpoint(json: &[u8]) -> Result<Pooling> {
        let config: serde_json::Value = serde_json::from_slice(json)?;
        let is_on = |(key, value): (&String, &serde_json::Value)| {
            let mode = key.strip_prefix("pooling_mode_")?;
            (value == true).then(|| mode.to_owned())
        };
        let modes: Vec<String> = match config.as_object() {
            Some(members) => members.iter().filter_map(is_on).collect(),
            None => Vec::new(),
        };
        Ok(
            match &modes.iter().map(String::as_str).collect::<Vec<_>>()[..] {
                ["mean_tokens"] => Pooling::Mean,
                ["cls_token"] => Pooling::First,
                ["lasttoken"] => Pooling::Last,
                found => bail!(
                    Unsupported,
                    "expected one of pooling_mode_mean_tokens, _cls_token and _lasttoken, found {found:?}"
                ),
            },
        )
    }

    /// The vector of a text whose tokens have the hidden states `hidden`, `[n_tokens, width]`; empty without tokens.
    pub fn pool(self, hidden: &[f32], width: usize) -> Vec<f32> {
        let rows = hidden.chunks_exact(width.max(1));
        let n_rows = rows.len();
        match self {
            Pooling::First => rows.take(1).flatten().copied().collect(),
            Pooling::Last => rows
                .skip(n_rows.saturating_sub(1))
                .flatten()
                .copied()
                .collect(),
            Pooling::Mean => {
                let mut sums = vec![0.0_f64; if n_rows == 0 { 0 } else { width }];
                for row in rows {
                    for (sum, value) in sums.iter_mut().zip(row) {
                        *sum += f64::from(*value);
                    }
                }
                sums.iter()
                    .map(|sum| (sum / n_rows as f64) as f32)
                    .collect()
            }
        }
    }
}

/// The embedding of the text with these tokens, `[model_dim]`; of length 1 if it is `normalised`. The sequence of the
/// session is replaced by it.
///
/// Errors: [`EngineError`] names the token or the limit.
pub async fn embed<B: Backend>(
    session: &mut Session<B>,
    ids: &[u32],
    pooling: Pooling,
    normalised: bool,
) -> Result<Vec<f32>, EngineError> {
    session.truncate(0);
    let hidden = session.hidden_async(ids).await?;
    let mut vector = pooling.pool(&hidden, session.model().config().model_dim);
    if normalised {
        let squares: f64 = vector.iter().map(|x| f64::from(*x).powi(2)).sum();
        // As PyTorch, which bounds the length from below.
        let length = squares.sqrt().max(1e-12);
        vector
            .iter_mut()
            .for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    Ok(vector)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use sterna_format::gguf::Value;

    use super::*;

    #[test]
    fn rows_become_one() {
        let hidden = [1.0, 2.0, 3.0, 6.0, 5.0, 1.0];
        assert_eq!(Pooling::First.pool(&hidden, 2), [1.0, 2.0]);
        assert_eq!(Pooling::Last.pool(&hidden, 2), [5.0, 1.0]);
        assert_eq!(Pooling::Mean.pool(&hidden, 2), [3.0, 3.0]);
        for (_, pooling) in Pooling::NAMES {
            assert_eq!(pooling.pool(&[], 2), [0.0; 0], "{}", pooling.name());
        }
    }

    #[test]
    fn both_kinds_of_files_say_how() {
        for (json, expected) in [
            (r#"{"pooling_mode_mean_tokens": true}"#, Some(Pooling::Mean)),
            (
                r#"{"pooling_mode_cls_token": true, "pooling_mode_lasttoken": false}"#,
                Some(Pooling::First),
            ),
            (r#"{"pooling_mode_lasttoken": true}"#, Some(Pooling::Last)),
            (r#"{"pooling_mode_max_tokens": true}"#, None),
            (
                r#"{"pooling_mode_mean_tokens": true, "pooling_mode_lasttoken": true}"#,
                None,
            ),
            ("[]", None),
            ("{", None),
        ] {
            assert_eq!(
                Pooling::of_checkpoint(json.as_bytes()).ok(),
                expected,
                "{json}"
            );
        }
        let of = |kind: u32| {
            let mut metadata = Metadata::new();
            let architecture = Value::String("qwen3".into());
            metadata
                .insert("general.architecture", architecture)
                .unwrap();
            metadata
                .insert("qwen3.pooling_type", Value::U32(kind))
                .unwrap();
            Pooling::of_gguf(&metadata).ok()
        };
        for (said, expected) in [("cls", Some(Pooling::First)), ("max", None)] {
            let manifest = Manifest {
                metadata: json!({ Pooling::MEMBER: said }).as_object().cloned(),
                ..Manifest::default()
            };
            let found = Pooling::of_package(&manifest).ok().flatten();
            assert_eq!(found, expected, "{said}");
        }
        assert_eq!(of(3), Some(Some(Pooling::Last)));
        assert_eq!(of(1), Some(Some(Pooling::Mean)));
        assert_eq!((of(0), of(4)), (Some(None), None));
        assert_eq!(Pooling::of_gguf(&Metadata::new()).unwrap(), None);
    }
}
