//! Which models there are.

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{ANTHROPIC_VERSION, ApiError, Dialect, Shared};
use crate::VERSION;
use crate::model::ModelText;

/// All of them.
pub(super) async fn list(State(app): State<Shared>, headers: HeaderMap) -> Response {
    let models = &app.models;
    if headers.contains_key(ANTHROPIC_VERSION) {
        let all: Vec<Value> = models.iter().map(|model| of_anthropic(model)).collect();
        let id = |model: Option<&std::sync::Arc<ModelText>>| model.map(|model| model.name.clone());
        return Json(json!({
            "data": all,
            "has_more": false,
            "first_id": id(models.first()),
            "last_id": id(models.last()),
        }))
        .into_response();
    }
    let commit = &app.settings.commit;
    let all: Vec<Value> = models
        .iter()
        .map(|model| of_openai(model, commit))
        .collect();
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
        Some(model) if is_anthropic => Json(of_anthropic(&model.text)).into_response(),
        Some(model) => Json(of_openai(&model.text, &app.settings.commit)).into_response(),
        None => {
            let message = format!("the model `{name}` does not exist");
            ApiError::new(StatusCode::NOT_FOUND, message)
                .with_code("model_not_found")
                .respond(dialect)
        }
    }
}

fn of_openai(model: &ModelText, commit: &Option<String>) -> Value {
    json!({
        "id": model.name,
        "slug": model.name,
        "display_name": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "sterna",
        "max_model_len": model.ctx_len,
        "context_window": model.ctx_len,
        "hash": model.hash,
        "runtime": {"name": "sterna", "version": VERSION, "commit": commit},
    })
}

fn of_anthropic(model: &ModelText) -> Value {
    json!({
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": rfc3339(model.created),
        "max_input_tokens": model.ctx_len,
        "max_tokens": model.ctx_len,
    })
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
