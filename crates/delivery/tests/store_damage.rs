//! Stores that something else wrote to: strays are left alone, damage to one model is that of this model, and
//! what can't be written can be read.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use sterna_delivery::{
    hash::Algorithm,
    store::{Blob, Entry, Interrupted, Store, StoreError, Swept},
};

const SHARED: &[u8] = b"what both models have";

/// The files of the model `name`.
fn files(name: &str) -> BTreeMap<&'static str, Vec<u8>> {
    BTreeMap::from([
        ("shared.bin", SHARED.to_vec()),
        ("own.bin", format!("what only {name} has").into_bytes()),
    ])
}

fn publish(store: &Store, name: &str) -> Result<(), StoreError> {
    let pull = store.pull(name)?;
    let mut entry = Entry::new(format!("from {name}"));
    for (file, bytes) in files(name) {
        let blob = Blob::of(Algorithm::Sha256, &bytes);
        if pull.present(&blob)? < blob.size {
            pull.put(Algorithm::Sha256, &bytes)?;
        }
        entry.files.insert(file.to_owned(), blob);
    }
    pull.publish(&entry)
}

/// Two models that share a file, and half of a third.
fn small_store(root: &Path) -> Store {
    let store = Store::open(root).unwrap();
    publish(&store, "a").unwrap();
    publish(&store, "b").unwrap();
    let pull = store.pull("c").unwrap();
    let blob = Blob::of(Algorithm::Sha256, b"0123456789");
    pull.present(&blob).unwrap();
    pull.write_at(&blob, 0, b"01234").unwrap();
    pull.pause().unwrap();
    store
}

/// All files and folders under `root`, seen from there.
fn all_under(root: &Path) -> (Vec<PathBuf>, Vec<PathBuf>) {
    let (mut files, mut folders) = (Vec::new(), vec![PathBuf::new()]);
    let mut next = 0;
    while let Some(folder) = folders.get(next).cloned() {
        next += 1;
        for entry in fs::read_dir(root.join(&folder)).unwrap() {
            let entry = entry.unwrap();
            let path = folder.join(entry.file_name());
            match entry.path().is_dir() {
                true => folders.push(path),
                false => files.push(path),
            }
        }
    }
    files.sort();
    (files, folders)
}

/// A copy of `store`, dates included, in `root`.
fn copy(store: &Store, root: &Path) -> Store {
    let (files, folders) = all_under(store.root());
    for folder in folders {
        fs::create_dir_all(root.join(folder)).unwrap();
    }
    for file in files {
        let (from, to) = (store.root().join(&file), root.join(&file));
        fs::copy(&from, &to).unwrap();
        let date = fs::metadata(&from).unwrap().modified().unwrap();
        let copied = fs::File::options().write(true).open(&to).unwrap();
        copied.set_modified(date).unwrap();
    }
    Store::open(root).unwrap()
}

type Damage = (&'static str, fn(&Path));

const DAMAGES: [Damage; 6] = [
    ("deleted", |path| fs::remove_file(path).unwrap()),
    ("emptied", |path| fs::write(path, b"").unwrap()),
    ("garbled", |path| {
        let mut bytes = fs::read(path).unwrap();
        bytes.iter_mut().for_each(|byte| *byte ^= 0x55);
        fs::write(path, bytes).unwrap();
    }),
    ("changed by a byte", |path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        if let Some(byte) = bytes.get_mut(middle) {
            *byte ^= 1;
        }
        fs::write(path, bytes).unwrap();
    }),
    ("made a folder", |path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    }),
    ("made a folder that holds something", |path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
        fs::write(path.join("mine"), b"1").unwrap();
    }),
];

/// Which models `path` belongs to.
fn owners(path: &Path) -> Vec<&'static str> {
    let text = path.to_str().unwrap().replace('\\', "/");
    let blob = |bytes: &[u8]| Blob::of(Algorithm::Sha256, bytes).digest.to_string();
    let has = |name: &&str| {
        text.starts_with(&format!("models/{name}/"))
            || files(name)
                .values()
                .any(|bytes| text.ends_with(&blob(bytes)))
    };
    ["a", "b"].into_iter().filter(has).collect()
}

fn blob_path(store: &Store, bytes: &[u8]) -> PathBuf {
    let hex = Blob::of(Algorithm::Sha256, bytes).digest.to_string();
    store.root().join("blobs/sha256").join(&hex[..2]).join(hex)
}

/// What `list` says of the model `name`: whether it is there, and whether it is damaged.
fn listed(store: &Store, name: &str) -> Option<bool> {
    let models = store.list().unwrap();
    let model = models.iter().find(|model| model.name == name);
    let unreadable = store.unreadable().unwrap();
    let lost = unreadable.iter().any(|(lost, _)| lost == name);
    model
        .map(|model| model.damage.is_some())
        .or(lost.then_some(true))
}

fn whole(store: &Store, name: &str) -> bool {
    store.model(name).is_ok() && store.verify(name).unwrap().is_empty()
}

