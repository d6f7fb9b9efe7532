//! For operators: health and metrics.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::Shared;

/// Whether requests are answered.
pub(super) async fn health(State(app): State<Shared>) -> Response {
    let status = match (app.engines.is_well(), app.is_draining()) {
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

/// The type of what Prometheus reads.
pub(super) const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What Prometheus reads.
pub(super) async fn metrics(State(app): State<Shared>) -> Response {
    ([(header::CONTENT_TYPE, METRICS_TYPE)], app.metrics.text()).into_response()
}
