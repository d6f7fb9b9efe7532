//! Pages for browsers: the chat, which asks the server, and what runs the served model in the browser, which is there
//! if the npm package was built before the program. `build.rs` collects them.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde::Serialize;
use sterna_delivery::hash::{Algorithm, digest_of};
use sterna_delivery::store::portable_name;

use super::package::{Package, ServedFile};

/// A file of the pages: `chat/…`, `tldr/…`, or `sterna/…`, which is the npm package.
#[derive(Debug)]
pub(super) struct PageFile {
    pub(super) path: &'static str,
    pub(super) content_type: &'static str,
    /// Whether its bytes are compressed with gzip.
    pub(super) is_gzip: bool,
    pub(super) bytes: &'static [u8],
}

/// The pages in this program.
pub(super) static PAGES: &[PageFile] = include!(concat!(env!("OUT_DIR"), "/pages.rs"));

/// The folder of the chat, which is also the page of the server.
pub(super) const CHAT: &str = "chat";

/// The folders of the pages that have the npm package.
const FOLDERS: [&str; 2] = [CHAT, "tldr"];

/// The folder of the npm package. It is in each of [`FOLDERS`], for a service worker brings only the Workers whose
/// scripts are in its own.
const NPM_PACKAGE: &str = "sterna/";

/// The script of each page that says where the npm package is, if it is anywhere.
const ENTRY: &str = "sterna.js";
const ENTRY_SCRIPT: &str = "export { Sterna } from './sterna/index.js'\n";
const ENTRY_SCRIPT_WITHOUT: &str = "export const Sterna = undefined\n";

/// The script that keeps the chat's files for use without a network, until its version is another.
const KEEPER: &str = "chat/sw.js";
const VERSION: &str = "const VERSION = '";
const VERSION_LEN: usize = 16;

/// The models that pages offer, and the folder where they find the package besides.
const MODELS: &str = "models.json";
const MODELS_FOLDER: &str = "models/";

/// The pages that are served, if there are any.
#[derive(Debug)]
pub(super) struct Pages {
    files: BTreeMap<String, ServedFile>,
    /// The folder where pages find the package, if they can use it. It has the package's name, since browsers keep
    /// models by their addresses, and at the root there may be another package tomorrow.
    model: Option<String>,
}

/// What [`MODELS`] says of a model; the address is relative to it.
#[derive(Serialize)]
struct Offer<'a> {
    name: &'a str,
    address: &'a str,
    size: u64,
}

impl Pages {
    /// The pages in `table`, which offer `package` if they can run it.
    pub(super) fn new(table: &[PageFile], package: Option<&Package>) -> Pages {
        let mut pages = Pages {
            files: BTreeMap::new(),
            model: None,
        };
        if table.is_empty() {
            return pages;
        }
        let has_npm_package = table.iter().any(|page| page.path.starts_with(NPM_PACKAGE));
        for page in table {
            let bytes = Bytes::from_static(page.bytes);
            let file = match page.is_gzip {
                true => ServedFile::compressed(page.path, page.content_type, bytes),
                false => ServedFile::new(page.path, page.content_type, bytes),
            };
            if page.path.starts_with(NPM_PACKAGE) {
                for folder in FOLDERS {
                    pages.add(format!("{folder}/{}", page.path), file.clone());
                }
            } else {
                pages.add(page.path.to_owned(), file);
            }
        }
        let (script, folders) = match has_npm_package {
            true => (ENTRY_SCRIPT, &FOLDERS[..]),
            false => (ENTRY_SCRIPT_WITHOUT, &[CHAT][..]),
        };
        let entry = Bytes::from_static(script.as_bytes());
        let entry = ServedFile::new(ENTRY, "text/javascript", entry);
        for folder in folders {
            pages.add(format!("{folder}/{ENTRY}"), entry.clone());
        }
        pages.mark_version();
        if let Some(package) = package.filter(|_| has_npm_package) {
            pages.offer(package);
        }
        pages
    }

    /// Says where `package` is.
    fn offer(&mut self, package: &Package) {
        let folder = format!("{MODELS_FOLDER}{}/", portable_name(package.name()));
        let offer = Offer {
            name: package.name(),
            address: &folder,
            size: package.size(),
        };
        let offers = serde_json::to_vec(&[offer]).expect("text and a number are JSON");
        let offers = ServedFile::new(MODELS, "application/json", offers.into());
        self.add(MODELS.to_owned(), offers);
        self.model = Some(folder);
    }

    fn add(&mut self, path: String, file: ServedFile) {
        self.files.insert(path, file);
    }

    /// Makes the version of [`KEEPER`] another when any file is.
    fn mark_version(&mut self) {
        let files = self.files.iter();
        let files: String = files
            .map(|(path, file)| format!("{path} {}\n", file.etag()))
            .collect();
        let digest = digest_of(Algorithm::Sha256, files.as_bytes()).to_string();
        if let Some(keeper) = self.files.get_mut(KEEPER)
            && let Some(marked) = with_version(&keeper.bytes(), &digest[..VERSION_LEN])
        {
            *keeper = ServedFile::new(KEEPER, keeper.content_type(), marked);
        }
    }

