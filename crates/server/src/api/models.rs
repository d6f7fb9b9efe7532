//! Which models there are.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{ANTHROPIC_VERSION, ApiError, Dialect, Named, Shared};
use crate::VERSION;
use crate::engine::Stage;

/// All of them.
pub(super) async fn list(State(app): State<Shared>, headers: HeaderMap) -> Response {
    let models = app.all();
    if headers.contains_key(ANTHROPIC_VERSION) {
        let all: Vec<Value> = models.iter().map(of_anthropic).collect();
        let id = |model: Option<&Named>| model.map(|model| model.name.clone());
        return Json(json!({
            "data": all,
            "has_more": false,
            "first_id": id(models.first()),
            "last_id": id(models.last()),
        }))
        .into_response();
    }
    let all: Vec<Value> = models.iter().map(|model| of_openai(&app, model)).collect();
    // Codex looks for `models`.
    Json(json!({"object": "list", "data": all, "models": all})).into_response()
}

/// The one at this path.
pub(super) async fn one(
    State(app): State<Shared>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Response {
    let is_anthropic = headers.contains_key(ANTHROPIC_VERSION);
    let dialect = match is_anthropic {
        true => Dialect::Anthropic,
        false => Dialect::OpenAi,
    };
    match app.model_named(&name) {
        Some(model) if is_anthropic => Json(of_anthropic(&model)).into_response(),
        Some(model) => Json(of_openai(&app, &model)).into_response(),
        None => {
            let message = format!("the model `{name}` does not exist");
            ApiError::new(StatusCode::NOT_FOUND, message)
                .with_code("model_not_found")
                .respond(dialect)
        }
    }
}

pub(super) fn of_openai(app: &Shared, named: &Named) -> Value {
    let commit = &app.settings.commit;
    let standing = app.engines.standing(named.index);
    let stage = match standing.stage {
        Stage::Unloaded | Stage::Unloading => "unloaded",
        Stage::Loading => "loading",
        Stage::Loaded => "loaded",
    };
    let Named {
        name,
        text,
        adapter,
        ..
    } = named;
    let mut model = json!({
        "id": name,
        "slug": name,
        "display_name": name,
        "object": "model",
        "created": created(named),
        "owned_by": "sterna",
        "max_model_len": text.ctx_len,
        "context_window": text.ctx_len,
        // What was replaced isn't in it.
        "hash": text.hash.as_ref().filter(|_| standing.generation == 0),
        "generation": standing.generation,
        // As llama.cpp says it.
        "status": {"value": stage},
        "pinned": standing.is_pinned,
        "runtime": {"name": "sterna", "version": VERSION, "commit": commit},
    });
    if adapter.is_some() {
        // As vLLM says which model an adapter is of.
        model["parent"] = text.name.clone().into();
    }
    model
}

fn of_anthropic(named: &Named) -> Value {
    json!({
        "type": "model",
        "id": named.name,
        "display_name": named.name,
        "created_at": rfc3339(created(named)),
        "max_input_tokens": named.text.ctx_len,
        "max_tokens": named.text.ctx_len,
    })
}

/// When it was loaded.
fn created(named: &Named) -> u64 {
    let adapter = named.adapter.as_ref().map(|adapter| adapter.created);
    adapter.unwrap_or(named.text.created)
}

/// The time that is `seconds` after the beginning of 1970.
pub(super) fn rfc3339(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days since the first of March of the year 0, in eras of 400 years.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = era * 400 + year + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}Z",
        rest / 3_600,
        rest / 60 % 60,
        rest % 60
    )
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn times_are_those_of_the_calendar() {
        for (seconds, time) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_798_761_599, "2026-12-31T23:59:59Z"),
        ] {
            assert_eq!(rfc3339(seconds), time);
        }
    }
}
