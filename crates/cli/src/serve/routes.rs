//! The routes, and the headers of every response.

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::package::Package;
use super::{files, index};

/// The server's paths.
pub(super) fn router(package: Arc<Package>) -> Router {
    Router::new()
        .route("/", get(index::folder).options(preflight))
        .route("/index.json", get(index::json).options(preflight))
        .route("/{*file}", get(files::file).options(preflight))
        .with_state(package)
        .layer(middleware::map_response(with_common_headers))
}

/// Headers that pages of other sites may read.
const EXPOSED: &str = "Accept-Ranges, Content-Length, Content-Range, ETag";

/// Sent with every response: pages of any site may read it, and it may be part of pages that are isolated
/// from other origins, which browsers require before they allow threads with shared memory.
const COMMON_HEADERS: [(HeaderName, &str); 6] = [
    (header::ACCESS_CONTROL_ALLOW_ORIGIN, "*"),
    (header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED),
    (
        HeaderName::from_static("cross-origin-opener-policy"),
        "same-origin",
    ),
    (
        HeaderName::from_static("cross-origin-embedder-policy"),
        "require-corp",
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        "cross-origin",
    ),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
];

async fn with_common_headers(mut response: Response) -> Response {
    for (name, value) in COMMON_HEADERS {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

/// The response to a CORS preflight request.
async fn preflight() -> Response {
    let headers = [
        (header::ALLOW, "GET, HEAD, OPTIONS"),
        (header::ACCESS_CONTROL_ALLOW_METHODS, "GET, HEAD, OPTIONS"),
        (
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            "Range, If-Range, If-Match, If-None-Match",
        ),
        (header::ACCESS_CONTROL_MAX_AGE, "86400"),
        // Pages on the internet may access machines of a private network, which this one may be.
        (
            HeaderName::from_static("access-control-allow-private-network"),
            "true",
        ),
    ];
    (StatusCode::NO_CONTENT, headers).into_response()
}
