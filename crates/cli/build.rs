//! Collects the pages of `sterna serve`: the examples for browsers, and the npm package by which they run models.
//!
//! Where that isn't built, there is the chat alone, which asks the server; where this crate isn't in its repository,
//! the program has no pages. What gzip makes smaller is compressed: most of it is WebAssembly.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::{env, fmt::Write as _};

use flate2::Compression;
use flate2::write::GzEncoder;

/// The media types of files that are served, by extension; all others are left out.
const CONTENT_TYPES: [(&str, &str); 8] = [
    ("css", "text/css"),
    ("html", "text/html; charset=utf-8"),
    ("ico", "image/x-icon"),
    ("js", "text/javascript"),
    ("png", "image/png"),
    ("svg", "image/svg+xml"),
    ("wasm", "application/wasm"),
    ("webmanifest", "application/manifest+json"),
];

/// Where the pages are in the repository, and the folders that they are served in.
const CHAT: (&str, &str) = ("examples/web-chat", "chat/");
const TLDR: (&str, &str) = ("examples/tldr-widget", "tldr/");

/// The npm package, and files without which it isn't all there.
const PACKAGE: &str = "packages/sterna";
const NPM_PACKAGE: &str = "sterna/";
const NEEDED: [&str; 2] = ["index.js", "wasm/sterna_web_bg.wasm"];

/// Paths as they are served, and files.
type Pages = BTreeMap<String, PathBuf>;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(has_pages, has_npm_package)");
    let root = PathBuf::from(variable("CARGO_MANIFEST_DIR")).join("../..");
    let pages = collect(&root).expect("the folders of pages can be read");
    if !pages.is_empty() {
        println!("cargo::rustc-cfg=has_pages");
    }
    if pages.keys().any(|path| path.starts_with(NPM_PACKAGE)) {
        println!("cargo::rustc-cfg=has_npm_package");
    }
    let out = PathBuf::from(variable("OUT_DIR"));
    let table = table(&pages, &out).expect("pages can be read, and compressed files written");
    fs::write(out.join("pages.rs"), table).expect("the folder for output can be written");
}

fn variable(name: &str) -> String {
    env::var(name).expect("cargo sets it")
}

/// All files of the pages.
fn collect(root: &Path) -> io::Result<Pages> {
    let mut pages = Pages::new();
    let examples = [CHAT, TLDR].map(|(folder, served)| (root.join(folder), served));
    if !examples.iter().all(|(folder, _)| folder.is_dir()) {
        return Ok(pages);
    }
    let package = root.join(PACKAGE);
    let dist = package.join("dist");
    let has_package =
        watch_built(&package, &dist) && NEEDED.iter().all(|file| dist.join(file).is_file());
    if has_package {
        add(&mut pages, &dist, NPM_PACKAGE, true)?;
    }
    for (folder, served) in &examples {
        // The widget does nothing without the package.
        if has_package || *served == CHAT.1 {
            watch(folder);
            // Their folders have tests.
            add(&mut pages, folder, served, false)?;
        }
    }
    Ok(pages)
}

/// Has cargo watch `dist`, where the build of the npm package goes; false if there is no such place.
///
/// For cargo, a watched folder that isn't there has changed at each build. So it is made, as old as the package,
/// since one that is newer than this build has changed, too.
fn watch_built(package: &Path, dist: &Path) -> bool {
    let described = fs::metadata(package.join("package.json"));
    if let Ok(described) = described
        && fs::create_dir(dist).is_ok()
        && let Ok(time) = described.modified()
    {
        // Without this, the next build does the work of this one again.
        let _ = File::open(dist).and_then(|folder| folder.set_modified(time));
    }
    let is_there = dist.is_dir();
    if is_there {
        watch(dist);
    }
    is_there
}

/// Has cargo run this again when something in `folder` changes.
fn watch(folder: &Path) {
    println!("cargo::rerun-if-changed={}", folder.display());
}

/// Adds the files in `folder`, which are served in `served`; with those of its folders if it is `deep`.
fn add(pages: &mut Pages, folder: &Path, served: &str, deep: bool) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        let served = format!("{served}{name}");
        if !path.is_dir() {
            if content_type(&served).is_some() {
                pages.insert(served, path);
            }
        } else if deep {
            add(pages, &path, &format!("{served}/"), true)?;
        }
    }
    Ok(())
}

fn content_type(path: &str) -> Option<&'static str> {
    let (_, extension) = path.rsplit_once('.')?;
    let mut types = CONTENT_TYPES.iter();
    types
        .find(|(known, _)| *known == extension)
        .map(|(_, content_type)| *content_type)
}

/// `file` compressed, if it is smaller by a tenth, or else as it is: its bytes, and whether they are compressed.
fn compressed(file: &Path) -> io::Result<(Vec<u8>, bool)> {
    let bytes = fs::read(file)?;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(&bytes)?;
    let smaller = encoder.finish()?;
    Ok(match smaller.len() < bytes.len() / 10 * 9 {
        true => (smaller, true),
        false => (bytes, false),
    })
}

/// The pages as an expression of Rust, a slice of `PageFile`, whose bytes are in files in `out`.
fn table(pages: &Pages, out: &Path) -> io::Result<String> {
    let mut table = "&[\n".to_owned();
    for (i, (served, file)) in pages.iter().enumerate() {
        let content_type = content_type(served).expect("only such files are added");
        let (bytes, is_gzip) = compressed(file)?;
        let file = out.join(format!("page-{i}"));
        fs::write(&file, bytes)?;
        let file = file
            .to_str()
            .expect("the folder for output is in a path in Unicode");
        // Writing to a string does not fail.
        let _ = writeln!(
            table,
            "    PageFile {{ path: {served:?}, content_type: {content_type:?}, is_gzip: {is_gzip}, bytes: include_bytes!({file:?}) }},"
        );
    }
    Ok(table + "]\n")
}
