//! Model repositories laid out as on Hugging Face.

use serde::Deserialize;

#[cfg(all(feature = "http", not(target_family = "wasm")))]
use super::{HttpOptions, HttpSource};
use super::{
    Url, UrlError,
    url::{encoded, percent_decoded},
};
#[cfg(all(feature = "http", not(target_family = "wasm")))]
use crate::fetch::{Cancel, FetchError, Limits, fetch_from, read_small};
use crate::{
    fetch::{Blob, PlanError},
    hash::{Algorithm, DigestError, Expected},
};

/// A server of repositories, and its options.
#[derive(Debug, Clone)]
pub struct Hub {
    endpoint: Url,
    #[cfg(all(feature = "http", not(target_family = "wasm")))]
    options: HttpOptions,
}

/// A revision of a repository, and perhaps a file in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Repository {
    id: String,
    revision: String,
    file: Option<String>,
}

/// The contents of a repository at one commit.
#[derive(Debug, Clone)]
pub struct Listing {
    /// The commit, as 40 hexadecimal digits: it always refers to the same files.
    pub commit: String,
    /// The files, in the server's order.
    pub files: Vec<RepositoryFile>,
}

/// A file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RepositoryFile {
    /// Its path.
    pub name: String,
    /// Its size, if the server reports it.
    pub size: Option<u64>,
    /// How its bytes are verified.
    pub expected: Expected,
}

/// Why files of a repository are not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RepositoryError {
    /// The listing could not be fetched.
    #[cfg(all(feature = "http", not(target_family = "wasm")))]
    #[error("cannot list the repository `{id}`")]
    Fetch {
        /// The repository.
        id: String,
        /// Why not.
        source: FetchError,
    },
    /// An invalid listing.
    #[error("the listing of the repository `{id}` is not JSON as expected")]
    Json {
        /// The repository.
        id: String,
        /// Where, and what was expected.
        source: serde_json::Error,
    },
    /// An invalid digest in the listing.
    #[error("the listing of a repository gives `{file}` a bad digest")]
    Digest {
        /// The file.
        file: String,
        /// What is wrong with it.
        source: DigestError,
    },
    /// An invalid commit id.
    #[error("the listing of the repository `{id}` names the commit {found:?}")]
    Commit {
        /// The repository.
        id: String,
        /// The id in the listing.
        found: String,
    },
    /// An invalid address.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// No file of that name.
    #[error("the repository has no file {wanted:?}; it has {}", choices.join(", "))]
    NoSuchFile {
        /// The requested name.
        wanted: String,
        /// Similar names.
        choices: Vec<String>,
    },
    /// Several models, and no choice.
    #[error("the repository has several models; name one of {}", choices.join(", "))]
    Ambiguous {
        /// Their names.
        choices: Vec<String>,
    },
    /// No model.
    #[error("the repository has neither GGUF nor safetensors files")]
    NoModel,
    /// A file without a size.
    #[error("the listing gives `{file}` no size")]
    NoSize {
        /// The file.
        file: String,
    },
    /// A file that can't be verified, over a connection that isn't secure.
    #[error(
        "`{file}`: the listing gives no digest, and without https nothing vouches for its bytes"
    )]
    Unverifiable {
        /// The file.
        file: String,
    },
    /// The files can't be fetched together.
    #[error(transparent)]
    Plan(#[from] PlanError),
}

/// Maximum bytes of a listing.
pub const MAX_LISTING: usize = 32 << 20;

/// The host names of the public server.
const PUBLIC_HOSTS: [&str; 3] = ["huggingface.co", "www.huggingface.co", "hf.co"];

impl Hub {
    /// The public server.
    pub fn public() -> Self {
        let endpoint = Url::parse("https://huggingface.co").expect("it is an address");
        Self {
            endpoint,
            #[cfg(all(feature = "http", not(target_family = "wasm")))]
            options: HttpOptions::default(),
        }
    }

