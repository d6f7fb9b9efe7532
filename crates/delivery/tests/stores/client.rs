//! Packages, and the processes that push and pull them.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::Mutex,
    thread,
};

use sterna_delivery::{
    fetch::Limits,
    hash::{Algorithm, digest_of},
    pull::{Event, PullOptions, pull},
    push::{PackageFiles, PushOptions, push},
    sign::TrustList,
    store::Store,
};

use sterna_testing::stores::{self, BUCKET, KEY, SECRET};

/// What a client does: `push FOLDER TARGET`, or `pull FOLDER SOURCE [MIRROR]`, where the folder is a store's.
const ACTION: &str = "STERNA_TEST_STORES_ACTION";
const FOLDER: &str = "STERNA_TEST_STORES_FOLDER";
const ADDRESS: &str = "STERNA_TEST_STORES_ADDRESS";
const MIRROR: &str = "STERNA_TEST_STORES_MIRROR";
/// Where uploads under way are noted.
pub(crate) const UPLOADS: &str = "STERNA_TEST_STORES_UPLOADS";

/// For a server that asks nobody who they are.
const GOOGLE_KEY: &str =
    r#"{"disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}"#;

/// The files of a package with these shards, without its signature.
pub(crate) fn package(
    id: &str,
    algorithm: Algorithm,
    shards: &[Vec<u8>],
) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::new();
    let (mut listed, mut tensors) = (Vec::new(), Vec::new());
    for (i, shard) in shards.iter().enumerate() {
        let (name, size) = (format!("shard_{i:05}.bin"), shard.len());
        let digest = digest_of(algorithm, shard);
        listed.push(format!(
            r#"{{"index": {i}, "fileName": "{name}", "size": {size}, "hash": "{digest}"}}"#
        ));
        tensors.push(format!(
            r#""t{i}": {{"shard": {i}, "offset": 0, "size": {size}, "shape": [{}], "dtype": "F32"}}"#,
            size / 4
        ));
        files.insert(name, shard.clone());
    }
    let total: usize = shards.iter().map(Vec::len).sum();
    let manifest = format!(
        r#"{{"version": 1, "modelId": "{id}", "modelType": "transformer", "quantization": "F32",
        "hashAlgorithm": "{}", "totalSize": {total}, "tensorsFile": "tensors.json", "groups": {{}},
        "architecture": {{"numLayers": 1, "hiddenSize": 2, "intermediateSize": 4, "numAttentionHeads": 1,
        "vocabSize": 4, "maxSeqLen": 8}}, "shards": [{}]}}"#,
        algorithm.name(),
        listed.join(", ")
    );
    files.insert("manifest.json".to_owned(), manifest.into());
    files.insert(
        "tensors.json".to_owned(),
        format!("{{{}}}", tensors.join(", ")).into(),
    );
    files
}

/// `n` bytes that differ by `seed`.
pub(crate) fn bytes(n: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(n).collect()
}

/// Writes files to a new folder.
pub(crate) fn write(folder: &Path, files: &BTreeMap<String, Vec<u8>>) {
    fs::create_dir_all(folder).unwrap();
    for (name, bytes) in files {
        fs::write(folder.join(name), bytes).unwrap();
    }
}

/// Checks that the model called `name` in the store of a client has these files and no others.
pub(crate) fn check_stored(store: &Path, name: &str, files: &BTreeMap<String, Vec<u8>>) {
    let model = Store::open(store).unwrap().model(name).unwrap();
    let names: Vec<_> = model.paths().keys().collect();
    assert_eq!(names, files.keys().collect::<Vec<_>>());
    for (name, path) in model.paths() {
        assert!(fs::read(path).unwrap() == files[name], "{name} is another");
    }
}

/// A client that is to be started.
pub(crate) struct Client(Command);

/// What a client said when it ended.
#[derive(Debug)]
pub(crate) struct Told {
    pub(crate) ok: bool,
    pub(crate) text: String,
}

impl Told {
    /// What it says of `key`, or the end of the test if it failed.
    pub(crate) fn value(&self, key: &str) -> String {
        assert!(self.ok, "{}", self.text);
        let line = self
            .text
            .lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix(": "));
        line.unwrap_or_else(|| panic!("no {key} in {}", self.text))
            .to_owned()
    }

    pub(crate) fn number(&self, key: &str) -> u64 {
        self.value(key).parse().unwrap()
    }

    /// Its error.
    pub(crate) fn error(&self) -> &str {
        assert!(!self.ok, "it should fail: {}", self.text);
        let error = self.text.split_once("\nerror: ");
        error.map_or(&self.text, |(_, error)| error)
    }
}

