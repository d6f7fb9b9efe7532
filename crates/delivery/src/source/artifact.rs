//! Packages that are OCI artifacts, as sources: files are found by the names of layers.

use std::{
    io::{self, Read},
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

use super::{Answer, Source, asked_for};
use crate::{
    artifact::{Artifact, ArtifactError, Found, INDEX_FILE, MAX_MANIFEST_BYTES, blob_path, parse},
    fetch::{Fault, Limits, read_small},
    hash::{Digest, Expected, Verifier},
};

/// Where the blobs of artifacts are.
pub(crate) trait Blobs: Send + Sync {
    /// Its name in messages.
    fn name(&self) -> &str;

    /// The manifest that the address means, or a list of them; `None` if the place has none, but files by their names.
    ///
    /// Errors: [`Fault`].
    fn manifest(&self) -> Result<Option<Vec<u8>>, Fault>;

    /// The manifest with this digest. Errors: [`Fault`].
    fn manifest_of(&self, digest: &Digest) -> Result<Answer, Fault>;

    /// The blob with this digest, or a part of it. Errors: [`Fault`].
    fn blob(&self, digest: &Digest, range: Option<Range<u64>>) -> Result<Answer, Fault>;

    /// The file called `name`, where there is no manifest. Errors: [`Fault`].
    fn plain(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault>;

    /// See [`Source::interrupt`].
    fn interrupt(&self);
}

/// An artifact as a source of the files that its layers are.
pub(crate) struct ArtifactSource<B> {
    blobs: B,
    /// What the address means, once that is known: it stays the same for this source.
    contents: Mutex<Option<Contents>>,
}

#[derive(Clone)]
enum Contents {
    Artifact(Arc<Artifact>),
    Plain,
}

impl<B: Blobs> ArtifactSource<B> {
    pub(crate) fn new(blobs: B) -> Self {
        Self {
            blobs,
            contents: Mutex::default(),
        }
    }

    fn contents(&self) -> Result<Contents, Fault> {
        let mut contents = self.contents.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(contents) = &*contents {
            return Ok(contents.clone());
        }
        let found = match self.blobs.manifest()? {
            None => Contents::Plain,
            Some(bytes) => Contents::Artifact(self.artifact(&bytes)?.into()),
        };
        Ok(contents.insert(found).clone())
    }

    fn artifact(&self, bytes: &[u8]) -> Result<Artifact, Fault> {
        let digest = match parse(bytes).map_err(invalid)? {
            Found::Artifact(artifact) => return Ok(artifact),
            Found::Listed { digest, .. } => digest,
        };
        let bytes = read_manifest(self.blobs.manifest_of(&digest)?)?;
        let expected = Expected::Digest(digest);
        (expected.verify(&bytes)).map_err(Fault::WrongBytes)?;
        match parse(&bytes).map_err(invalid)? {
            Found::Artifact(artifact) => Ok(artifact),
            Found::Listed { .. } => Err(invalid(ArtifactError::Nested)),
        }
    }
}

/// The bytes of a manifest.
pub(crate) fn read_manifest(answer: Answer) -> Result<Vec<u8>, Fault> {
    read_small(answer, INDEX_FILE, MAX_MANIFEST_BYTES, &Limits::default())
}

fn invalid(error: ArtifactError) -> Fault {
    Fault::Invalid {
        message: error.to_string(),
    }
}

impl<B: Blobs> Source for ArtifactSource<B> {
    fn name(&self) -> &str {
        self.blobs.name()
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        asked_for(name)?;
        let artifact = match self.contents()? {
            Contents::Plain => return self.blobs.plain(name, range),
            Contents::Artifact(artifact) => artifact,
        };
        let layer = artifact.file(name).ok_or_else(|| Fault::Missing {
            message: "no layer of that name".to_owned(),
        })?;
        let is_whole = range.is_none();
        let mut answer = self.blobs.blob(&layer.digest, range)?;
        if is_whole {
            // Some files have no other digest.
            let verifier = Verifier::new(Expected::Digest(layer.digest), layer.size);
            answer.body = Box::new(Verified {
                body: answer.body,
                verifier: Some(verifier),
            });
        }
        Ok(answer)
    }

    fn interrupt(&self) {
        self.blobs.interrupt();
    }
}

/// A body that ends with an error unless it has the digest it should have.
struct Verified {
    body: Box<dyn Read + Send>,
    verifier: Option<Verifier>,
}

impl Read for Verified {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.body.read(buffer)?;
        match &mut self.verifier {
            Some(verifier) if n > 0 => verifier.update(&buffer[..n]),
            verifier if n == 0 && !buffer.is_empty() => {
                if let Some(verifier) = verifier.take() {
                    let verified = verifier.finish();
                    verified.map_err(|m| io::Error::new(io::ErrorKind::InvalidData, m))?;
                }
            }
            _ => {}
        }
        Ok(n)
    }
}

/// An OCI image layout: a folder with an `index.json`, and blobs called by their digests.
pub(crate) struct Layout<S>(pub(crate) S);

impl<S: Source> Blobs for Layout<S> {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn manifest(&self) -> Result<Option<Vec<u8>>, Fault> {
        match self.0.open(INDEX_FILE, None).and_then(read_manifest) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Fault::Missing { .. } | Fault::Refused { status: 404 | 410 }) => Ok(None),
            Err(fault) => Err(fault),
        }
    }

    fn manifest_of(&self, digest: &Digest) -> Result<Answer, Fault> {
        self.blob(digest, None)
    }

    fn blob(&self, digest: &Digest, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        self.0.open(&blob_path(digest), range)
    }

    fn plain(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        self.0.open(name, range)
    }

    fn interrupt(&self) {
        self.0.interrupt();
    }
}
