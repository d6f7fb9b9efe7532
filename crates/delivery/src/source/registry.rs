//! Registries of OCI artifacts, as Docker's images are kept in.

use std::{
    env, fmt,
    fs::File,
    io,
    ops::Range,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use docker_credential::{CredentialRetrievalError, DockerCredential};
use oci_client::{
    Client, Reference, RegistryOperation,
    client::{ClientConfig, ClientProtocol},
    secrets::RegistryAuth,
};

use super::{
    Answer, HttpOptions, HttpSource, Url, UrlError,
    artifact::{Blobs, read_manifest},
    url::is_loopback_host,
};
use crate::{
    artifact::{DOCKER_INDEX_TYPE, DOCKER_MANIFEST_TYPE, INDEX_TYPE, MANIFEST_TYPE},
    blocking::{Activity, Bridge},
    fetch::Fault,
    hash::{Algorithm, Digest, digest_of},
};

/// How long a registry may take to let someone in.
const PATIENCE: Duration = Duration::from_secs(30);

/// The scheme of addresses, and that of registries without encryption.
const SCHEMES: [&str; 2] = ["oci", "oci+http"];

/// Whether `address` is that of a repository of a registry.
pub(crate) fn is_registry_address(address: &str) -> bool {
    let scheme = address.split_once("://").map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| SCHEMES.contains(&scheme.to_ascii_lowercase().as_str()))
}

/// The address of an artifact: `oci://HOST[:PORT]/REPOSITORY[:TAG][@sha256:…]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RegistryAddress {
    host: String,
    repository: String,
    tag: Option<String>,
    digest: Option<Digest>,
    is_secure: bool,
}

/// The tag that is meant where none is given.
const DEFAULT_TAG: &str = "latest";

impl RegistryAddress {
    /// Reads an address. Registries of this machine are spoken to without encryption, and those after `oci+http://`.
    ///
    /// Errors: [`UrlError`].
    pub fn parse(address: &str) -> Result<Self, UrlError> {
        let error = |why| UrlError {
            text: address.chars().take(200).collect(),
            why,
        };
        let (scheme, rest) = (address.split_once("://"))
            .filter(|_| is_registry_address(address))
            .ok_or_else(|| error("expected oci://"))?;
        let (host, path) = rest
            .split_once('/')
            .ok_or_else(|| error("expected oci://HOST/REPOSITORY[:TAG]"))?;
        if host.contains('@') {
            return Err(error(
                "it has a user name or password; `docker login` keeps those",
            ));
        }
        let is_host =
            |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | ':' | '[' | ']');
        if host.is_empty() || !host.chars().all(is_host) {
            return Err(error("it names no host"));
        }
        // What tools for images take for a part of a name at a default registry.
        if !(host.contains(['.', ':']) || host == "localhost") {
            return Err(error(
                "expected a host with a dot or a port before the repository, such as ghcr.io",
            ));
        }
        let (path, digest) = match path.split_once('@') {
            None => (path, None),
            Some((path, text)) => {
                let digest = text.strip_prefix("sha256:");
                let digest = digest.and_then(|hex| Digest::from_hex(Algorithm::Sha256, hex).ok());
                let digest = digest
                    .ok_or_else(|| error("expected sha256: and 64 hexadecimal digits after @"))?;
                (path, Some(digest))
            }
        };
        let (repository, tag) = match path.rsplit_once(':') {
            None => (path, None),
            Some((repository, tag)) => (repository, Some(tag)),
        };
        let is_part = |part: &str| {
            let fits = |c: char| {
                c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_' | '.')
            };
            let begins_well = part.starts_with(|c: char| c.is_ascii_alphanumeric());
            begins_well && part.chars().all(fits)
        };
        if repository.len() > 255 || !repository.split('/').all(is_part) {
            return Err(error(
                "expected lower-case letters, digits, -, _ and . between slashes as the repository",
            ));
        }
        let is_tag = |tag: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            let begins_well = tag.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
            tag.len() <= 128 && begins_well && tag.chars().all(fits)
        };
        if tag.is_some_and(|tag| !is_tag(tag)) {
            return Err(error(
                "expected letters, digits, -, _ and . as the tag, at most 128 of them",
            ));
        }
        let is_plain = scheme.eq_ignore_ascii_case(SCHEMES[1]) || is_loopback_host(host);
        Ok(Self {
            host: host.to_ascii_lowercase(),
            repository: repository.to_owned(),
            tag: tag.map(str::to_owned),
            digest,
            is_secure: !is_plain,
        })
    }

    /// A name for what is there: the last part of the repository, and the tag or the digest if one is given.
    pub fn stem(&self) -> String {
        let (_, name) = self
            .repository
            .rsplit_once('/')
            .unwrap_or(("", &self.repository));
        match (&self.tag, self.digest) {
            (Some(tag), _) if tag != DEFAULT_TAG => format!("{name}-{tag}"),
            (None, Some(digest)) => format!("{name}-{}", &digest.to_string()[..12]),
            _ => name.to_owned(),
        }
    }

    /// The tag that it means, unless it is pinned by a digest.
    pub fn tag(&self) -> Option<&str> {
        match (&self.tag, self.digest) {
            (_, Some(_)) => None,
            (Some(tag), None) => Some(tag),
            (None, None) => Some(DEFAULT_TAG),
        }
    }

    /// The host that serves it: images of Docker's own registry are at another than their names say.
    fn server(&self) -> &str {
        match self.host.as_str() {
            "docker.io" => "index.docker.io",
            host => host,
        }
    }

    fn base(&self) -> Result<Url, UrlError> {
        let scheme = if self.is_secure { "https" } else { "http" };
        let (server, repository) = (self.server(), &self.repository);
        Url::parse(&format!("{scheme}://{server}/v2/{repository}/"))
    }
}

