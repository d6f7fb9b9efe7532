//! For operators: health and metrics.

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::Shared;

/// Whether requests are answered.
pub(super) async fn health(State(app): State<Shared>) -> Response {
    let status = status(&app);
    told(status, status == "ok")
}

/// Whether the server should be left alone: it answers, ends what it has begun, or opens a lost device again.
pub(super) async fn live(State(app): State<Shared>) -> Response {
    let status = status(&app);
    told(status, status != "stopped")
}

fn status(app: &Shared) -> &'static str {
    let engines = &app.engines;
    match (engines.is_well(), engines.has_future(), app.is_draining()) {
        (false, false, _) => "stopped",
        (_, true, true) => "stopping",
        (false, true, false) => "recovering",
        (true, _, _) => "ok",
    }
}

fn told(status: &str, is_well: bool) -> Response {
    let code = match is_well {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    (code, Json(json!({ "status": status }))).into_response()
}

/// The type of what Prometheus reads.
pub(super) const METRICS_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// What Prometheus reads.
pub(super) async fn metrics(State(app): State<Shared>) -> Response {
    ([(header::CONTENT_TYPE, METRICS_TYPE)], app.metrics.text()).into_response()
}