impl Client {
    fn new(action: &str, folder: &Path, address: &str, server: &str) -> Client {
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", "client::client", "--nocapture"])
            .env(ACTION, action)
            .env(FOLDER, folder)
            .env(ADDRESS, address)
            .env("AWS_ACCESS_KEY_ID", KEY)
            .env("AWS_SECRET_ACCESS_KEY", SECRET)
            .env("AWS_ENDPOINT_URL", format!("http://{server}"))
            .env("AZURE_STORAGE_USE_EMULATOR", "true")
            .env("AZURITE_BLOB_STORAGE_URL", format!("http://{server}"))
            .env("GOOGLE_BASE_URL", format!("http://{server}"))
            .env("GOOGLE_SERVICE_ACCOUNT_KEY", GOOGLE_KEY)
            .env("DOCKER_CONFIG", "/nowhere")
            .env("NO_PROXY", "127.0.0.1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Client(command)
    }

    /// Pushes the package in `folder`.
    pub(crate) fn push(folder: &Path, place: &Place) -> Client {
        Client::new("push", folder, &place.address(), &place.server)
    }

    /// Pulls into the store in `folder`.
    pub(crate) fn pull(folder: &Path, place: &Place) -> Client {
        Client::new("pull", folder, &place.address(), &place.server)
    }

    pub(crate) fn mirror(mut self, address: &str) -> Client {
        self.0.env(MIRROR, address);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Client {
        self.0.env(name, value);
        self
    }

    pub(crate) fn start(mut self) -> Child {
        self.0.spawn().unwrap()
    }

    pub(crate) fn run(mut self) -> Told {
        told(self.0.output().unwrap())
    }
}

/// What a client said that was started.
pub(crate) fn told(output: Output) -> Told {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    Told {
        ok: output.status.success(),
        text: format!("{text}\n{errors}"),
    }
}

/// Whether the S3 server at `address` stores what it is given.
pub(crate) fn can_store(address: &str) -> bool {
    let folder = tempfile::tempdir().unwrap();
    write(
        folder.path(),
        &package("probe", Algorithm::Sha256, &[vec![0; 32]]),
    );
    let place = Place {
        kind: Kind::S3,
        server: address.to_owned(),
        name: "probe".to_owned(),
    };
    Client::push(folder.path(), &place).run().ok
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Registry,
    S3,
    Azure,
    Google,
}

/// Where a package is, at some server or a proxy before it.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) kind: Kind,
    pub(crate) server: String,
    pub(crate) name: String,
}

impl Place {
    pub(crate) fn address(&self) -> String {
        let (server, name) = (&self.server, &self.name);
        match self.kind {
            Kind::Registry => format!("oci://{server}/{name}:v1"),
            Kind::S3 => format!("s3://{BUCKET}/{name}"),
            Kind::Azure => format!("az://{BUCKET}/{name}"),
            Kind::Google => format!("gs://{BUCKET}/{name}"),
        }
    }

    /// The same behind another address of the server.
    pub(crate) fn by(&self, server: &str) -> Place {
        Place {
            server: server.to_owned(),
            ..self.clone()
        }
    }
}

/// Does `work` for a place called `name` at each kind of server that is here, beside each other.
pub(crate) fn at_each(name: &str, work: impl Fn(Place) + Sync) {
    let servers = [
        (Kind::Registry, stores::registry().map(|s| &*s.address)),
        (Kind::S3, stores::s3(can_store).map(|s| &*s.address)),
        (Kind::Azure, stores::azure().map(|s| &*s.address)),
        (Kind::Google, stores::gcs_with_uploads()),
    ];
    thread::scope(|scope| {
        for (kind, server) in servers {
            let Some(server) = server else { continue };
            let place = Place {
                kind,
                server: server.to_owned(),
                name: name.to_owned(),
            };
            let work = &work;
            scope.spawn(move || work(place));
        }
    });
}

/// Not a test, but the client that tests start and kill; as a test it does nothing.
#[test]
fn client() {
    let (Ok(action), Ok(folder), Ok(address)) =
        (env::var(ACTION), env::var(FOLDER), env::var(ADDRESS))
    else {
        return;
    };
    let outcome = match action.as_str() {
        "push" => do_push(&folder, &address),
        _ => do_pull(&folder, &address, env::var(MIRROR).ok()),
    };
    match outcome {
        Ok(text) => println!("\n{text}"),
        Err(error) => {
            println!("\nerror: {error}");
            std::process::exit(1);
        }
    }
}

fn do_push(folder: &str, address: &str) -> Result<String, String> {
    let files = PackageFiles::folder(folder);
    let options = PushOptions {
        // One after another, so that stages can be told apart.
        parallel: 1,
        retries: 2,
        uploads: env::var_os(UPLOADS).map(PathBuf::from),
        ..PushOptions::default()
    };
    let pushed = push(&files, address, &options, &|_| {}).map_err(|error| error.to_string())?;
    let replaced = pushed.replaced.map_or("none".to_owned(), |d| d.to_string());
    Ok(format!(
        "digest: {}\nsize: {}\nsent: {}\nn_files: {}\nn_sent: {}\nreplaced: {replaced}",
        pushed.digest, pushed.size, pushed.sent, pushed.n_files, pushed.n_sent
    ))
}

fn do_pull(folder: &str, address: &str, mirror: Option<String>) -> Result<String, String> {
    let store = Store::open(folder).map_err(|error| error.to_string())?;
    let options = PullOptions {
        name: Some("tiny".to_owned()),
        replace: true,
        mirrors: mirror.into_iter().collect(),
        limits: Limits {
            parallel: 1,
            retries: 2,
            segment_bytes: 1 << 20,
            ..Limits::default()
        },
        ..PullOptions::default()
    };
    let warnings = Mutex::new(String::new());
    let notify = |event: Event<'_>| {
        if let Event::Warning(warning) = event {
            *warnings.lock().unwrap() += &format!("warning: {warning}\n");
        }
    };
    let pulled = pull(&store, address, &options, &TrustList::default(), &notify);
    let warnings = warnings.into_inner().unwrap();
    let pulled = pulled.map_err(|error| {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        format!("{error}: {}\n{warnings}", cause.unwrap_or_default())
    })?;
    Ok(format!(
        "received: {}\nsize: {}\n{warnings}",
        pulled.received, pulled.size
    ))
}
