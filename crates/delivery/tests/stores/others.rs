//! Clients of others: what we push is pulled by them, and what they push by us.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use sterna_delivery::hash::Algorithm;
use sterna_testing::stores::{self, tool};

use crate::client::{Client, Kind, Place, bytes, check_stored, package, write};

fn some_package() -> BTreeMap<String, Vec<u8>> {
    let shards = [bytes(40_000, 1), bytes(1_500_000, 2)];
    let mut files = package("tiny", Algorithm::Sha256, &shards);
    // Not one that can be checked: by a key that nobody has.
    let key = sterna_delivery::sign::SecretKey::generate().unwrap();
    let signature = key.sign(&files["manifest.json"], "tiny").unwrap();
    files.insert("manifest.json.minisig".to_owned(), signature.into_bytes());
    files
}

fn at(server: &stores::Server, name: &str) -> Place {
    Place {
        kind: Kind::Registry,
        server: server.address.clone(),
        name: name.to_owned(),
    }
}

fn run(command: &mut Command) {
    let done = command.output().unwrap();
    let text = String::from_utf8_lossy(&done.stderr);
    let out = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success(), "{command:?}: {out}{text}");
}

fn contents(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(folder).unwrap();
    let file = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path).unwrap())
    };
    entries.map(file).collect()
}

#[test]
fn oras_pulls_what_was_pushed_and_pushes_what_is_pulled() {
    let (Some(server), Some(python)) = (stores::registry(), stores::python()) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tiny");
    let mut files = some_package();
    write(&folder, &files);
    let place = at(server, "oras/ours");
    Client::push(&folder, &place).run().value("digest");
    let reference = |name: &str| format!("{}/{name}:v1", server.address);
    let out = dir.path().join("pulled");
    let pull = "import oras.client, sys; c = oras.client.OrasClient(insecure=True, tls_verify=False); \
                c.pull(target=sys.argv[1], outdir=sys.argv[2])";
    run(Command::new(&python)
        .args(["-c", pull, &reference("oras/ours")])
        .arg(&out));
    assert!(contents(&out) == files, "{:?}", contents(&out).keys());
    // The other way round, without the signature, whose key nobody trusts.
    files.remove("manifest.json.minisig");
    fs::remove_file(folder.join("manifest.json.minisig")).unwrap();
    let push = "import oras.client, os, sys; c = oras.client.OrasClient(insecure=True, tls_verify=False); \
                c.push(target=sys.argv[1], files=sorted(os.listdir('.')))";
    run(Command::new(&python)
        .args(["-c", push, &reference("oras/theirs")])
        .current_dir(&folder));
    let store = dir.path().join("store");
    Client::pull(&store, &at(server, "oras/theirs"))
        .run()
        .value("size");
    check_stored(&store, "tiny", &files);
}

#[test]
fn skopeo_copies_what_was_pushed_to_a_folder_and_back() {
    let (Some(server), Some(skopeo)) = (stores::registry(), tool("skopeo")) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("tiny");
    let mut files = some_package();
    files.remove("manifest.json.minisig");
    write(&folder, &files);
    let place = at(server, "skopeo/ours");
    let digest = Client::push(&folder, &place).run().value("digest");
    let layout = dir.path().join("layout");
    let copy = |from: &str, to: &str| {
        run(Command::new(&skopeo)
            .args([
                "--insecure-policy",
                "copy",
                "--src-tls-verify=false",
                "--dest-tls-verify=false",
            ])
            .args([from, to]));
    };
    let reference = |name: &str| format!("docker://{}/{name}:v1", server.address);
    let layout_name = format!("oci:{}:v1", layout.display());
    copy(&reference("skopeo/ours"), &layout_name);
    copy(&layout_name, &reference("skopeo/theirs"));
    // From the registry, and from the folder that it wrote.
    let store = dir.path().join("store");
    Client::pull(&store, &at(server, "skopeo/theirs"))
        .run()
        .value("size");
    check_stored(&store, "tiny", &files);
    let store = dir.path().join("store-of-layout");
    Client::pull(&store, &place)
        .env("STERNA_TEST_STORES_ADDRESS", &layout)
        .run()
        .value("size");
    check_stored(&store, "tiny", &files);
    // The same bytes all the way.
    let again = Client::push(&folder, &at(server, "skopeo/theirs")).run();
    assert_eq!((again.number("n_sent"), again.value("digest")), (0, digest));
    // A folder with the files of a bucket is an image layout as well.
    let copied: Vec<_> = fs::read_dir(layout.join("blobs/sha256")).unwrap().collect();
    assert!(copied.len() >= files.len());
}
