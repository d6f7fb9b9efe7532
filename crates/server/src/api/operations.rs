//! For operators: health and metrics.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::Shared;

/// Whether requests are answered.
pub(super) async fn health(State(app): State<Shared>) -> Response {
    let status = match (app.engine.is_well(), app.is_draining()) {
        (false, _) => "stopped",
        (true, true) => "stopping",
        (true, false) => "ok",
    };
    let code = match status {
        "ok" => StatusCode::OK,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    (code, Json(json!({ "status": status }))).into_response()
}

/// What Prometheus reads.
pub(super) async fn metrics(State(app): State<Shared>) -> Response {
    const TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, TYPE)], app.metrics.text()).into_response()
}
