//! Folders of object stores: S3 and what speaks like it, Google Cloud Storage, Azure.

use std::{env, fmt, ops::Range, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::StreamExt as _;
use object_store::{
    ClientConfigKey, GetOptions, GetRange, ObjectStore, RetryConfig,
    aws::{AmazonS3Builder, AmazonS3ConfigKey},
    azure::{AzureConfigKey, MicrosoftAzureBuilder},
    gcp::{GoogleCloudStorageBuilder, GoogleConfigKey},
    multipart::MultipartStore,
    path::Path,
};

use super::{Answer, Source, UrlError, chain, url::is_loopback};
use crate::{
    blocking::{Activity, Bridge},
    fetch::{Fault, Head, check_name},
};

/// How long a store may be silent.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// The schemes of object stores.
const SCHEMES: [&str; 3] = ["s3", "gs", "az"];

/// Whether `address` is that of an object store.
pub(crate) fn is_bucket_address(address: &str) -> bool {
    let scheme = address.split_once("://").map(|(scheme, _)| scheme);
    scheme.is_some_and(|scheme| SCHEMES.contains(&scheme.to_ascii_lowercase().as_str()))
}

/// A folder of a bucket, and how to reach it.
#[derive(Clone)]
pub struct Bucket {
    name: String,
    /// What tells its server and account from others.
    place: String,
    prefix: Path,
    store: Arc<dyn ObjectStore>,
    /// The same for uploads in parts.
    multipart: Arc<dyn MultipartStore>,
    bridge: Arc<Bridge>,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Bucket").field(&self.name).finish()
    }
}

/// Why an object store can't be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BucketError {
    /// An invalid address.
    #[error(transparent)]
    Address(#[from] UrlError),
    /// Settings of the environment that contradict each other, or lack something.
    #[error("{address}: {problem}")]
    Settings {
        /// The address.
        address: String,
        /// The library's message.
        problem: String,
    },
    /// The system is out of threads.
    #[error("{address}: cannot start a thread")]
    Thread {
        /// The address.
        address: String,
        /// The system's message.
        source: std::io::Error,
    },
}

/// The parts of an address.
#[derive(Debug, PartialEq, Eq)]
struct BucketAddress {
    scheme: &'static str,
    bucket: String,
    prefix: String,
}