    /// Whether there are none.
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The file at `path`; that of a folder is its page.
    pub(super) fn file(&self, path: &str) -> Option<&ServedFile> {
        match path.ends_with('/') {
            true => self.files.get(&format!("{path}index.html")),
            false => self.files.get(path),
        }
    }

    /// Whether `path` is a folder with a page, without the slash at its end.
    pub(super) fn is_folder(&self, path: &str) -> bool {
        self.files.contains_key(&format!("{path}/index.html"))
    }

    /// The path within the package, if `path` is in the folder where pages find it.
    pub(super) fn in_model<'a>(&self, path: &'a str) -> Option<&'a str> {
        path.strip_prefix(self.model.as_deref()?)
    }
}

/// `script` with another version, if it has one.
fn with_version(script: &[u8], version: &str) -> Option<Bytes> {
    let (before, rest) = str::from_utf8(script).ok()?.split_once(VERSION)?;
    let (_, after) = rest.split_once('\'')?;
    Some(format!("{before}{VERSION}{version}'{after}").into())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::model::PackagePlace;

    fn package() -> Package {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let sample = root.join("testdata/rdrr-samples/v1-gemma3-q4k");
        Package::open(&PackagePlace::Folder(sample)).unwrap()
    }

    fn script(path: &'static str, text: &'static str) -> PageFile {
        PageFile {
            path,
            content_type: "text/javascript",
            is_gzip: false,
            bytes: text.as_bytes(),
        }
    }

    fn text(pages: &Pages, path: &str) -> String {
        let file = pages.file(path).unwrap_or_else(|| panic!("no {path}"));
        String::from_utf8(file.bytes().to_vec()).unwrap()
    }

    #[test]
    fn the_version_is_another_when_a_file_is() {
        let versions = ["1", "2", "1"].map(|engine| {
            let table = [
                script("chat/sw.js", "// a\nconst VERSION = '0.1.0'\nrest('b')\n"),
                script("sterna/index.js", engine),
            ];
            let pages = Pages::new(&table, Some(&package()));
            let keeper = text(&pages, "chat/sw.js");
            let version = keeper
                .strip_prefix("// a\nconst VERSION = '")
                .and_then(|rest| rest.strip_suffix("'\nrest('b')\n"));
            let version = version.unwrap_or_else(|| panic!("{keeper}")).to_owned();
            assert!(version.len() == VERSION_LEN && version != "0.1.0");
            version
        });
        assert_eq!(versions[0], versions[2]);
        assert_ne!(versions[0], versions[1]);
    }

    #[test]
    fn the_examples_are_as_expected_here() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples");
        let keeper = fs::read(examples.join("web-chat/sw.js")).unwrap();
        let marked = with_version(&keeper, "mark").unwrap();
        assert!(marked.windows(6).any(|w| w == b"'mark'"));
        for example in ["web-chat", "tldr-widget"] {
            let entry = fs::read_to_string(examples.join(example).join(ENTRY)).unwrap();
            let code = entry.lines().filter(|line| !line.starts_with("//"));
            let code: Vec<_> = code.collect();
            assert_eq!(
                code,
                ["export { Sterna } from '../../packages/sterna/dist/index.js'"]
            );
        }
    }

    #[test]
    fn each_page_has_the_npm_package_and_an_entry_of_its_own() {
        let table = [
            script("chat/sterna.js", "elsewhere"),
            script("sterna/sterna.js", "inner"),
            script("sterna/worker/main.js", "worker"),
        ];
        let pages = Pages::new(&table, Some(&package()));
        for folder in FOLDERS {
            assert_eq!(text(&pages, &format!("{folder}/sterna.js")), ENTRY_SCRIPT);
            let inner = text(&pages, &format!("{folder}/sterna/sterna.js"));
            assert_eq!(inner, "inner");
            let worker = text(&pages, &format!("{folder}/sterna/worker/main.js"));
            assert_eq!(worker, "worker");
        }
        assert!(pages.file("sterna/worker/main.js").is_none());
    }

    #[test]
    fn without_the_npm_package_there_is_the_chat_and_no_model_for_it() {
        let table = [
            script("chat/index.html", "chat"),
            script("chat/sterna.js", "elsewhere"),
        ];
        let pages = Pages::new(&table, Some(&package()));
        assert!(!pages.is_empty() && pages.is_folder(CHAT));
        assert_eq!(text(&pages, "chat/sterna.js"), ENTRY_SCRIPT_WITHOUT);
        assert!(pages.file("tldr/sterna.js").is_none() && pages.file(MODELS).is_none());
        let of_model = format!("{MODELS_FOLDER}{}/x", portable_name(package().name()));
        assert!(pages.in_model(&of_model).is_none());
    }

    #[test]
    fn without_a_package_none_is_offered() {
        let table = [script("sterna/index.js", "index")];
        let pages = Pages::new(&table, None);
        assert_eq!(text(&pages, "chat/sterna.js"), ENTRY_SCRIPT);
        assert!(pages.file(MODELS).is_none() && pages.in_model("models/x").is_none());
    }

    #[test]
    fn without_files_there_is_nothing() {
        let pages = Pages::new(&[], Some(&package()));
        assert!(pages.is_empty());
        assert!(pages.file(MODELS).is_none() && pages.file("chat/").is_none());
        assert!(!pages.is_folder("chat"));
        assert!(pages.in_model("models/").is_none());
    }
}
