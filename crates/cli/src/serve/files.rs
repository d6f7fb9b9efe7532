//! Responses to requests for files.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};

use super::package::{Representation, ServedFile};
use super::range::{self, Wanted};
use super::site::Site;

/// For files whose name would change with their bytes, and for the others.
const IMMUTABLE: &str = "public, max-age=31536000, immutable";
const REVALIDATE: &str = "no-cache";

/// Other sites may not have pages in their frames.
const CONTENT_SECURITY_POLICY: &str = "frame-ancestors 'none'";

/// Answers a request for a file.
pub(super) async fn file(
    State(site): State<Arc<Site>>,
    Path(path): Path<String>,
    uri: Uri,
    method: Method,
    headers: HeaderMap,
) -> Response {
    match site.file(&path) {
        Some(file) => answer(file, &method, &headers),
        None if site.is_folder(&path) => to_folder(&path, &uri),
        None => (StatusCode::NOT_FOUND, "there is no such file\n").into_response(),
    }
}

/// Sends whoever asks for a folder without the slash at its end to where its page finds its files.
pub(super) fn to_folder(path: &str, uri: &Uri) -> Response {
    let query = uri.query().map(|query| format!("?{query}"));
    let location = format!("/{path}/{}", query.unwrap_or_default());
    match HeaderValue::try_from(location) {
        Ok(location) => {
            let headers = [(header::LOCATION, location)];
            (StatusCode::TEMPORARY_REDIRECT, headers).into_response()
        }
        // The query has what no header may.
        Err(_) => StatusCode::BAD_REQUEST.into_response(),
    }
}

/// The form that is asked for, the conditions of RFC 9110, section 13, in its order, then the range.
fn answer(file: &ServedFile, method: &Method, headers: &HeaderMap) -> Response {
    let form = &file.representation(takes_gzip(headers));
    let etag = &*form.etag;
    let size = form.bytes.len() as u64;
    let described = |status, body| described(status, file, form, body);
    if let Some(tags) = joined(headers, header::IF_MATCH)
        && !names(&tags, etag, Comparison::Strong)
    {
        return described(StatusCode::PRECONDITION_FAILED, Body::empty());
    }
    if let Some(tags) = joined(headers, header::IF_NONE_MATCH)
        && names(&tags, etag, Comparison::Weak)
    {
        return described(StatusCode::NOT_MODIFIED, Body::empty());
    }
    // Only GET has ranges, and a range of another version of the file is of no use. A date never matches,
    // because the server doesn't send any.
    let range = text(headers, header::RANGE)
        .filter(|_| method == Method::GET)
        .filter(|_| text(headers, header::IF_RANGE).is_none_or(|tag| tag.trim() == etag));
    match range.map_or(Wanted::Whole, |range| range::parse(range, size)) {
        Wanted::Whole => described(StatusCode::OK, Body::from(form.bytes.clone())),
        Wanted::Part(range) => {
            let content_range = format!("bytes {}-{}/{}", range.start, range.end - 1, size);
            // Within the file, so both fit an address.
            let part = form.bytes.slice(range.start as usize..range.end as usize);
            let response = described(StatusCode::PARTIAL_CONTENT, Body::from(part));
            ([(header::CONTENT_RANGE, content_range)], response).into_response()
        }
        Wanted::Unsatisfiable => {
            let content_range = format!("bytes */{size}");
            let response = described(StatusCode::RANGE_NOT_SATISFIABLE, Body::empty());
            ([(header::CONTENT_RANGE, content_range)], response).into_response()
        }
    }
}

/// Whether the field `Accept-Encoding`, RFC 9110, section 12.5.3, has gzip.
fn takes_gzip(headers: &HeaderMap) -> bool {
    let accepted = joined(headers, header::ACCEPT_ENCODING).unwrap_or_default();
    let weight = |coding: &str| {
        accepted.split(',').find_map(|item| {
            let mut parts = item.split(';').map(str::trim);
            let is_named = parts.next()?.eq_ignore_ascii_case(coding);
            let weight = parts.find_map(|part| part.strip_prefix("q=")?.parse().ok());
            is_named.then(|| weight.unwrap_or(1.0_f32))
        })
    };
    weight("gzip")
        .or_else(|| weight("*"))
        .is_some_and(|weight| weight > 0.0)
}

/// A response with the headers of a form of the file.
fn described(status: StatusCode, file: &ServedFile, form: &Representation, body: Body) -> Response {
    let is_about_content = status.is_success() || status == StatusCode::NOT_MODIFIED;
    let mut response = (status, body).into_response();
    let headers = response.headers_mut();
    let mut insert = |name: HeaderName, value: &str| {
        let value = value.parse().expect("visible ASCII, see `ServedFile`");
        headers.insert(name, value);
    };
    insert(header::ACCEPT_RANGES, "bytes");
    if file.is_compressed() {
        insert(header::VARY, "accept-encoding");
    }
    if is_about_content {
        insert(header::ETAG, &form.etag);
        let is_immutable = file.is_immutable();
        insert(
            header::CACHE_CONTROL,
            if is_immutable { IMMUTABLE } else { REVALIDATE },
        );
        if file.content_type().starts_with("text/html") {
            insert(header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY);
        }
    }
    if status.is_success() {
        if form.is_gzip {
            insert(header::CONTENT_ENCODING, "gzip");
        }
        insert(header::CONTENT_TYPE, file.content_type());
    }
    response
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Comparison {
    /// Byte-for-byte equality.
    Strong,
    /// Semantic equality; caches may weaken a tag in transit.
    Weak,
}

/// Whether a list of entity tags names `etag`; `*` names every one.
fn names(list: &str, etag: &str, comparison: Comparison) -> bool {
    list.split(',').map(str::trim).any(|tag| {
        let weak = tag.strip_prefix("W/");
        let opaque = weak
            .filter(|_| comparison == Comparison::Weak)
            .unwrap_or(tag);
        tag == "*" || opaque == etag
    })
}

/// All values of a header that may occur several times.
fn joined(headers: &HeaderMap, name: HeaderName) -> Option<String> {
    let values: Vec<_> = headers
        .get_all(name)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .collect();
    (!values.is_empty()).then(|| values.join(","))
}

/// The value of a header that occurs once.
fn text(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (Some(value), None) => value.to_str().ok(),
        _ => None,
    }
}