#[test]
fn damage_to_any_file_is_that_of_its_models_and_can_be_mended() {
    let dir = tempfile::tempdir().unwrap();
    let original = small_store(&dir.path().join("original"));
    let (files_here, _) = all_under(original.root());
    assert!(files_here.len() >= 12, "{files_here:?}");
    let mut n = 0;
    for path in &files_here {
        let owners = owners(path);
        for (how, damage) in DAMAGES {
            let case = format!("{} {how}", path.display());
            let mut damaged = || {
                n += 1;
                let store = copy(&original, &dir.path().join(n.to_string()));
                damage(&store.root().join(path));
                store
            };
            // Removed by whoever deletes the mark.
            let is_removed = path.ends_with("current") && how == "deleted";

            let store = damaged();
            store
                .interrupted()
                .unwrap_or_else(|e| panic!("{case}: {e}"));
            // Before using one puts aside what both have.
            let says = ["a", "b"].map(|name| (name, listed(&store, name)));
            for (name, says) in says {
                let is_owner = owners.contains(&name);
                if !is_owner {
                    assert_eq!(says, Some(false), "{case}: {name}");
                    assert!(whole(&store, name), "{case}: {name}");
                } else if is_removed {
                    assert_eq!(says, None, "{case}");
                } else {
                    // A blob of the right size is hashed when it is used.
                    let is_size_kept = ["garbled", "changed by a byte"].contains(&how);
                    let is_told = path.starts_with("models") || !is_size_kept;
                    assert_eq!(says, Some(is_told), "{case}: {name}");
                    let error = store.model(name).unwrap_err();
                    assert!(
                        matches!(
                            error,
                            StoreError::Damaged { .. } | StoreError::DamagedIndex { .. }
                        ),
                        "{case}: {error}"
                    );
                }
            }

            // Swept: nothing that a damaged model may need is gone.
            let store = damaged();
            for interrupted in [Interrupted::Keep, Interrupted::Drop] {
                store
                    .gc(interrupted)
                    .unwrap_or_else(|e| panic!("{case}: {e}"));
            }
            for name in ["a", "b"] {
                if !owners.contains(&name) {
                    assert!(whole(&store, name), "{case}: {name}");
                } else if path.starts_with("models") && !is_removed {
                    for bytes in files(name).values() {
                        assert!(blob_path(&store, bytes).exists(), "{case}: {name}");
                    }
                }
            }

            // Pulled again: whole.
            for name in ["a", "b"] {
                publish(&store, name).unwrap_or_else(|e| panic!("{case}: {name}: {e}"));
                assert!(whole(&store, name), "{case}: {name}");
                assert_eq!(listed(&store, name), Some(false), "{case}: {name}");
            }
            publish(&store, "c").unwrap_or_else(|e| panic!("{case}: {e}"));
            assert_eq!(
                store.gc(Interrupted::Keep).unwrap().damaged,
                [""; 0],
                "{case}"
            );

            // Removed: gone, and the others are there.
            let store = damaged();
            for name in &owners {
                match store.remove(name) {
                    Err(StoreError::NoSuchModel { .. }) if is_removed => {}
                    result => drop(result.unwrap_or_else(|e| panic!("{case}: {e}"))),
                }
                assert_eq!(listed(&store, name), None, "{case}");
            }
            for name in ["a", "b"] {
                assert_eq!(
                    whole_if(&store, name),
                    !owners.contains(&name),
                    "{case}: {name}"
                );
            }
            assert_eq!(
                store.gc(Interrupted::Drop).unwrap().damaged,
                [""; 0],
                "{case}"
            );
        }
    }
}

fn whole_if(store: &Store, name: &str) -> bool {
    listed(store, name).is_some() && whole(store, name)
}

#[test]
fn what_is_known_of_a_damaged_model_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let store = small_store(dir.path());
    let mark = dir.path().join("models/b/current");
    fs::write(&mark, "nonsense").unwrap();
    let models = store.list().unwrap();
    let b = &models[1];
    assert_eq!((b.name.as_str(), b.entry.source.as_str()), ("b", "from b"));
    let damage = b.damage.as_ref().unwrap();
    assert!(damage.contains("found 8 other bytes"), "{damage}");
    let StoreError::DamagedIndex { name, origin, .. } = store.model("b").unwrap_err() else {
        panic!("expected a damaged index");
    };
    assert_eq!((name.as_str(), origin.as_deref()), ("b", Some("from b")));
    // All that it has is known, so what nobody needs goes.
    let swept = store.gc(Interrupted::Drop).unwrap();
    assert!(swept.damaged.is_empty());

    for entry in fs::read_dir(dir.path().join("models/b")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some() {
            fs::remove_file(path).unwrap();
        }
    }
    publish(&store, "x").unwrap();
    let unreadable = store.unreadable().unwrap();
    assert_eq!(unreadable[0].0, "b");
    let swept = store.remove("x").unwrap();
    assert_eq!((swept.n_blobs, &*swept.damaged), (0, &["b".to_owned()][..]));
    let swept = store.remove("b").unwrap();
    assert_eq!((swept.n_blobs, swept.damaged.len()), (2, 0));
    assert!(whole(&store, "a"));
}

