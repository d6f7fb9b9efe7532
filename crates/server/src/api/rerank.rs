//! Documents by how much they have to do with a query: by the cosine of their vectors and the query's.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use sterna_text::Encode;

use super::embeddings::{self, How, MAX_TEXTS, POOLING};
use super::json::Checked;
use super::shape::{COUNT, Shape, TEXT, field, required};
use super::{ApiError, Caller, Shared, openai};

const DOCUMENT: Shape = Shape::OneOf(&[TEXT, Shape::Object(&[&[required("text", TEXT)]])]);

/// What a request may have.
pub(super) const REQUEST: Shape = Shape::Object(&[&[
    required("model", Shape::Model),
    required("query", TEXT),
    required(
        "documents",
        Shape::Items(&DOCUMENT, "documents", 1, MAX_TEXTS),
    ),
    field("top_n", COUNT),
    field("return_documents", Shape::Flag),
    field("pooling", POOLING),
]]);

pub(super) async fn answer(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model(&at.get("model"))?;
    let how = How {
        pooling: embeddings::pooling(&at.get("pooling"), &model)?,
        normalised: true,
    };
    let query = at.get("query").required_text()?.to_owned();
    let documents = at.get("documents").items();
    let documents = documents.iter().map(|document| match document.value() {
        Value::String(text) => text.clone(),
        _ => document.get("text").text().unwrap_or_default().to_owned(),
    });
    let documents: Vec<String> = documents.collect();
    let top_n = at.get("top_n").whole().unwrap_or(usize::MAX);
    let returns = at.get("return_documents").flag().unwrap_or(false);
    let texts = [query].into_iter().chain(documents.iter().cloned());
    let texts = texts.map(openai::Input::Text).collect();
    let text = model.text.clone();
    let mut encoded = app
        .aside(move || openai::encoded(texts, &text, Encode::RAW))
        .await??;
    let n_tokens: usize = encoded.iter().map(Vec::len).sum();
    let of_documents = encoded.split_off(1);
    // Both at once, each with errors of its own.
    let (query, vectors) = tokio::try_join!(
        embeddings::vectors(&app, &caller, &model, ("query", encoded), how),
        embeddings::vectors(&app, &caller, &model, ("documents", of_documents), how),
    )?;
    let query = query.into_iter().next().unwrap_or_default();
    let results = ranked(&query, &vectors).into_iter().take(top_n);
    let results = results.map(|(index, score)| {
        let mut result = json!({"index": index, "relevance_score": score});
        if returns {
            result["document"] = json!({"text": documents[index]});
        }
        result
    });
    Ok(Json(json!({
        "id": crate::id::new("rerank-"),
        "object": "list",
        "model": model.name,
        "results": results.collect::<Vec<_>>(),
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
        "meta": {"billed_units": {"search_units": 1}},
    }))
    .into_response())
}

/// Which of `vectors`, of length 1, are nearest to `query`, the nearest first, and how near; of equals the first.
fn ranked(query: &[f32], vectors: &[Vec<f32>]) -> Vec<(usize, f32)> {
    let cosine = |vector: &[f32]| query.iter().zip(vector).map(|(a, b)| a * b).sum();
    let scores = vectors.iter().map(|vector| cosine(vector)).enumerate();
    let mut all: Vec<(usize, f32)> = scores.collect();
    all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    all
}

#[cfg(test)]
mod tests {
    use super::ranked;

    #[test]
    fn the_nearest_is_the_first() {
        let vectors = [[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [0.0, 1.0]].map(Vec::from);
        let order: Vec<usize> = (ranked(&[0.0, 1.0], &vectors).into_iter())
            .map(|(index, _)| index)
            .collect();
        assert_eq!(order, [0, 3, 2, 1]);
    }
}