impl fmt::Display for RegistryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.is_secure || is_loopback_host(&self.host) {
            true => SCHEMES[0],
            false => SCHEMES[1],
        };
        write!(f, "{scheme}://{}/{}", self.host, self.repository)?;
        if let Some(tag) = &self.tag {
            write!(f, ":{tag}")?;
        }
        match self.digest {
            Some(digest) => write!(f, "@sha256:{digest}"),
            None => Ok(()),
        }
    }
}

/// A repository of a registry, and how to get in.
pub struct Registry {
    name: String,
    address: RegistryAddress,
    http: HttpSource,
    client: Client,
    auth: RegistryAuth,
    bridge: Arc<Bridge>,
    /// The `Authorization` that the registry last asked for.
    authorization: Mutex<Option<String>>,
}

/// Why a registry can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// An invalid address.
    #[error(transparent)]
    Address(#[from] UrlError),
    /// What `docker login` keeps can't be read.
    #[error("{address}: the credentials that `docker login` keeps can't be read: {problem}")]
    Credentials {
        /// The address.
        address: String,
        /// The library's message.
        problem: String,
    },
    /// No client.
    #[error("{address}: {problem}")]
    Client {
        /// The address.
        address: String,
        /// The library's message.
        problem: String,
    },
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Registry").field(&self.name).finish()
    }
}

impl Registry {
    /// The repository at `address`. Credentials are those that `docker login` keeps, in `$DOCKER_CONFIG/config.json`
    /// or `~/.docker/config.json`; without any it is asked anonymously.
    ///
    /// Errors: [`RegistryError`].
    pub fn open(address: &str) -> Result<Self, RegistryError> {
        let parsed = RegistryAddress::parse(address)?;
        let problem = |problem: String| RegistryError::Client {
            address: address.to_owned(),
            problem,
        };
        let bridge = Bridge::new().map_err(|error| problem(error.to_string()))?;
        let config = ClientConfig {
            protocol: match parsed.is_secure {
                true => ClientProtocol::Https,
                false => ClientProtocol::Http,
            },
            use_monolithic_push: true,
            platform_resolver: None,
            connect_timeout: Some(Duration::from_secs(10)),
            user_agent: concat!("sterna/", env!("CARGO_PKG_VERSION")),
            ..ClientConfig::default()
        };
        let client = Client::try_from(config).map_err(|error| problem(error.to_string()))?;
        Ok(Self {
            name: parsed.to_string(),
            http: HttpSource::new(parsed.base()?, HttpOptions::default()),
            auth: credentials(address, &parsed.host)?,
            address: parsed,
            client,
            bridge,
            authorization: Mutex::default(),
        })
    }