    /// The repository that `url` refers to, or a file or folder in it: `None` for an address of another
    /// server or layout.
    ///
    /// Supported are `/OWNER/REPO`, `…/tree/REVISION`, and `…/resolve/REVISION/FILE` (or `blob`); the default
    /// revision is `main`.
    pub fn repository(&self, url: &Url) -> Option<Repository> {
        let public = url.is_secure() && PUBLIC_HOSTS.contains(&url.authority());
        if !public && !url.same_origin(&self.endpoint) {
            return None;
        }
        let base = if public {
            ""
        } else {
            self.endpoint.path().trim_end_matches('/')
        };
        let path = url.path().strip_prefix(base)?.strip_prefix('/')?;
        let parts: Vec<&str> = path.trim_end_matches('/').split('/').collect();
        let part = |text: &str| percent_decoded(text).filter(|text| is_name_part(text));
        let (owner, name) = (part(parts.first()?)?, part(parts.get(1)?)?);
        if matches!(owner.as_str(), "api" | "datasets" | "spaces" | "models") {
            return None;
        }
        let (revision, file) = match parts.get(2) {
            None => ("main".to_owned(), None),
            Some(&("resolve" | "tree" | "blob" | "raw")) => {
                let revision = percent_decoded(parts.get(3)?).filter(|r| !r.is_empty())?;
                let file = percent_decoded(&parts[4..].join("/"))?;
                (revision, Some(file).filter(|file| !file.is_empty()))
            }
            Some(_) => return None,
        };
        Some(Repository {
            id: format!("{owner}/{name}"),
            revision,
            file,
        })
    }

    /// Where the listing of a repository is.
    ///
    /// Errors: [`UrlError`].
    pub fn listing_address(&self, repository: &Repository) -> Result<Url, UrlError> {
        let revision = encoded(&repository.revision).replace('/', "%2F");
        let id = encoded(&repository.id);
        self.at(&format!("api/models/{id}/revision/{revision}?blobs=true"))
    }

    /// Where a repository's files are, as they were at `commit`.
    ///
    /// Errors: [`UrlError`].
    pub fn files_address(&self, repository: &Repository, commit: &str) -> Result<Url, UrlError> {
        let (id, commit) = (encoded(&repository.id), encoded(commit));
        self.at(&format!("{id}/resolve/{commit}"))
    }

    /// What to fetch of a listing: `wanted` (a file name, or a part of a GGUF file name, such as `Q4_K_M`),
    /// or else the file that `repository` names, or else the only model: a GGUF file with all its parts, or
    /// the safetensors and everything that belongs to them.
    ///
    /// Errors: [`RepositoryError`], also for files that can't be verified unless they come over https.
    pub fn select(
        &self,
        repository: &Repository,
        listing: &Listing,
        wanted: Option<&str>,
    ) -> Result<Vec<Blob>, RepositoryError> {
        let files = match wanted.or(repository.file.as_deref()) {
            Some(wanted) => named(&listing.files, wanted)?,
            None => the_model(&listing.files)?,
        };
        let blob = |file: &RepositoryFile| {
            let name = || file.name.clone();
            if file.expected == Expected::SizeOnly && !self.endpoint.is_secure() {
                return Err(RepositoryError::Unverifiable { file: name() });
            }
            let size = file
                .size
                .ok_or_else(|| RepositoryError::NoSize { file: name() })?;
            Ok(Blob::new(&file.name, size, file.expected)?)
        };
        files.into_iter().map(blob).collect()
    }

    fn at(&self, path: &str) -> Result<Url, UrlError> {
        let endpoint = self.endpoint.to_string();
        Url::parse(&format!("{}/{path}", endpoint.trim_end_matches('/')))
    }
}

#[cfg(all(feature = "http", not(target_family = "wasm")))]
impl Hub {
    /// The server at `endpoint`. A token in `options` is sent to it and nowhere else.
    pub fn new(endpoint: Url, options: HttpOptions) -> Self {
        Self { endpoint, options }
    }