fn parse(address: &str) -> Result<BucketAddress, UrlError> {
    let error = |why| UrlError {
        text: address.chars().take(200).collect(),
        why,
    };
    let (scheme, rest) = address
        .split_once("://")
        .ok_or_else(|| error("expected s3://, gs:// or az://"))?;
    let scheme = (SCHEMES.into_iter())
        .find(|known| known.eq_ignore_ascii_case(scheme))
        .ok_or_else(|| error("expected s3://, gs:// or az://"))?;
    if rest.contains(['?', '#']) {
        return Err(error("expected a bucket and a folder, found a query"));
    }
    let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
    if bucket.contains('@') {
        return Err(error(
            "it has a user name or password; the environment has those",
        ));
    }
    if bucket.is_empty() {
        return Err(error("it names no bucket"));
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if !bucket.chars().all(is_name) {
        return Err(error(
            "expected letters, digits, -, _ and . as the bucket's name",
        ));
    }
    let prefix = prefix.trim_matches('/');
    if (prefix.split('/').any(|part| part.is_empty()) && !prefix.is_empty())
        || prefix.split('/').any(|part| matches!(part, "." | ".."))
    {
        return Err(error("expected a folder without empty parts, . and .."));
    }
    Ok(BucketAddress {
        scheme,
        bucket: bucket.to_owned(),
        prefix: prefix.to_owned(),
    })
}

impl Bucket {
    /// The folder at `address`, such as `s3://bucket/folder`. Endpoint and credentials come from the environment, from
    /// the variables that the tools of each store read.
    ///
    /// Errors: [`BucketError`].
    pub fn open(address: &str) -> Result<Self, BucketError> {
        let parsed = parse(address)?;
        let prefix = Path::parse(&parsed.prefix).map_err(|_| UrlError {
            text: address.chars().take(200).collect(),
            why: "it has characters that names of objects can't have",
        })?;
        let bridge = Bridge::new().map_err(|source| BucketError::Thread {
            address: address.to_owned(),
            source,
        })?;
        let (place, (store, multipart)) =
            store(&parsed).map_err(|problem| BucketError::Settings {
                address: address.to_owned(),
                problem: chain(&problem),
            })?;
        Ok(Self {
            name: address.trim_end_matches('/').to_owned(),
            place,
            prefix,
            store,
            multipart,
            bridge,
        })
    }

    /// The folder `prefix` of `store`.
    #[cfg(test)]
    pub(crate) fn of(store: Arc<object_store::memory::InMemory>, prefix: &str) -> Self {
        Self {
            name: format!("memory://{prefix}"),
            place: String::new(),
            prefix: Path::parse(prefix).unwrap(),
            store: store.clone(),
            multipart: store,
            bridge: Bridge::new().unwrap(),
        }
    }

    /// Its address.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What tells it from a folder of the same address at another server, or of another account. Nothing of it is secret.
    pub(crate) fn place(&self) -> &str {
        &self.place
    }

    pub(crate) fn store(&self) -> &Arc<dyn ObjectStore> {
        &self.store
    }

    pub(crate) fn multipart(&self) -> &Arc<dyn MultipartStore> {
        &self.multipart
    }

    pub(crate) fn bridge(&self) -> &Arc<Bridge> {
        &self.bridge
    }

    /// The object called `name` in the folder.
    pub(crate) fn path(&self, name: &str) -> Result<Path, String> {
        check_name(name).map_err(|error| error.to_string())?;
        let parts = self.prefix.parts().chain(name.split('/').map(Into::into));
        Ok(parts.collect())
    }
}

/// One store, as both of what it is.
type Stores = (Arc<dyn ObjectStore>, Arc<dyn MultipartStore>);

fn both<S: ObjectStore + MultipartStore>(store: S) -> Stores {
    let store = Arc::new(store);
    (store.clone(), store)
}

/// The store of an address, after what tells its server and account from others of the environment.
fn store(address: &BucketAddress) -> object_store::Result<(String, Stores)> {
    let url = format!("{}://{}", address.scheme, address.bucket);
    // What asks it again is the planner, and the loop around uploads.
    let retry = RetryConfig {
        max_retries: 2,
        retry_timeout: PATIENCE,
        ..RetryConfig::default()
    };
    // What is silent is given up elsewhere; a large body takes as long as it takes.
    const CONNECT: &str = "10 seconds";
    const WHOLE: &str = "1 day";
    use ClientConfigKey as K;
    Ok(match address.scheme {
        "s3" => {
            let key = AmazonS3ConfigKey::Client;
            let mut builder = (AmazonS3Builder::from_env().with_url(url).with_retry(retry))
                .with_config(key(K::ConnectTimeout), CONNECT)
                .with_config(key(K::Timeout), WHOLE);
            let endpoints = ["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"];
            if is_here(&endpoints) {
                builder = builder.with_allow_http(true);
            }
            use AmazonS3ConfigKey as A;
            // As the store chooses between them; a bucket's name has one owner at each.
            let place = (builder.get_config_value(&A::S3Endpoint))
                .or_else(|| builder.get_config_value(&A::Endpoint));
            (place.unwrap_or_default(), both(builder.build()?))
        }
        "gs" => {
            let key = GoogleConfigKey::Client;
            let builder = (GoogleCloudStorageBuilder::from_env()
                .with_url(url)
                .with_retry(retry))
            .with_config(key(K::ConnectTimeout), CONNECT)
            .with_config(key(K::Timeout), WHOLE);
            let place = builder.get_config_value(&GoogleConfigKey::BaseUrl);
            (place.unwrap_or_default(), both(builder.build()?))
        }
        _ => {
            let key = AzureConfigKey::Client;
            let mut builder = (MicrosoftAzureBuilder::from_env()
                .with_url(url)
                .with_retry(retry))
            .with_config(key(K::ConnectTimeout), CONNECT)
            .with_config(key(K::Timeout), WHOLE);
            if is_here(&["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"]) {
                builder = builder.with_allow_http(true);
            }
            let is_emulator = builder.get_config_value(&AzureConfigKey::UseEmulator);
            let endpoint = match is_emulator.as_deref() {
                Some("true") => env::var("AZURITE_BLOB_STORAGE_URL").ok(),
                _ => builder.get_config_value(&AzureConfigKey::Endpoint),
            };
            let store = builder.build()?;
            // It says its account and container.
            let place = format!("{} {store}", endpoint.unwrap_or_default());
            (place, both(store))
        }
    })
}

/// Whether the first of these variables that is set has an address of this machine.
fn is_here(variables: &[&str]) -> bool {
    let mut values = variables.iter();
    let endpoint = values.find_map(|name| env::var(name).ok());
    endpoint.is_some_and(|endpoint| is_loopback(&endpoint))
}

/// What an error of a store means for who asked it.
pub(crate) fn fault(error: &object_store::Error) -> Fault {
    use object_store::Error as E;
    match error {
        E::NotFound { .. } => Fault::Missing {
            message: "no such object, or no such bucket".to_owned(),
        },
        E::InvalidPath { .. } => Fault::Missing {
            message: chain(error),
        },
        E::PermissionDenied { .. } => Fault::Refused { status: 403 },
        E::Unauthenticated { .. } => Fault::Refused { status: 401 },
        _ => Fault::Unreachable {
            message: chain(error),
        },
    }
}

/// A folder of an object store whose files have their own names.
pub(crate) struct BucketSource(pub(crate) Bucket);

impl Source for BucketSource {
    fn name(&self) -> &str {
        &self.0.name
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        let path = (self.0.path(name)).map_err(|message| Fault::Missing { message })?;
        let is_partial = range.is_some();
        let options = GetOptions {
            range: range.map(GetRange::Bounded),
            ..GetOptions::default()
        };
        let (bridge, activity) = (&self.0.bridge, Activity::new());
        let answer = bridge.wait(
            PATIENCE,
            &activity,
            None,
            self.0.store.get_opts(&path, options),
        );
        let result = match answer {
            Ok(Ok(result)) => result,
            Ok(Err(error)) => return Err(fault(&error)),
            Err(why) => return Err(why.into()),
        };
        let (range, size) = (result.range.clone(), result.meta.size);
        let head = Head {
            status: if is_partial { 206 } else { 200 },
            content_length: Some(range.end.saturating_sub(range.start)),
            content_range: is_partial.then(|| {
                format!(
                    "bytes {}-{}/{size}",
                    range.start,
                    range.end.saturating_sub(1)
                )
            }),
            etag: result.meta.e_tag.clone(),
            ..Head::default()
        };
        let stream = result.into_stream();
        // Pieces are as large as the network has them.
        let stream = stream
            .map(|piece: object_store::Result<Bytes>| piece)
            .boxed();
        Ok(Answer {
            head,
            body: Box::new(bridge.reader(stream, PATIENCE)),
        })
    }

    fn interrupt(&self) {
        self.0.bridge.interrupt();
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use object_store::{ObjectStoreExt as _, memory::InMemory};

    use super::*;

    #[test]
    fn addresses_are_read_and_mistakes_named() {
        let parsed = parse("S3://my-bucket/a/b c/").unwrap();
        assert_eq!(
            parsed,
            BucketAddress {
                scheme: "s3",
                bucket: "my-bucket".to_owned(),
                prefix: "a/b c".to_owned()
            }
        );
        assert_eq!(parse("gs://b").unwrap().prefix, "");
        assert_eq!(parse("az://container/x").unwrap().scheme, "az");
        for (address, why) in [
            ("bucket/x", "expected s3://, gs:// or az://"),
            ("https://b/x", "expected s3://, gs:// or az://"),
            ("s3://", "it names no bucket"),
            ("s3:///x", "it names no bucket"),
            (
                "s3://key@bucket/x",
                "it has a user name or password; the environment has those",
            ),
            (
                "s3://b ucket/x",
                "expected letters, digits, -, _ and . as the bucket's name",
            ),
            (
                "s3://b/x?y",
                "expected a bucket and a folder, found a query",
            ),
            (
                "s3://b/x//y",
                "expected a folder without empty parts, . and ..",
            ),
            (
                "s3://b/../y",
                "expected a folder without empty parts, . and ..",
            ),
        ] {
            assert_eq!(parse(address).unwrap_err().why, why, "{address}");
        }
        assert!(is_bucket_address("GS://x") && !is_bucket_address("oci://x"));
    }

    #[test]
    fn objects_are_read_whole_and_in_ranges() {
        let store = Arc::new(InMemory::new());
        let bucket = Bucket::of(store.clone(), "a/b");
        let source = BucketSource(bucket.clone());
        let missing = source.open("x/y.bin", None).map(|_| ()).unwrap_err();
        assert!(matches!(missing, Fault::Missing { .. }), "{missing}");
        assert!(source.open("../y.bin", None).is_err());
        let path = bucket.path("x/y.bin").unwrap();
        assert_eq!(path.to_string(), "a/b/x/y.bin");
        let put = store.put(&path, Bytes::from("0123456789").into());
        (bucket.bridge.wait(PATIENCE, &Activity::new(), None, put))
            .unwrap()
            .unwrap();
        for (range, expected) in [(None, "0123456789"), (Some(2..5), "234")] {
            let mut answer = source.open("x/y.bin", range.clone()).unwrap();
            let mut text = String::new();
            answer.body.read_to_string(&mut text).unwrap();
            assert_eq!(text, expected);
            assert_eq!(answer.head.content_length, Some(expected.len() as u64));
            let content_range = range.map(|_| "bytes 2-4/10".to_owned());
            assert_eq!(answer.head.content_range, content_range);
        }
    }
}