#[test]
fn strays_in_any_folder_are_left_alone() {
    const STRAYS: [&str; 9] = [
        ".DS_Store",
        "Thumbs.db",
        "desktop.ini",
        "current~",
        ".current.swp",
        "notes.json",
        "note",
        ".localized.txt",
        "Old Models",
    ];
    let dir = tempfile::tempdir().unwrap();
    let store = small_store(dir.path());
    let (_, folders) = all_under(dir.path());
    let strays: Vec<_> = (folders.iter())
        .flat_map(|folder| STRAYS.map(|stray| folder.join(stray)))
        .collect();
    for stray in &strays {
        let path = dir.path().join(stray);
        match stray.ends_with("Old Models") {
            true => fs::create_dir(&path).unwrap(),
            false => fs::write(&path, b"mine").unwrap(),
        }
    }
    let is_left = |swept: &Swept, gone: &str| {
        for stray in &strays {
            assert!(dir.path().join(stray).exists(), "{}", stray.display());
            let is_said = swept.unknown.contains(stray);
            assert!(is_said || stray.starts_with(gone), "{}", stray.display());
        }
        assert_eq!(swept.damaged, [""; 0]);
    };
    assert_eq!(
        (listed(&store, "a"), listed(&store, "b")),
        (Some(false), Some(false))
    );
    assert_eq!(store.list().unwrap().len(), 2);
    assert_eq!(store.interrupted().unwrap(), [("c".to_owned(), 5)]);
    is_left(&store.gc(Interrupted::Keep).unwrap(), "-");
    publish(&store, "a").unwrap();
    publish(&store, "d").unwrap();
    assert!(whole(&store, "d"));
    is_left(&store.remove("d").unwrap(), "-");
    is_left(&store.remove("a").unwrap(), "models/a");
    assert_eq!(listed(&store, "a"), None);
    let swept = store.gc(Interrupted::Drop).unwrap();
    is_left(&swept, "partial/c");
    assert_eq!(store.interrupted().unwrap(), []);
    assert!(whole(&store, "b"));
}

/// Runs this test again as a user who may write nothing in `root`: as nobody if this is root.
#[cfg(unix)]
fn as_another_user(test: &str, root: &Path) -> Option<std::process::Output> {
    use std::os::unix::{fs::PermissionsExt as _, process::CommandExt as _};
    let (files, folders) = all_under(root);
    for (paths, mode) in [(files, 0o444), (folders, 0o555)] {
        for path in paths {
            let mode = fs::Permissions::from_mode(mode);
            fs::set_permissions(root.join(path), mode).unwrap();
        }
    }
    let parent = root.parent().unwrap();
    fs::set_permissions(parent, fs::Permissions::from_mode(0o755)).unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child
        .args(["--exact", test, "--nocapture"])
        .env("STERNA_TEST_STORE", root);
    let is_root = fs::write(root.join("probe"), b"").is_ok();
    if is_root {
        fs::remove_file(root.join("probe")).unwrap();
        child.uid(65534).gid(65534).current_dir("/");
    }
    match child.output() {
        // The test itself may lie where nobody gets.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            eprintln!("not tried: {error}");
            None
        }
        output => Some(output.unwrap()),
    }
}

#[cfg(unix)]
#[test]
fn a_store_that_cannot_be_written_can_be_read() {
    if let Some(root) = std::env::var_os("STERNA_TEST_STORE") {
        let root = PathBuf::from(root);
        let store = Store::open(&root).unwrap();
        let is_damaged = root.ends_with("damaged");
        assert_eq!(listed(&store, "a"), Some(is_damaged));
        assert_eq!(store.interrupted().unwrap().len(), 1);
        assert_eq!(store.verify("b").unwrap(), []);
        assert_eq!(store.model("b").unwrap().paths().len(), 2);
        assert_eq!(store.verify("a").unwrap().len(), usize::from(is_damaged));
        assert_eq!(store.model("a").is_err(), is_damaged);
        store.groups().unwrap();
        let errors = [
            store.pull("a").map(drop),
            store.remove("a").map(drop),
            store.gc(Interrupted::Keep).map(drop),
        ];
        for error in errors {
            let error = error.unwrap_err();
            assert!(matches!(error, StoreError::Unwritable { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("can be read but not written"), "{text}");
        }
        return;
    }
    for (name, has_lock) in [("with", true), ("without", false), ("damaged", true)] {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join(name);
        let store = small_store(&root);
        if !has_lock {
            fs::remove_file(root.join("lock")).unwrap();
        }
        if name == "damaged" {
            fs::write(blob_path(&store, b"what only a has"), b"?").unwrap();
        }
        let test = "store_damage::a_store_that_cannot_be_written_can_be_read";
        if let Some(output) = as_another_user(test, &root) {
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{name}: {text}");
            assert!(text.contains("1 passed"), "{text}");
        }
    }
}
