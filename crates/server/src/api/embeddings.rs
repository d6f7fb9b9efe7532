//! Vectors of texts.

use axum::Json;
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use sterna::embedding::Pooling;
use sterna_text::Encode;

use super::json::At;
use super::{ApiError, Caller, Shared, openai};
use crate::engine::{Output, Work, replies};

/// Texts of a request at most, as OpenAI has it.
const MAX_TEXTS: usize = 2048;

pub(super) async fn answer(app: Shared, caller: Caller, body: Value) -> Result<Response, ApiError> {
    let at = At::body(&body);
    let model = app.model(&at.get("model"))?;
    let input = at.get("input");
    let texts = openai::inputs(&input, &model.text)?;
    if texts.is_empty() || texts.len() > MAX_TEXTS {
        return Err(input.wrong(&format!("1 to {MAX_TEXTS} texts")));
    }
    let is_base64 = match at.get("encoding_format").text()? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(at.get("encoding_format").wrong("float or base64")),
    };
    let dimensions = at.get("dimensions");
    if !dimensions.is_absent() {
        return Err(
            dimensions.refused("vectors of another length than the model's aren't supported")
        );
    }
    let asked = at.get("pooling");
    let named = match asked.text()? {
        None => None,
        Some(name) => {
            let known = Pooling::NAMES.iter().find(|(known, _)| *known == name);
            let (_, pooling) = known.ok_or_else(|| asked.wrong("mean, cls or last"))?;
            Some(*pooling)
        }
    };
    let pooling = named.or(model.text.pooling).ok_or_else(|| {
        ApiError::invalid(format!(
            "the model `{}` doesn't say how its vectors are pooled; say it with `pooling`: mean, cls or last",
            model.text.name
        ))
        .at("pooling")
    })?;
    let normalised = at.get("normalize").flag()?.unwrap_or(true);
    let text = model.text.clone();
    let encoded = app
        .aside(move || openai::encoded(texts, &text, Encode::RAW))
        .await??;
    let ctx_len = model.text.ctx_len;
    for (index, ids) in encoded.iter().enumerate() {
        if ids.is_empty() || ids.len() > ctx_len {
            return Err(ApiError::invalid(format!(
                "input[{index}]: expected 1 to {ctx_len} tokens, found {}",
                ids.len()
            ))
            .at("input"));
        }
    }
    let n_tokens: usize = encoded.iter().map(Vec::len).sum();
    let n_texts = encoded.len();
    let (reply, mut outputs) = replies(1);
    for reply in reply {
        let work = Work::Embed {
            texts: encoded.clone(),
            pooling,
            normalised,
        };
        app.submit(&caller, &model, work, reply)?;
    }
    let mut vectors = Vec::with_capacity(n_texts);
    while vectors.len() < n_texts {
        match outputs.recv().await {
            Some((_, Output::Embedded(vector))) => vectors.push(vector),
            Some((_, Output::Failed(error))) => return Err(error.into()),
            Some(_) => {}
            None => return Err(crate::engine::Refused::Stopped.into()),
        }
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
        "model": model.text.name,
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }))
    .into_response())
}
