//! The store under processes that are killed, run out of room, or use it all at once.
#![cfg(unix)]

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sterna_delivery::{
    hash::{Algorithm, digest_of},
    store::{Blob, Entry, Interrupted, Pull, Store, StoreError},
};

const ROOT: &str = "STERNA_TEST_STORE";
const SEED: &str = "STERNA_TEST_SEED";
const MODELS: [&str; 3] = ["one", "two", "three"];

/// Numbers that look random and repeat.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) % n
    }
}

/// The bytes of part `i`, the same in every process. Parts are what models share.
fn part(i: u64) -> Vec<u8> {
    let mut numbers = Numbers(i + 1);
    let len = 1000 + numbers.below(200_000) as usize;
    (0..len).map(|_| numbers.below(256) as u8).collect()
}

/// A program to be killed: fetches, publishes, reads, removes and sweeps until then. Ends by itself after
/// `STEPS` steps.
#[test]
#[ignore = "the other tests run it, as a process of its own"]
fn child() {
    let Some(root) = env::var_os(ROOT) else {
        return;
    };
    let seed = env::var(SEED).unwrap().parse().unwrap();
    let mut numbers = Numbers(seed);
    let store = Store::open(root).unwrap();
    for _ in 0..40 {
        let name = MODELS[numbers.below(3) as usize];
        match numbers.below(10) {
            0 => match store.remove(name) {
                Ok(_) | Err(StoreError::NoSuchModel { .. }) => {}
                Err(error) => panic!("{error:?}"),
            },
            1 => {
                let keep = [Interrupted::Keep, Interrupted::Drop][numbers.below(2) as usize];
                store.gc(keep).unwrap();
            }
            2 | 3 => check_model(&store, name),
            _ => fetch(&store, name, &mut numbers),
        }
    }
}

/// Fetches some parts, in some order, in pieces, some from the store, and publishes them.
fn fetch(store: &Store, name: &str, numbers: &mut Numbers) {
    let pull = store.pull(name).unwrap();
    let mut entry = Entry::new("test");
    for i in 0..1 + numbers.below(4) {
        let content = part(numbers.below(6));
        let blob = Blob::of(Algorithm::ALL[numbers.below(2) as usize], &content);
        bring(&pull, &blob, &content, numbers);
        entry.files.insert(format!("shard_{i}.bin"), blob);
    }
    let manifest = pull.put(Algorithm::Sha256, name.as_bytes()).unwrap();
    entry.files.insert("manifest.json".into(), manifest);
    if numbers.below(5) > 0 {
        pull.publish(&entry).unwrap();
    }
}

fn bring(pull: &Pull, blob: &Blob, content: &[u8], numbers: &mut Numbers) {
    let start = pull.present(blob).unwrap();
    if start == blob.size {
        return;
    }
    // What an earlier process left must be what it wrote.
    let mut pieces = Vec::new();
    let mut at = start;
    while at < blob.size {
        let end = (at + 1 + numbers.below(60_000)).min(blob.size);
        pieces.push(at..end);
        at = end;
    }
    for i in (1..pieces.len()).rev() {
        pieces.swap(i, numbers.below(i as u64 + 1) as usize);
    }
    for piece in pieces {
        let bytes = &content[piece.start as usize..piece.end as usize];
        pull.write_at(blob, piece.start, bytes).unwrap();
    }
    pull.commit(blob).unwrap();
}

/// If there is such a model, its files are whole and right, for as long as it is held.
fn check_model(store: &Store, name: &str) {
    let model = match store.model(name) {
        Ok(model) => model,
        Err(StoreError::NoSuchModel { .. }) => return,
        Err(error) => panic!("{error:?}"),
    };
    for (file, path) in model.paths() {
        let blob = model.entry().files[file];
        let bytes = fs::read(path).unwrap();
        assert_eq!(
            Blob::of(blob.digest.algorithm(), &bytes),
            blob,
            "{name}: {file}"
        );
    }
}