    /// The server of the environment (`HF_ENDPOINT`), or else the public one, with the token of the
    /// environment (`HF_TOKEN`).
    ///
    /// Errors: [`UrlError`] if the environment's address is invalid.
    pub fn from_env() -> Result<Self, UrlError> {
        let set = |name| {
            std::env::var(name)
                .ok()
                .filter(|value| !value.trim().is_empty())
        };
        let endpoint = set("HF_ENDPOINT");
        let endpoint = Url::parse(endpoint.as_deref().unwrap_or("https://huggingface.co"))?;
        let token = set("HF_TOKEN").map(|token| token.trim().to_owned());
        let options = HttpOptions {
            token,
            ..HttpOptions::default()
        };
        Ok(Self::new(endpoint, options))
    }

    /// Fetches the listing of a repository.
    ///
    /// Errors: [`RepositoryError`].
    pub fn list(
        &self,
        repository: &Repository,
        limits: &Limits,
        cancel: &Cancel,
    ) -> Result<Listing, RepositoryError> {
        let source = HttpSource::new(self.endpoint.clone(), self.options.clone());
        let url = self.listing_address(repository)?;
        let (json, _) = fetch_from(&[&source], &repository.id, limits, cancel, |source| {
            let answer = source.get(url.clone(), None)?;
            read_small(answer, "listing.json", MAX_LISTING, limits)
        })
        .map_err(|source| RepositoryError::Fetch {
            id: repository.id.clone(),
            source,
        })?;
        Listing::parse(repository, &json)
    }

    /// The source of a repository's files as they are at `commit`.
    ///
    /// Errors: [`UrlError`].
    pub fn source(&self, repository: &Repository, commit: &str) -> Result<HttpSource, UrlError> {
        let base = self.files_address(repository, commit)?;
        Ok(HttpSource::new(base, self.options.clone()))
    }
}

impl Listing {
    /// Reads the listing of `repository` as the server has it.
    ///
    /// Errors: [`RepositoryError`].
    pub fn parse(repository: &Repository, json: &[u8]) -> Result<Self, RepositoryError> {
        let id = || repository.id.clone();
        let model: Model = serde_json::from_slice(json)
            .map_err(|source| RepositoryError::Json { id: id(), source })?;
        let is_commit = model.sha.len() == 40 && model.sha.bytes().all(|b| b.is_ascii_hexdigit());
        if !is_commit {
            return Err(RepositoryError::Commit {
                id: id(),
                found: model.sha.chars().take(100).collect(),
            });
        }
        let files = model.siblings.into_iter().map(Sibling::file);
        Ok(Self {
            commit: model.sha,
            files: files.collect::<Result<_, _>>()?,
        })
    }
}

impl Repository {
    /// Owner and name, with a slash between.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// The requested branch, tag or commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// The requested file.
    pub fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

#[derive(Deserialize)]
struct Model {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob_id: Option<String>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: String,
    size: Option<u64>,
}

impl Sibling {
    fn file(self) -> Result<RepositoryFile, RepositoryError> {
        // A large file's git object is a pointer to it, so its object id doesn't verify its bytes.
        let (expected, size) = match (self.lfs, self.blob_id) {
            (Some(lfs), _) => {
                let expected = Expected::digest(Algorithm::Sha256, &lfs.sha256);
                (expected, lfs.size.or(self.size))
            }
            (None, Some(id)) => (Expected::git_blob(&id), self.size),
            (None, None) => (Ok(Expected::SizeOnly), self.size),
        };
        let name = self.rfilename;
        let expected = expected.map_err(|source| RepositoryError::Digest {
            file: name.clone(),
            source,
        })?;
        Ok(RepositoryFile {
            name,
            size,
            expected,
        })
    }
}

/// The file called `wanted`, or the only GGUF file whose name contains it; with the other parts of its set.
fn named<'a>(
    files: &'a [RepositoryFile],
    wanted: &str,
) -> Result<Vec<&'a RepositoryFile>, RepositoryError> {
    let found = match files.iter().find(|file| file.name == wanted) {
        Some(file) => file,
        None => {
            let wanted_lower = wanted.to_lowercase();
            let sets = gguf_sets(files, |name| name.to_lowercase().contains(&wanted_lower));
            match sets[..] {
                [file] => file,
                [] => {
                    let ggufs = gguf_sets(files, |_| true);
                    return Err(RepositoryError::NoSuchFile {
                        wanted: wanted.to_owned(),
                        choices: names(if ggufs.is_empty() {
                            files.iter().collect()
                        } else {
                            ggufs
                        }),
                    });
                }
                _ => {
                    let choices = names(sets);
                    return Err(RepositoryError::Ambiguous { choices });
                }
            }
        }
    };
    Ok(whole_set(files, found))
}

