//! Embeddings of texts: one vector for each, of the last hidden states of its tokens.

use sterna_engine::backend::Backend;
use sterna_engine::{EngineError, Logits, Session, Step};
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
        let mut pool = Pool::default();
        pool.add(self, hidden, width);
        pool.vector(self)
    }
}

/// What becomes one vector, as hidden states come.
#[derive(Debug, Clone, Default)]
struct Pool {
    /// Tokens so far.
    n_tokens: usize,
    /// Their sums, or the one that counts.
    sums: Vec<f64>,
}

impl Pool {
    /// Adds the hidden states of more tokens, `[n_tokens, width]`.
    fn add(&mut self, pooling: Pooling, hidden: &[f32], width: usize) {
        for row in hidden.chunks_exact(width.max(1)) {
            let is_first = self.n_tokens == 0;
            self.n_tokens += 1;
            match pooling {
                Pooling::Mean => {
                    self.sums.resize(width, 0.0);
                    for (sum, value) in self.sums.iter_mut().zip(row) {
                        *sum += f64::from(*value);
                    }
                }
                Pooling::First if !is_first => {}
                Pooling::First | Pooling::Last => {
                    self.sums = row.iter().map(|value| f64::from(*value)).collect();
                }
            }
        }
    }

    fn vector(&self, pooling: Pooling) -> Vec<f32> {
        let n_rows = match pooling {
            Pooling::Mean => self.n_tokens as f64,
            Pooling::First | Pooling::Last => 1.0,
        };
        let mean = self.sums.iter().map(|sum| (sum / n_rows) as f32);
        mean.collect()
    }
}

/// Texts that are computed in one batch at most: each has memory of its own.
const MAX_TOGETHER: usize = 16;

/// Makes vectors of texts part by part, so that something else can be computed in between.
pub struct Embedder<B: Backend> {
    /// Has the text that was begun.
    session: Session<B>,
    /// Those of the other texts of a batch.
    others: Vec<Session<B>>,
    /// What there is of the text that was begun.
    pool: Pool,
    pooling: Pooling,
    normalised: bool,
}

impl<B: Backend> Embedder<B> {
    /// Of vectors that are of length 1 if they are `normalised`. The sequence of `session` is replaced by texts.
    pub fn new(session: Session<B>, pooling: Pooling, normalised: bool) -> Embedder<B> {
        Embedder {
            session,
            others: Vec::new(),
            pool: Pool::default(),
            pooling,
            normalised,
        }
    }

    /// Tokens that are computed of the text that was begun.
    pub fn n_begun(&self) -> usize {
        self.pool.n_tokens
    }

    /// Computes the next part of `texts`, and returns the vectors that it completes: those of the first texts, which
    /// the next call has no more. A part has at most `n_tokens`: of a long text, or of several short texts, which are
    /// computed together. Encoders read whole texts, however long.
    ///
    /// The vectors are those of [`embed`], with the same bits on a CPU.
    ///
    /// Errors: [`EngineError`] names the token or the limit. After one, the first text begins anew.
    pub async fn advance(
        &mut self,
        texts: &[Vec<u32>],
        n_tokens: usize,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let mut vectors = Embedder::advance_together(&mut [(self, texts)], n_tokens).await?;
        Ok(vectors.pop().unwrap_or_default())
    }

    /// [`Embedder::advance`] of several, each with its texts, all of one model: a part has the next texts of the first, and
    /// those of the others that there is room for. For each, the vectors that it completes.
    pub async fn advance_together(
        of: &mut [(&mut Embedder<B>, &[Vec<u32>])],
        n_tokens: usize,
    ) -> Result<Vec<Vec<Vec<f32>>>, EngineError> {
        let mut vectors = vec![Vec::new(); of.len()];
        if let Some((embedder, [first, ..])) = of.first_mut() {
            let is_encoder = embedder.session.model().config().is_encoder();
            if !is_encoder && (embedder.n_begun() > 0 || first.len() > n_tokens) {
                vectors[0].extend(embedder.part(first, n_tokens).await?);
                return Ok(vectors);
            }
        }
        let (mut n_left, mut n_texts) = (n_tokens, 0);
        let mut steps = Vec::new();
        let mut counts = Vec::with_capacity(of.len());
        for (embedder, texts) in of.iter_mut() {
            let texts = *texts;
            let short = texts.iter().take_while(|text| {
                let fits = text.len() <= n_left && n_texts < MAX_TOGETHER;
                let is_taken = fits || n_texts == 0;
                if is_taken {
                    n_left = n_left.saturating_sub(text.len());
                    n_texts += 1;
                }
                is_taken
            });
            // One that has begun a text goes on with it by itself.
            let count = match embedder.n_begun() {
                0 => short.count(),
                _ => 0,
            };
            counts.push(count);
            embedder.add_steps(&texts[..count], &mut steps);
            if count < texts.len() {
                break;
            }
        }
        let hidden = Session::hidden_together_async(&mut steps).await?;
        drop(steps);
        let mut hidden = hidden.into_iter();
        for ((count, vectors), (embedder, _)) in counts.into_iter().zip(&mut vectors).zip(of) {
            let of_texts = hidden.by_ref().take(count);
            vectors.extend(of_texts.map(|hidden| embedder.vector(&hidden)));
        }
        Ok(vectors)
    }

    /// Computes the next part of `text`, and returns its vector after the last.
    async fn part(
        &mut self,
        text: &[u32],
        n_tokens: usize,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        let mut pool = std::mem::take(&mut self.pool);
        if pool.n_tokens == 0 {
            self.session.truncate(0);
        }
        let rest = text.get(pool.n_tokens..).unwrap_or_default();
        let part = &rest[..rest.len().min(n_tokens.max(1))];
        let hidden = self.session.hidden_async(part).await?;
        pool.add(self.pooling, &hidden, self.width());
        if part.len() < rest.len() {
            self.pool = pool;
            return Ok(None);
        }
        Ok(Some(finished(pool.vector(self.pooling), self.normalised)))
    }

    /// Adds steps that compute each of `texts` as a whole.
    fn add_steps<'a>(&'a mut self, texts: &'a [Vec<u32>], steps: &mut Vec<Step<'a, B>>) {
        while self.others.len() + 1 < texts.len() {
            self.others.push(self.session.fork(0));
        }
        let logits = match self.pooling {
            Pooling::Last => Logits::Last,
            Pooling::Mean | Pooling::First => Logits::All,
        };
        let sessions = [&mut self.session].into_iter().chain(&mut self.others);
        steps.extend(sessions.zip(texts).map(|(session, ids)| {
            session.truncate(0);
            Step {
                session,
                ids,
                logits,
            }
        }));
    }

    /// The vector of a text with these hidden states.
    fn vector(&self, hidden: &[f32]) -> Vec<f32> {
        finished(self.pooling.pool(hidden, self.width()), self.normalised)
    }

    fn width(&self) -> usize {
        self.session.model().config().model_dim
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
    let vector = pooling.pool(&hidden, session.model().config().model_dim);
    Ok(finished(vector, normalised))
}

/// `vector`, of length 1 if it is `normalised`.
fn finished(mut vector: Vec<f32>, normalised: bool) -> Vec<f32> {
    if normalised {
        let squares: f64 = vector.iter().map(|x| f64::from(*x).powi(2)).sum();
        // As PyTorch, which bounds the length from below.
        let length = squares.sqrt().max(1e-12);
        vector
            .iter_mut()
            .for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
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