    pub(crate) fn address(&self) -> &RegistryAddress {
        &self.address
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    pub(crate) fn auth(&self) -> &RegistryAuth {
        &self.auth
    }

    pub(crate) fn bridge(&self) -> &Arc<Bridge> {
        &self.bridge
    }

    /// As the client names it, by this tag.
    pub(crate) fn reference(&self, tag: &str) -> Reference {
        let (host, repository) = (self.address.host.clone(), self.address.repository.clone());
        Reference::with_tag(host, repository, tag.to_owned())
    }

    /// The manifest that the address means, with its digest; `None` if there is none. It is as large as it may be at
    /// most, whatever the registry sends.
    ///
    /// Errors: [`Fault`].
    pub(crate) fn current(&self) -> Result<Option<(Vec<u8>, Digest)>, Fault> {
        let reference = match (self.address.digest, self.address.tag()) {
            (Some(digest), _) => format!("sha256:{digest}"),
            (None, tag) => tag.unwrap_or(DEFAULT_TAG).to_owned(),
        };
        let answer = self.get(&format!("manifests/{reference}"), None, true);
        let bytes = match answer.and_then(read_manifest) {
            Ok(bytes) => bytes,
            Err(Fault::Refused { status: 404 | 410 }) => return Ok(None),
            Err(fault) => return Err(fault),
        };
        let digest = digest_of(Algorithm::Sha256, &bytes);
        match self.address.digest {
            Some(pinned) if pinned != digest => Err(Fault::Invalid {
                message: format!("expected the manifest sha256:{pinned}, found sha256:{digest}"),
            }),
            _ => Ok(Some((bytes, digest))),
        }
    }

    /// Requests `path` below the repository; logs in if that is asked for.
    fn get(
        &self,
        path: &str,
        range: Option<Range<u64>>,
        is_manifest: bool,
    ) -> Result<Answer, Fault> {
        let accept = [
            MANIFEST_TYPE,
            INDEX_TYPE,
            DOCKER_MANIFEST_TYPE,
            DOCKER_INDEX_TYPE,
        ]
        .join(", ");
        let accept = is_manifest.then_some(&*accept);
        let url = self.http.base().below_verbatim(path);
        let before = self.authorization();
        let ask = |authorization: Option<&str>| {
            (self.http).get_as(url.clone(), range.clone(), authorization, accept)
        };
        let answer = ask(before.as_deref())?;
        if answer.head.status != 401 {
            return Ok(answer);
        }
        let Some(authorization) = self.log_in()? else {
            return Ok(answer);
        };
        let mut kept = self
            .authorization
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *kept = Some(authorization.clone());
        drop(kept);
        ask(Some(&authorization))
    }

    fn authorization(&self) -> Option<String> {
        let kept = self.authorization.lock();
        kept.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What to answer a registry that asks who we are; `None` if there is nothing to say.
    fn log_in(&self) -> Result<Option<String>, Fault> {
        let reference = self.reference(self.address.tag().unwrap_or(DEFAULT_TAG));
        let (activity, operation) = (Activity::new(), RegistryOperation::Pull);
        let asked = self.client.auth(&reference, &self.auth, operation);
        let token = match self.bridge.wait(PATIENCE, &activity, None, asked) {
            Ok(Ok(token)) => token,
            Ok(Err(error)) => return Err(login_fault(&error)),
            Err(why) => return Err(why.into()),
        };
        Ok(match (token, &self.auth) {
            (Some(token), _) => Some(format!("Bearer {token}")),
            (None, RegistryAuth::Basic(user, password)) => {
                let text = STANDARD.encode(format!("{user}:{password}"));
                Some(format!("Basic {text}"))
            }
            (None, _) => None,
        })
    }
}

fn login_fault(error: &oci_client::errors::OciDistributionError) -> Fault {
    use oci_client::errors::OciDistributionError as E;
    match error {
        E::AuthenticationFailure(_) | E::UnauthorizedError { .. } => Fault::Refused { status: 401 },
        E::RequestError(_) => Fault::Unreachable {
            message: super::chain(error),
        },
        error => Fault::Invalid {
            message: format!("no token: {}", super::chain(error)),
        },
    }
}

/// What `docker login` keeps for `host`.
fn credentials(address: &str, host: &str) -> Result<RegistryAuth, RegistryError> {
    // The name that it keeps its own registry under.
    let key = match host {
        "docker.io" | "index.docker.io" => "https://index.docker.io/v1/",
        host => host,
    };
    let problem = |problem: String| RegistryError::Credentials {
        address: address.to_owned(),
        problem,
    };
    let folder = env::var_os("DOCKER_CONFIG").map(PathBuf::from);
    let folder = folder.or_else(|| env::home_dir().map(|home| home.join(".docker")));
    let Some(path) = folder.map(|folder| folder.join("config.json")) else {
        return Ok(RegistryAuth::Anonymous);
    };
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(RegistryAuth::Anonymous);
        }
        Err(error) => return Err(problem(format!("{}: {error}", path.display()))),
    };
    use CredentialRetrievalError as E;
    match docker_credential::get_credential_from_reader(file, key) {
        Ok(DockerCredential::UsernamePassword(user, password)) => {
            Ok(RegistryAuth::Basic(user, password))
        }
        Ok(DockerCredential::IdentityToken(token)) => Ok(RegistryAuth::Bearer(token)),
        Err(E::NoCredentialConfigured) => Ok(RegistryAuth::Anonymous),
        // How helpers say the same.
        Err(E::HelperFailure { stdout, .. }) if stdout.contains("credentials not found") => {
            Ok(RegistryAuth::Anonymous)
        }
        Err(error) => Err(problem(format!("{}: {error}", path.display()))),
    }
}