/// The only GGUF model of a repository, or its safetensors with what belongs to them.
fn the_model(files: &[RepositoryFile]) -> Result<Vec<&RepositoryFile>, RepositoryError> {
    // A projector belongs to a model and is not one itself.
    let sets = gguf_sets(files, |name| !name.to_lowercase().contains("mmproj"));
    match sets[..] {
        [file] => return Ok(whole_set(files, file)),
        [] => {}
        _ => {
            let choices = names(sets);
            return Err(RepositoryError::Ambiguous { choices });
        }
    }
    let tensors = |file: &&RepositoryFile| file.name.ends_with(".safetensors");
    let top: Vec<_> = files
        .iter()
        .filter(|file| !file.name.contains('/'))
        .collect();
    // Some repositories hold the same weights a second time, in one file.
    let is_copy = |name: &str| name.starts_with("consolidated");
    let only_copies = top
        .iter()
        .copied()
        .filter(tensors)
        .all(|file| is_copy(&file.name));
    let wanted = |name: &str| {
        let kept = [".safetensors", ".json", ".model", ".jinja", ".tiktoken"];
        kept.iter().any(|end| name.ends_with(end)) || matches!(name, "merges.txt" | "vocab.txt")
    };
    if !top.iter().any(tensors) {
        return Err(RepositoryError::NoModel);
    }
    Ok((top.into_iter())
        .filter(|file| wanted(&file.name) && (only_copies || !is_copy(&file.name)))
        .collect())
}

/// The first file of each set of GGUF files whose name is accepted.
fn gguf_sets(files: &[RepositoryFile], accept: impl Fn(&str) -> bool) -> Vec<&RepositoryFile> {
    (files.iter())
        .filter(|file| file.name.ends_with(".gguf") && accept(&file.name))
        .filter(|file| split_of(&file.name).is_none_or(|(_, number, _)| number == 1))
        .collect()
}

/// A file, or all parts of its set.
fn whole_set<'a>(files: &'a [RepositoryFile], file: &'a RepositoryFile) -> Vec<&'a RepositoryFile> {
    let Some((stem, _, count)) = split_of(&file.name) else {
        return vec![file];
    };
    (files.iter())
        .filter(|other| split_of(&other.name).is_some_and(|(s, _, c)| (s, c) == (stem, count)))
        .collect()
}

/// `model-00002-of-00003.gguf`: the stem, 2 and 3.
fn split_of(name: &str) -> Option<(&str, u32, u32)> {
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    Some((stem, number.parse().ok()?, count.parse().ok()?))
}

fn names(files: Vec<&RepositoryFile>) -> Vec<String> {
    files
        .into_iter()
        .take(50)
        .map(|file| file.name.clone())
        .collect()
}

