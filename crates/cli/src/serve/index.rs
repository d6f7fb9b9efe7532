//! The root: the chat for people, and the index of the package.

use std::fmt::Write;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::response::{Html, IntoResponse, Response};
use serde::Serialize;

use super::files;
use super::package::Package;
use super::pages::CHAT;
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

/// Sends browsers to the chat, and shows them the index where there is none; JSON for programs.
pub(super) async fn root(state: State<Arc<Site>>, uri: Uri, headers: HeaderMap) -> Response {
    let wants_html = (headers.get_all(header::ACCEPT).iter()).any(|value| {
        value
            .to_str()
            .is_ok_and(|value| value.contains("text/html"))
    });
    let mut response = match wants_html {
        true if state.has_pages() => files::to_folder(CHAT, &uri),
        true => html(state).await,
        false => json(state).await,
    };
    let vary = HeaderValue::from_static("Accept");
    response.headers_mut().insert(header::VARY, vary);
    let control = HeaderValue::from_static("no-cache");
    response
        .headers_mut()
        .insert(header::CACHE_CONTROL, control);
    response
}

const NO_PACKAGE: &str = "no files of a model are served here\n";

/// The index for people.
pub(super) async fn html(State(site): State<Arc<Site>>) -> Response {
    match site.package() {
        Some(package) => {
            let headers = [(header::CACHE_CONTROL, "no-cache")];
            (headers, Html(page(&site, package))).into_response()
        }
        None => (StatusCode::NOT_FOUND, NO_PACKAGE).into_response(),
    }
}

/// The index for programs.
pub(super) async fn json(State(site): State<Arc<Site>>) -> Response {
    let Some(package) = site.package() else {
        return (StatusCode::NOT_FOUND, NO_PACKAGE).into_response();
    };
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

fn page(site: &Site, package: &Package) -> String {
    let title = escaped(package.name());
    let links = match (site.has_pages(), site.is_folder("tldr")) {
        (true, true) => {
            "<p><a href=\"chat/\">Chat</a>, <a href=\"tldr/\">a page that sums itself up</a>\n"
        }
        (true, false) => "<p><a href=\"chat/\">Chat</a>\n",
        (false, _) => "<p>This program serves no chat: it was built or started without pages.\n",
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