/// A repository as the place of an artifact's blobs.
pub(crate) struct RegistryBlobs(pub(crate) Registry);

impl Blobs for RegistryBlobs {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn manifest(&self) -> Result<Option<Vec<u8>>, Fault> {
        match self.0.current()? {
            Some((bytes, _)) => Ok(Some(bytes)),
            None => Err(Fault::Missing {
                message: "no such repository or tag".to_owned(),
            }),
        }
    }

    fn manifest_of(&self, digest: &Digest) -> Result<Answer, Fault> {
        self.0
            .get(&format!("manifests/sha256:{digest}"), None, true)
    }

    fn blob(&self, digest: &Digest, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        self.0.get(&format!("blobs/sha256:{digest}"), range, false)
    }

    fn plain(&self, _: &str, _: Option<Range<u64>>) -> Result<Answer, Fault> {
        Err(Fault::Missing {
            message: "no manifest".to_owned(),
        })
    }

    fn interrupt(&self) {
        super::Source::interrupt(&self.0.http);
        self.0.bridge.interrupt();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read() {
        let parsed = RegistryAddress::parse("oci://GHCR.io/me/tiny-rdrr:v1.2").unwrap();
        assert_eq!(parsed.to_string(), "oci://ghcr.io/me/tiny-rdrr:v1.2");
        assert_eq!(
            (parsed.tag(), &*parsed.stem()),
            (Some("v1.2"), "tiny-rdrr-v1.2")
        );
        let base = parsed.base().unwrap();
        assert_eq!(base.to_string(), "https://ghcr.io/v2/me/tiny-rdrr/");
        let digest = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";
        let pinned = RegistryAddress::parse(&format!("oci://h:5000/a@sha256:{digest}")).unwrap();
        assert_eq!((pinned.tag(), &*pinned.stem()), (None, "a-001122334455"));
        assert_eq!(
            pinned.to_string(),
            format!("oci://h:5000/a@sha256:{digest}")
        );
        for (address, base) in [
            ("oci://localhost/a", "http://localhost/v2/a/"),
            (
                "oci://127.0.0.1:5000/a:latest",
                "http://127.0.0.1:5000/v2/a/",
            ),
            ("oci://[::1]:5000/a", "http://[::1]:5000/v2/a/"),
            ("oci+http://registry.lan/a", "http://registry.lan/v2/a/"),
            ("oci://docker.io/me/a", "https://index.docker.io/v2/me/a/"),
        ] {
            let parsed = RegistryAddress::parse(address).unwrap();
            assert_eq!(parsed.base().unwrap().to_string(), base);
            assert_eq!(
                (parsed.tag(), parsed.to_string().as_str()),
                (Some("latest"), address)
            );
        }
    }

    #[test]
    fn mistakes_in_addresses_are_named() {
        for (address, why) in [
            ("https://ghcr.io/a", "expected oci://"),
            ("oci://ghcr.io", "expected oci://HOST/REPOSITORY[:TAG]"),
            ("oci:///a", "it names no host"),
            (
                "oci://me:pw@ghcr.io/a",
                "it has a user name or password; `docker login` keeps those",
            ),
            (
                "oci://me/tiny",
                "expected a host with a dot or a port before the repository, such as ghcr.io",
            ),
            (
                "oci://ghcr.io/Me/tiny",
                "expected lower-case letters, digits, -, _ and . between slashes as the repository",
            ),
            (
                "oci://ghcr.io/me//tiny",
                "expected lower-case letters, digits, -, _ and . between slashes as the repository",
            ),
            (
                "oci://ghcr.io/me/../x",
                "expected lower-case letters, digits, -, _ and . between slashes as the repository",
            ),
            (
                "oci://ghcr.io/a:b c",
                "expected letters, digits, -, _ and . as the tag, at most 128 of them",
            ),
            (
                "oci://ghcr.io/a@sha256:12",
                "expected sha256: and 64 hexadecimal digits after @",
            ),
        ] {
            assert_eq!(
                RegistryAddress::parse(address).unwrap_err().why,
                why,
                "{address}"
            );
        }
    }
}