/// Whether `text` is valid in a repository's name.
fn is_name_part(text: &str) -> bool {
    let ok = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && text.len() <= 200 && text.chars().all(ok) && text != "." && text != ".."
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hub(endpoint: &str) -> Hub {
        Hub::new(Url::parse(endpoint).unwrap(), HttpOptions::default())
    }

    fn listing(names: &[&str]) -> Listing {
        let file = |name: &&str| RepositoryFile {
            name: (*name).into(),
            size: Some(1),
            expected: Expected::GitBlob([0; 20]),
        };
        Listing {
            commit: "0".repeat(40),
            files: names.iter().map(file).collect(),
        }
    }

    #[test]
    fn addresses_of_repositories_are_told_from_others() {
        let hub = hub("http://mirror:8000/hf/");
        let read = |url: &str| {
            let found = hub.repository(&Url::parse(url).unwrap())?;
            let file = found.file.clone().unwrap_or_default();
            Some((found.id, found.revision, file))
        };
        let expect = |id: &str, revision: &str, file: &str| {
            Some((id.to_owned(), revision.to_owned(), file.to_owned()))
        };
        assert_eq!(
            read("https://huggingface.co/o/r"),
            expect("o/r", "main", "")
        );
        assert_eq!(
            read("https://hf.co/o/r.2/tree/v1"),
            expect("o/r.2", "v1", "")
        );
        assert_eq!(
            read("https://huggingface.co/o/r/resolve/refs%2Fpr%2F1/d/m%20x.gguf?download=true"),
            expect("o/r", "refs/pr/1", "d/m x.gguf")
        );
        assert_eq!(
            read("http://mirror:8000/hf/o/r/blob/main/m.gguf"),
            expect("o/r", "main", "m.gguf")
        );
        for other in [
            "https://example.org/o/r",
            "http://huggingface.co/o/r",
            "https://huggingface.co/datasets/o",
            "https://huggingface.co/o",
            "https://huggingface.co/o/r/commits/main",
            "https://huggingface.co/o/%2e%2e",
            "http://mirror:8000/o/r",
        ] {
            assert_eq!(read(other), None, "{other}");
        }
    }

    #[test]
    fn the_one_model_is_chosen_or_the_choices_are_named() {
        let hub = hub("https://huggingface.co");
        let repository = Repository {
            id: "o/r".into(),
            revision: "main".into(),
            file: None,
        };
        let select = |names: &[&str], wanted: Option<&str>| {
            let blobs = hub
                .select(&repository, &listing(names), wanted)
                .map_err(|e| e.to_string())?;
            Ok::<_, String>(
                blobs
                    .iter()
                    .map(|blob| blob.name().to_owned())
                    .collect::<Vec<_>>()
                    .join(" "),
            )
        };
        let ok = |text: &str| Ok(text.to_owned());
        assert_eq!(
            select(&["README.md", "m.gguf", "mmproj-f16.gguf"], None),
            ok("m.gguf")
        );
        let two = ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "x/a-Q2_K.gguf"];
        let all = "the repository has several models; name one of a-Q4_K_M.gguf, a-Q8_0.gguf, x/a-Q2_K.gguf";
        assert_eq!(select(&two, None), Err(all.into()));
        assert_eq!(select(&two, Some("q8_0")), ok("a-Q8_0.gguf"));
        assert_eq!(select(&two, Some("x/a-Q2_K.gguf")), ok("x/a-Q2_K.gguf"));
        let none = select(&two, Some("Q5")).unwrap_err();
        assert!(
            none.starts_with("the repository has no file \"Q5\"; it has a-Q4_K_M.gguf, "),
            "{none}"
        );
        let split = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        assert_eq!(select(&split, None), ok(&split.join(" ")));
        assert_eq!(select(&split, Some(split[1])), ok(&split.join(" ")));
        assert_eq!(
            select(
                &[
                    "README.md",
                    "config.json",
                    "consolidated.safetensors",
                    "merges.txt",
                    "sub/x.json",
                    "model-00001-of-00002.safetensors",
                    "model.safetensors.index.json",
                    "tokenizer.model",
                ],
                None
            ),
            ok(
                "config.json merges.txt model-00001-of-00002.safetensors model.safetensors.index.json tokenizer.model"
            )
        );
        assert_eq!(
            select(&["consolidated.safetensors"], None),
            ok("consolidated.safetensors")
        );
        assert!(
            select(&["pytorch_model.bin"], None)
                .unwrap_err()
                .contains("neither GGUF")
        );
        assert!(
            select(&["../m.gguf"], None)
                .unwrap_err()
                .contains("file name")
        );
    }
}
