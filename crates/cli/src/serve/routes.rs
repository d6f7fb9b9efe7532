//! The routes, and the headers of every response.

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use super::site::Site;
use super::{files, index};

/// The server's paths.
pub(super) fn router(site: Arc<Site>) -> Router {
    Router::new()
        .route("/", get(index::root).options(preflight))
        .route("/index.html", get(index::html).options(preflight))
        .route("/index.json", get(index::json).options(preflight))
        .route("/{*file}", get(files::file).options(preflight))
        .with_state(site)
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use axum::body::{Body, to_bytes};
    use axum::http::{HeaderMap, Method, Request};
    use hyper::service::Service;
    use hyper_util::service::TowerToHyperService;

    use super::*;
    use crate::model::PackagePlace;
    use crate::serve::package::Package;
    use crate::serve::pages::PageFile;
    use flate2::Compression;
    use flate2::read::GzEncoder;
    use std::io::Read;

    const PAGES: [PageFile; 8] = [
        page("chat/index.html", "text/html; charset=utf-8", "chat"),
        page("chat/app.js", "text/javascript", "app"),
        page("chat/sterna.js", "text/javascript", "elsewhere"),
        page("chat/sw.js", "text/javascript", "const VERSION = '0.1.0'"),
        page("tldr/index.html", "text/html; charset=utf-8", "tldr"),
        page("tldr/sterna-tldr.js", "text/javascript", "widget"),
        page("sterna/index.js", "text/javascript", "index"),
        page("sterna/wasm/sterna_web_bg.wasm", "application/wasm", "wasm"),
    ];

    const fn page(path: &'static str, content_type: &'static str, text: &'static str) -> PageFile {
        PageFile {
            path,
            content_type,
            is_gzip: false,
            bytes: text.as_bytes(),
        }
    }

    struct Answer {
        status: StatusCode,
        headers: HeaderMap,
        body: Vec<u8>,
    }

    impl Answer {
        fn header(&self, name: &str) -> Option<&str> {
            self.headers.get(name).map(|value| value.to_str().unwrap())
        }
    }

    /// The answer of a server with a sample and the pages in `table`.
    async fn ask(
        table: &[PageFile],
        method: Method,
        path: &str,
        headers: &[(HeaderName, &str)],
    ) -> Answer {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let sample = root.join("testdata/rdrr-samples/v1-gemma3-q4k");
        let package = Package::open(&PackagePlace::Folder(sample)).unwrap();
        let router = router(Arc::new(Site::new(Some(package), table)));
        let mut request = Request::builder().method(method).uri(path);
        for (name, value) in headers {
            request = request.header(name, *value);
        }
        let request = request.body(Body::empty()).unwrap();
        let response = TowerToHyperService::new(router).call(request).await;
        let (parts, body) = response.unwrap().into_parts();
        Answer {
            status: parts.status,
            headers: parts.headers,
            body: to_bytes(body, usize::MAX).await.unwrap().to_vec(),
        }
    }

    async fn get(path: &str) -> Answer {
        ask(&PAGES, Method::GET, path, &[]).await
    }

    #[tokio::test]
    async fn compressed_pages_come_in_the_form_that_is_asked_for() {
        let text = "some text, some text, some text".repeat(9);
        let mut gzip = Vec::new();
        let mut encoder = GzEncoder::new(text.as_bytes(), Compression::best());
        encoder.read_to_end(&mut gzip).unwrap();
        let table = [PageFile {
            path: "chat/app.js",
            content_type: "text/javascript",
            is_gzip: true,
            bytes: gzip.clone().leak(),
        }];
        let ask = async |headers: &[_]| ask(&table, Method::GET, "/chat/app.js", headers).await;
        let mut tags = Vec::new();
        for (accepted, is_gzip) in [
            ("gzip", true),
            ("br;q=1.0, GZIP;q=0.5", true),
            ("*", true),
            ("", false),
            ("br, deflate", false),
            ("*;q=0", false),
            ("gzip;q=0, *", false),
        ] {
            let answer = ask(&[(header::ACCEPT_ENCODING, accepted)]).await;
            assert_eq!(answer.status, StatusCode::OK, "{accepted}");
            let coding = answer.header("content-encoding");
            assert_eq!(coding, is_gzip.then_some("gzip"), "{accepted}");
            let want = if is_gzip { &*gzip } else { text.as_bytes() };
            assert!(answer.body == want, "{accepted}");
            assert_eq!(answer.header("vary"), Some("accept-encoding"));
            assert_eq!(answer.header("content-type"), Some("text/javascript"));
            tags.push((is_gzip, answer.header("etag").unwrap().to_owned()));
        }
        tags.sort();
        tags.dedup();
        let [(false, plain), (true, packed)] = &tags[..] else {
            panic!("{tags:?}");
        };
        assert_ne!(plain, packed);

        let unchanged = ask(&[(header::IF_NONE_MATCH, &**plain)]).await;
        assert_eq!(unchanged.status, StatusCode::NOT_MODIFIED);
        assert_eq!(unchanged.header("etag"), Some(&**plain));
        let other = ask(&[(header::IF_NONE_MATCH, &**packed)]).await;
        assert_eq!(other.status, StatusCode::OK);
        let gzip_too = (header::ACCEPT_ENCODING, "gzip");
        let unchanged = ask(&[(header::IF_NONE_MATCH, packed), gzip_too]).await;
        assert_eq!(unchanged.status, StatusCode::NOT_MODIFIED);

        let part = ask(&[(header::RANGE, "bytes=5-8")]).await;
        assert_eq!(part.status, StatusCode::PARTIAL_CONTENT);
        assert_eq!(part.body, b"text");
        let size = text.len();
        assert_eq!(
            part.header("content-range"),
            Some(&*format!("bytes 5-8/{size}"))
        );
        // A part of the form that is asked for.
        let part = ask(&[
            (header::RANGE, "bytes=0-1"),
            (header::ACCEPT_ENCODING, "gzip"),
        ])
        .await;
        assert_eq!(part.body, gzip[..2]);
        assert_eq!(part.header("content-encoding"), Some("gzip"));
    }

    #[tokio::test]
    async fn pages_have_their_types_and_what_isolation_needs() {
        for (path, content_type, body) in [
            ("/chat/", "text/html; charset=utf-8", "chat"),
            ("/chat/index.html", "text/html; charset=utf-8", "chat"),
            ("/chat/app.js", "text/javascript", "app"),
            ("/chat/sterna/index.js", "text/javascript", "index"),
            ("/tldr/sterna/index.js", "text/javascript", "index"),
            (
                "/chat/sterna/wasm/sterna_web_bg.wasm",
                "application/wasm",
                "wasm",
            ),
            (
                "/tldr/sterna/wasm/sterna_web_bg.wasm",
                "application/wasm",
                "wasm",
            ),
            (
                "/chat/sterna.js",
                "text/javascript",
                "export { Sterna } from './sterna/index.js'\n",
            ),
            ("/tldr/", "text/html; charset=utf-8", "tldr"),
            ("/tldr/sterna-tldr.js", "text/javascript", "widget"),
            (
                "/tldr/sterna.js",
                "text/javascript",
                "export { Sterna } from './sterna/index.js'\n",
            ),
        ] {
            let answer = get(path).await;
            assert_eq!(answer.status, StatusCode::OK, "{path}");
            assert_eq!(answer.body, body.as_bytes(), "{path}");
            for (name, value) in [
                ("content-type", content_type),
                ("cache-control", "no-cache"),
                ("access-control-allow-origin", "*"),
                ("cross-origin-opener-policy", "same-origin"),
                ("cross-origin-embedder-policy", "require-corp"),
                ("cross-origin-resource-policy", "cross-origin"),
                ("x-content-type-options", "nosniff"),
            ] {
                assert_eq!(answer.header(name), Some(value), "{path}: {name}");
            }
            let policy = path
                .ends_with(['/', 'l'])
                .then_some("frame-ancestors 'none'");
            let found = answer.header("content-security-policy");
            assert_eq!(found, policy, "{path}");
            let etag = answer.header("etag").unwrap();
            let again = ask(&PAGES, Method::GET, path, &[(header::IF_NONE_MATCH, etag)]).await;
            assert_eq!(again.status, StatusCode::NOT_MODIFIED, "{path}");
        }
        let keeper = String::from_utf8(get("/chat/sw.js").await.body).unwrap();
        assert!(
            keeper.starts_with("const VERSION = '") && !keeper.contains("0.1.0"),
            "{keeper}"
        );
    }

    #[tokio::test]
    async fn folders_without_a_slash_lead_to_those_with_one() {
        for (path, location) in [
            ("/chat", "/chat/"),
            ("/tldr", "/tldr/"),
            (
                "/chat?model=https://example.org/a%20b/",
                "/chat/?model=https://example.org/a%20b/",
            ),
        ] {
            let answer = get(path).await;
            assert_eq!(answer.status, StatusCode::TEMPORARY_REDIRECT, "{path}");
            assert_eq!(answer.header("location"), Some(location), "{path}");
        }
        for path in [
            "/chat/sterna",
            "/chat/sterna/",
            "/chat//",
            "/chat/../chat/app.js",
            "/sterna/index.js",
            "/sterna.js",
            "/tldr/app.js",
            "/models",
            "/models/",
        ] {
            assert_eq!(get(path).await.status, StatusCode::NOT_FOUND, "{path}");
        }
        let answer = ask(&PAGES, Method::POST, "/chat/", &[]).await;
        assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED);
    }

    #[tokio::test]
    async fn pages_are_told_where_the_package_is() {
        let answer = get("/models.json").await;
        assert_eq!(answer.header("content-type"), Some("application/json"));
        assert_eq!(answer.header("cache-control"), Some("no-cache"));
        let offers: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        let [offer] = &offers.as_array().unwrap()[..] else {
            panic!("{offers}");
        };
        let index = get("/index.json").await;
        let index: serde_json::Value = serde_json::from_slice(&index.body).unwrap();
        assert_eq!(offer["name"], index["name"]);
        let files = index["files"].as_array().unwrap().iter();
        let size: u64 = files.map(|file| file["size"].as_u64().unwrap()).sum();
        assert_eq!(offer["size"], size);
        // Relative to the list, and with the bytes that are at the root.
        let address = offer["address"].as_str().unwrap();
        assert!(
            address.starts_with("models/") && address.ends_with('/'),
            "{address}"
        );
        for name in ["manifest.json", "shard_00001.bin"] {
            let here = get(&format!("/{address}{name}")).await;
            assert_eq!(here.status, StatusCode::OK, "{name}");
            assert_eq!(here.body, get(&format!("/{name}")).await.body, "{name}");
        }
        let shard = format!("/{address}shard_00001.bin");
        let range = [(header::RANGE, "bytes=1-3")];
        let part = ask(&PAGES, Method::GET, &shard, &range).await;
        assert_eq!(
            (part.status, part.body.len()),
            (StatusCode::PARTIAL_CONTENT, 3)
        );
        assert_eq!(
            get(&format!("/{address}none")).await.status,
            StatusCode::NOT_FOUND
        );
        let page = String::from_utf8(get("/index.html").await.body).unwrap();
        assert!(page.contains("href=\"chat/\"") && page.contains("href=\"tldr/\""));
    }

    #[tokio::test]
    async fn browsers_are_sent_from_the_root_to_the_chat_and_programs_get_the_index() {
        let html = [(header::ACCEPT, "text/html,*/*;q=0.8")];
        for (path, location) in [("/", "/chat/"), ("/?model=x", "/chat/?model=x")] {
            let answer = ask(&PAGES, Method::GET, path, &html).await;
            assert_eq!(answer.status, StatusCode::TEMPORARY_REDIRECT, "{path}");
            assert_eq!(answer.header("location"), Some(location), "{path}");
            assert_eq!(answer.header("vary"), Some("Accept"), "{path}");
            assert_eq!(answer.header("cache-control"), Some("no-cache"), "{path}");
        }
        let index = get("/").await;
        assert_eq!(index.header("content-type"), Some("application/json"));
        assert_eq!(index.body, get("/index.json").await.body);
    }

    #[tokio::test]
    async fn the_chat_is_served_without_a_package() {
        let router = router(Arc::new(Site::new(None, &PAGES)));
        for (path, status) in [
            ("/chat/", StatusCode::OK),
            ("/chat/app.js", StatusCode::OK),
            ("/index.json", StatusCode::NOT_FOUND),
            ("/index.html", StatusCode::NOT_FOUND),
            ("/models.json", StatusCode::NOT_FOUND),
            ("/manifest.json", StatusCode::NOT_FOUND),
        ] {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            let service = TowerToHyperService::new(router.clone());
            assert_eq!(
                service.call(request).await.unwrap().status(),
                status,
                "{path}"
            );
        }
    }

    #[tokio::test]
    async fn without_pages_there_is_the_package_and_nothing_else() {
        for path in ["/chat", "/chat/", "/tldr/", "/models.json"] {
            let answer = ask(&[], Method::GET, path, &[]).await;
            assert_eq!(answer.status, StatusCode::NOT_FOUND, "{path}");
        }
        let answer = ask(&[], Method::GET, "/manifest.json", &[]).await;
        assert_eq!(answer.status, StatusCode::OK);
        let html = [(header::ACCEPT, "text/html")];
        let page = ask(&[], Method::GET, "/", &html).await;
        assert_eq!(page.status, StatusCode::OK);
        let page = String::from_utf8(page.body).unwrap();
        assert!(
            page.contains("without pages") && !page.contains("chat/"),
            "{page}"
        );
    }
}
