//! The index page of the package.

use std::fmt::Write;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{Html, IntoResponse, Response};
use serde::Serialize;

use super::site::Site;
use crate::output;

#[derive(Serialize)]
struct Index<'a> {
    name: &'a str,
    files: Vec<IndexEntry<'a>>,
}

#[derive(Serialize)]
struct IndexEntry<'a> {
    name: &'a str,
    size: u64,
    etag: &'a str,
}

/// HTML for browsers, and JSON for programs.
pub(super) async fn folder(state: State<Arc<Site>>, headers: HeaderMap) -> Response {
    let wants_html = (headers.get_all(header::ACCEPT).iter()).any(|value| {
        value
            .to_str()
            .is_ok_and(|value| value.contains("text/html"))
    });
    let response = if wants_html {
        Html(html(&state)).into_response()
    } else {
        json(state).await
    };
    let headers = [
        (header::VARY, "Accept"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, response).into_response()
}

/// The index for programs.
pub(super) async fn json(State(site): State<Arc<Site>>) -> Response {
    let package = site.package();
    let files = package.files().map(|file| IndexEntry {
        name: file.name(),
        size: file.size(),
        etag: file.etag(),
    });
    let index = Index {
        name: package.name(),
        files: files.collect(),
    };
    ([(header::CACHE_CONTROL, "no-cache")], Json(index)).into_response()
}

fn html(site: &Site) -> String {
    let package = site.package();
    let title = escaped(package.name());
    let links = match site.has_pages() {
        true => "<p><a href=\"chat/\">Chat</a>, <a href=\"tldr/\">a page that sums itself up</a>\n",
        false => "",
    };
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>{title}</title>\n\
         <h1>{title}</h1>\n{links}<table>\n"
    );
    for file in package.files() {
        let (name, size) = (escaped(file.name()), output::Bytes(file.size()));
        // Writing to a string does not fail.
        let _ = writeln!(
            page,
            "<tr><td><a href=\"{name}\">{name}</a><td align=\"right\">{size}"
        );
    }
    page + "</table>\n</html>\n"
}

fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\'' => out += "&#39;",
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_names_is_text() {
        assert_eq!(
            escaped("<a href='x'>&\""),
            "&lt;a href=&#39;x&#39;&gt;&amp;&quot;"
        );
    }
}