fn spawn(root: &Path, seed: u64, limit: Option<&str>) -> Child {
    let this = env::current_exe().unwrap();
    let mut command = match limit {
        None => Command::new(this),
        Some(limit) => {
            let mut shell = Command::new("sh");
            let script = format!("trap '' XFSZ; {limit}; exec \"$0\" \"$@\"");
            shell.arg("-c").arg(script).arg(this);
            shell
        }
    };
    command
        .args(["--exact", "store_crash::child", "--ignored", "--nocapture"])
        .env(ROOT, root)
        .env(SEED, seed.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn files_under(folder: &Path) -> BTreeMap<PathBuf, u64> {
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let entry = entry.unwrap();
        let metadata = entry.metadata().unwrap();
        if metadata.is_dir() {
            files.extend(files_under(&entry.path()));
        } else {
            files.insert(entry.path(), metadata.len());
        }
    }
    files
}

/// What must hold at any moment when no process runs.
fn check(store: &Store) {
    for path in files_under(&store.root().join("blobs")).into_keys() {
        let algorithm = path.ancestors().nth(2).unwrap().file_name().unwrap();
        let algorithm: Algorithm = algorithm.to_str().unwrap().parse().unwrap();
        let digest = digest_of(algorithm, &fs::read(&path).unwrap());
        let name = path.file_name().unwrap().to_str().unwrap();
        assert_eq!(digest.to_string(), name, "an unverified blob is visible");
    }
    for name in MODELS {
        check_model(store, name);
    }
    let damaged = files_under(&store.root().join("damaged"));
    assert!(damaged.is_empty(), "{damaged:?}");
}

#[test]
fn killed_at_any_moment_the_store_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let mut numbers = Numbers(2026);
    let begun = Instant::now();
    let mut n_killed = 0;
    // Rounds of one to three processes at once, killed one after another.
    for round in 0..60 {
        if begun.elapsed() > Duration::from_secs(20) {
            break;
        }
        let mut children: Vec<_> = (0..1 + numbers.below(3))
            .map(|i| spawn(dir.path(), round * 10 + i, None))
            .collect();
        for child in &mut children {
            thread::sleep(Duration::from_millis(numbers.below(120)));
            child.kill().unwrap();
        }
        for child in children {
            let output = child.wait_with_output().unwrap();
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(!stderr.contains("panicked"), "{stderr}");
            n_killed += usize::from(!output.status.success());
        }
        check(&store);
        if round % 5 == 4 {
            store.gc(Interrupted::Keep).unwrap();
            check(&store);
        }
    }
    assert!(
        n_killed > 10,
        "{n_killed} processes were killed before they ended"
    );
    // Without models, a sweep leaves no file but the lock.
    for name in MODELS {
        let _ = store.remove(name);
    }
    store.gc(Interrupted::Drop).unwrap();
    let left: Vec<_> = files_under(dir.path()).into_keys().collect();
    assert_eq!(left, [dir.path().join("lock")]);
}

#[test]
fn processes_that_use_a_store_at_once_do_each_other_no_harm() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let children: Vec<_> = (0..3).map(|i| spawn(dir.path(), 100 + i, None)).collect();
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    check(&store);
}

#[test]
fn without_room_an_error_names_the_file_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    // A model from before, and one whose larger parts can't be written: files may have 32 KiB.
    let pull = store.pull("before").unwrap();
    let mut entry = Entry::new("test");
    entry
        .files
        .insert("x".into(), pull.put(Algorithm::Sha256, b"small").unwrap());
    pull.publish(&entry).unwrap();
    let child = spawn(dir.path(), 1, Some("ulimit -f 64"));
    let output = child.wait_with_output().unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("Io { action: \"write\", path: "),
        "{stderr}"
    );
    assert!(stderr.contains("/partial/"), "{stderr}");
    check(&store);
    check_model(&store, "before");
    // With room again, all goes on.
    let output = spawn(dir.path(), 1, None).wait_with_output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    check(&store);
}

#[test]
fn a_store_where_none_can_be_is_an_error_that_names_the_place() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, b"").unwrap();
    let error = Store::open(file.join("store")).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, StoreError::Io { .. }), "{text}");
    assert!(text.contains("file"), "{text}");
    // A folder where a file should be goes aside with what it holds.
    let store = Store::open(dir.path().join("s")).unwrap();
    let blob = Blob::of(Algorithm::Sha256, b"abc");
    let pull = store.pull("m").unwrap();
    let hex = blob.digest.to_string();
    let place = store.root().join("blobs/sha256").join(&hex[..2]);
    fs::create_dir_all(place.join(&hex).join("mine")).unwrap();
    pull.put(Algorithm::Sha256, b"abc").unwrap();
    assert_eq!(fs::read(place.join(&hex)).unwrap(), b"abc");
    assert!(place.join(format!("{hex}.aside-0/mine")).exists());
}
