//! Vectors of texts.

use axum::Json;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sterna::embedding::Pooling;
use sterna_text::Encode;

use super::json::{At, Checked};
use super::shape::{COUNT, Shape, field, required, word};
use super::{ApiError, Caller, Named, Shared, openai};
use crate::engine::{Output, Refused, Work};

/// Texts of a request at most, as OpenAI has it.
pub(super) const MAX_TEXTS: usize = 2048;

/// What a request may have.
pub(super) const REQUEST: Shape = Shape::Object(&[&[
    required("model", Shape::Model),
    required("input", openai::fields::INPUTS),
    field("encoding_format", word(&["float", "base64"])),
    field("dimensions", COUNT),
    field("pooling", POOLING),
    field("normalize", Shape::Flag),
]]);

/// How one vector is made of those of all tokens.
pub(super) const POOLING: Shape = word(&["mean", "cls", "last"]);

pub(super) async fn answer(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model(&at.get("model"))?;
    let input = at.get("input");
    let texts = openai::inputs(&input, &model.text)?;
    if texts.is_empty() || texts.len() > MAX_TEXTS {
        return Err(input.wrong(&format!("1 to {MAX_TEXTS} texts")));
    }
    let is_base64 = at.get("encoding_format").text() == Some("base64");
    let dimensions = at.get("dimensions");
    let n_dimensions = match dimensions.is_absent() {
        true => model.text.model_dim,
        false => dimensions.whole_in(1..=model.text.model_dim)?,
    };
    let normalised = at.get("normalize").flag().unwrap_or(true);
    let how = How {
        pooling: pooling(&at.get("pooling"), &model)?,
        normalised,
    };
    let text = model.text.clone();
    let encoded = app
        .aside(move || openai::encoded(texts, &text, Encode::RAW))
        .await??;
    let n_tokens: usize = encoded.iter().map(Vec::len).sum();
    let mut vectors = vectors(&app, &caller, &model, ("input", encoded), how).await?;
    for vector in &mut vectors {
        cut(vector, n_dimensions, normalised);
    }
    let data = vectors.iter().enumerate().map(|(index, vector)| {
        let embedding = match is_base64 {
            true => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                Value::from(STANDARD.encode(bytes))
            }
            false => json!(vector),
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    });
    Ok(Json(json!({
        "object": "list",
        "data": data.collect::<Vec<_>>(),
        "model": model.name,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }))
    .into_response())
}

/// How a vector is made of those of a text's tokens.
#[derive(Debug, Clone, Copy)]
pub(super) struct How {
    pub(super) pooling: Pooling,
    /// To length 1.
    pub(super) normalised: bool,
}

/// The pooling that `asked` says, or else the one of `model`.
pub(super) fn pooling(asked: &At<'_>, model: &Named) -> Result<Pooling, ApiError> {
    let named = asked.text().and_then(|name| {
        let mut known = Pooling::NAMES.iter();
        known.find(|(known, _)| *known == name)
    });
    let named = named.map(|(_, pooling)| *pooling);
    named.or(model.text.pooling).ok_or_else(|| {
        asked.refused(format!(
            "the model `{}` doesn't say how its vectors are pooled: expected mean, cls or last",
            model.name
        ))
    })
}

/// A vector of each of `texts`, of which errors say where they were.
pub(super) async fn vectors(
    app: &Shared,
    caller: &Caller,
    model: &Named,
    (place, texts): (&str, Vec<Vec<u32>>),
    How {
        pooling,
        normalised,
    }: How,
) -> Result<Vec<Vec<f32>>, ApiError> {
    let ctx_len = model.text.ctx_len;
    for (index, ids) in texts.iter().enumerate() {
        if ids.is_empty() || ids.len() > ctx_len {
            return Err(ApiError::invalid(format!(
                "{place}[{index}]: expected 1 to {ctx_len} tokens, found {}",
                ids.len()
            ))
            .at(place));
        }
    }
    let n_texts = texts.len();
    let n_tokens = texts.iter().map(Vec::len).sum();
    let work = Work::Embed {
        texts,
        pooling,
        normalised,
    };
    let mut outputs = app.submit(caller, model, work, n_tokens)?;
    let mut vectors = Vec::with_capacity(n_texts);
    while vectors.len() < n_texts {
        match outputs.recv().await {
            Some((_, Output::Embedded(vector))) => vectors.push(vector),
            Some((_, Output::Failed(error))) => return Err(error.into()),
            Some(_) => {}
            None => return Err(Refused::Stopped.into()),
        }
    }
    Ok(vectors)
}

/// Keeps the first `n` elements, which models that are trained so say most with, and the length of 1 if `normalised`.
fn cut(vector: &mut Vec<f32>, n: usize, normalised: bool) {
    if n >= vector.len() {
        return;
    }
    vector.truncate(n);
    let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt();
    if normalised && length > 0.0 {
        vector.iter_mut().for_each(|x| *x /= length);
    }
}
