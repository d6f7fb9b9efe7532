//! The store as one process sees it.

use std::{
    fs,
    iter::once,
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use sterna_delivery::{
    hash::{Algorithm, Blake3Variant, Digest, Verified, digest_of},
    store::{Blob, Entry, Group, Interrupted, Piece, Store, StoreError},
};

fn store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("a/b")).unwrap();
    (dir, store)
}

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31) ^ seed ^ (i >> 8) as u8)
        .collect()
}

/// Publishes `files` under `name`.
fn publish(store: &Store, name: &str, files: &[(&str, &[u8])]) -> Entry {
    let pull = store.pull(name).unwrap();
    let mut entry = Entry::new("test");
    for (file, bytes) in files {
        let blob = pull.put(Algorithm::Sha256, bytes).unwrap();
        entry.files.insert((*file).to_owned(), blob);
    }
    pull.publish(&entry).unwrap();
    entry
}

/// All files under `folder`, with their sizes.
fn files_under(folder: &Path) -> Vec<(PathBuf, u64)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let entry = entry.unwrap();
        match entry.metadata().unwrap() {
            m if m.is_dir() => files.extend(files_under(&entry.path())),
            m => files.push((entry.path(), m.len())),
        }
    }
    files
}

#[test]
fn a_model_comes_back_as_it_was_published() {
    let (_dir, store) = store();
    let entry = publish(
        &store,
        "m",
        &[("manifest.json", b"{}"), ("shard_00000.bin", b"abc")],
    );
    let model = store.model("m").unwrap();
    assert_eq!(model.entry().files, entry.files);
    assert_eq!((model.name(), model.entry().source.as_str()), ("m", "test"));
    assert_eq!(fs::read(&model.paths()["shard_00000.bin"]).unwrap(), b"abc");
    assert_eq!(store.verify("m").unwrap(), []);
    assert!(
        files_under(&store.root().join("partial"))
            .iter()
            .all(|(_, size)| *size == 0)
    );
    let missing = store.model("other").unwrap_err();
    assert!(
        matches!(missing, StoreError::NoSuchModel { .. }),
        "{missing}"
    );
}

#[test]
fn what_models_share_is_there_once_and_stays_while_one_needs_it() {
    let (_dir, store) = store();
    let (shared, a, b) = (bytes(1, 1000), bytes(2, 300), bytes(3, 50));
    publish(&store, "a", &[("0", &shared), ("1", &a)]);
    publish(&store, "b", &[("0", &shared), ("1", &b), ("2", &shared)]);
    let sizes: Vec<_> = (store.list().unwrap().into_iter())
        .map(|l| (l.name, l.own_bytes, l.shared_bytes))
        .collect();
    assert_eq!(sizes, [("a".into(), 300, 1000), ("b".into(), 50, 1000)]);
    let blobs = || {
        files_under(&store.root().join("blobs"))
            .iter()
            .map(|f| f.1)
            .sum::<u64>()
    };
    assert_eq!(blobs(), 1350);
    let swept = store.remove("a").unwrap();
    assert_eq!((swept.n_blobs, swept.n_in_use), (1, 0));
    assert_eq!((blobs(), store.verify("b").unwrap().len()), (1050, 0));
    store.remove("b").unwrap();
    assert_eq!(blobs(), 0);
    assert!(store.list().unwrap().is_empty());
    let error = store.remove("b").unwrap_err();
    assert!(matches!(error, StoreError::NoSuchModel { .. }), "{error}");
}

#[test]
fn bytes_come_in_any_order_and_a_later_pull_goes_on() {
    let (_dir, store) = store();
    for algorithm in Algorithm::ALL {
        let content = bytes(7, 3 << 20);
        let blob = Blob::of(algorithm, &content);
        let part = |range: std::ops::Range<usize>| (range.start as u64, content[range].to_vec());
        let pull = store.pull("m").unwrap();
        assert_eq!(pull.present(&blob).unwrap(), 0);
        for (at, bytes) in [part(2 << 20..3 << 20), part(0..1000), part(1000..5000)] {
            pull.write_at(&blob, at, &bytes).unwrap();
        }
        let error = pull.commit(&blob).unwrap_err();
        assert!(matches!(error, StoreError::Incomplete { .. }), "{error}");
        pull.pause().unwrap();

        let pull = store.pull("m").unwrap();
        assert_eq!(pull.present(&blob).unwrap(), 5000);
        assert_eq!(pull.extents(&blob).unwrap(), [0..5000, 2 << 20..3 << 20]);
        pull.discard(&blob, 4000..blob.size).unwrap();
        assert_eq!(pull.extents(&blob).unwrap(), Vec::from_iter(once(0..4000)));
        let mut read = [0; 3000];
        pull.read_at(&blob, 1000, &mut read).unwrap();
        assert!(read[..] == content[1000..4000]);
        let (at, rest) = part(4000..3 << 20);
        pull.write_at(&blob, at, &rest).unwrap();
        // Killed between the last byte and the commit.
        drop(pull);
        let pull = store.pull("m").unwrap();
        assert_eq!(pull.present(&blob).unwrap(), blob.size);
        let path = pull.commit(&blob).unwrap();
        assert!(fs::read(path).unwrap() == content);
    }
}

#[test]
fn bytes_that_come_while_others_are_forgotten_stay() {
    const PIECE: usize = 4096;
    let (_dir, store) = store();
    let pull = store.pull("m").unwrap();
    for round in 0..20 {
        let good = bytes(round, 1 << 20);
        let blob = Blob::of(Algorithm::Sha256, &good);
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // More files than are kept open, so that this one is closed and opened meanwhile.
                for i in 0u64.. {
                    let other = Blob::of(Algorithm::Blake3, &(i % 40).to_le_bytes());
                    pull.write_at(&other, 0, &[0]).unwrap();
                    pull.write_at(&blob, 0, &[0; PIECE]).unwrap();
                    pull.discard(&blob, 0..PIECE as u64).unwrap();
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                }
            });
            for (i, piece) in good.chunks(PIECE).enumerate().skip(1) {
                pull.write_at(&blob, (i * PIECE) as u64, piece).unwrap();
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let mut found = vec![0; good.len() - PIECE];
        pull.read_at(&blob, PIECE as u64, &mut found).unwrap();
        let lost = (found.chunks(PIECE).zip(good.chunks(PIECE).skip(1)))
            .filter(|(found, good)| found != good);
        assert_eq!(lost.count(), 0, "pieces lost in round {round}");
        pull.write_at(&blob, 0, &good[..PIECE]).unwrap();
        pull.commit(&blob).unwrap();
    }
}

#[test]
fn wrong_bytes_are_never_visible() {
    let (_dir, store) = store();
    let content = bytes(9, 10_000);
    let blob = Blob::of(Algorithm::Sha256, &content);
    let pull = store.pull("m").unwrap();
    let mut wrong = content.clone();
    wrong[5000] ^= 1;
    pull.write_at(&blob, 0, &wrong).unwrap();
    let error = pull.commit(&blob).unwrap_err();
    assert!(matches!(error, StoreError::Mismatch { .. }), "{error}");
    assert_eq!(
        pull.present(&blob).unwrap(),
        0,
        "nothing says which are wrong"
    );
    // Bytes that are replaced count as what they are last.
    pull.write_at(&blob, 0, &wrong).unwrap();
    pull.write_at(&blob, 4000, &content[4000..6000]).unwrap();
    pull.commit(&blob).unwrap();
    let error = pull.write_at(&blob, 9_999, b"xy").unwrap_err();
    assert!(matches!(error, StoreError::OutOfBounds { .. }), "{error}");
    let error = pull.write_at(&blob, u64::MAX, b"xy").unwrap_err();
    assert!(matches!(error, StoreError::OutOfBounds { .. }), "{error}");

    // An entry can't name what is not there.
    let mut entry = Entry::new("test");
    entry
        .files
        .insert("x".into(), Blob::of(Algorithm::Sha256, b"not there"));
    let error = pull.publish(&entry).unwrap_err();
    assert!(matches!(error, StoreError::MissingBlob { .. }), "{error}");
    assert!(store.list().unwrap().is_empty());
}

#[test]
fn who_verified_on_the_way_says_by_what() {
    let (_dir, store) = store();
    let pull = store.pull("m").unwrap();
    let content = bytes(5, 10_000);
    let blob = Blob::of(Algorithm::Sha256, &content);
    pull.write_at(&blob, 0, &content[..9_999]).unwrap();
    let by_digest = Verified::Digest(Algorithm::Sha256);
    let error = pull.commit_verified(&blob, by_digest).unwrap_err();
    assert!(matches!(error, StoreError::Incomplete { .. }), "{error}");
    pull.write_at(&blob, 9_999, b"x").unwrap();
    // What says nothing about the digest is no reason to believe the bytes.
    for other in [
        Verified::SizeOnly,
        Verified::Blake3Variant,
        Verified::Digest(Algorithm::Blake3),
    ] {
        let error = pull.commit_verified(&blob, other).unwrap_err();
        assert!(matches!(error, StoreError::Mismatch { .. }), "{error}");
        pull.write_at(&blob, 0, &[0; 10_000]).unwrap();
    }
    pull.write_at(&blob, 0, &content).unwrap();
    pull.commit_verified(&blob, by_digest).unwrap();
    assert_eq!(pull.present(&blob).unwrap(), blob.size);
}

#[test]
fn a_wrong_size_for_a_known_digest_harms_nobody() {
    let (_dir, store) = store();
    let entry = publish(&store, "good", &[("x", b"content")]);
    let liar = Blob {
        size: 3,
        ..entry.files["x"]
    };
    let pull = store.pull("bad").unwrap();
    assert_eq!(pull.present(&liar).unwrap(), 0);
    pull.write_at(&liar, 0, b"con").unwrap();
    assert!(matches!(
        pull.commit(&liar),
        Err(StoreError::Mismatch { .. })
    ));
    let mut wrong = Entry::new("test");
    wrong.files.insert("x".into(), liar);
    assert!(matches!(
        pull.publish(&wrong),
        Err(StoreError::MissingBlob { .. })
    ));
    assert_eq!(store.verify("good").unwrap(), []);
}

#[test]
fn empty_files_and_the_variant_of_blake3_are_blobs_too() {
    let (_dir, store) = store();
    let pull = store.pull("m").unwrap();
    let empty = Blob::of(Algorithm::Blake3, b"");
    assert_eq!(pull.present(&empty).unwrap(), 0);
    pull.commit(&empty).unwrap();
    let content = bytes(4, 5000);
    let mut variant = Blake3Variant::new();
    variant.update(&content);
    let labelled = Blob {
        digest: Digest::new(Algorithm::Blake3, variant.finish()),
        size: 5000,
    };
    pull.write_at(&labelled, 0, &content).unwrap();
    pull.commit(&labelled).unwrap();
    let mut entry = Entry::new("test");
    entry.files = [("e".to_owned(), empty), ("v".to_owned(), labelled)].into();
    pull.publish(&entry).unwrap();
    assert_eq!(store.verify("m").unwrap(), []);
}

#[test]
fn readers_keep_a_revision_that_was_replaced_or_removed() {
    let (_dir, store) = store();
    publish(&store, "m", &[("x", b"old"), ("y", b"both")]);
    let old = store.model("m").unwrap();
    publish(&store, "m", &[("x", b"new"), ("y", b"both")]);
    store.gc(Interrupted::Drop).unwrap();
    assert_eq!(fs::read(&old.paths()["x"]).unwrap(), b"old");
    let new = store.model("m").unwrap();
    store.remove("m").unwrap();
    assert_eq!(fs::read(&new.paths()["x"]).unwrap(), b"new");
    assert_eq!(fs::read(&old.paths()["x"]).unwrap(), b"old");
    drop(old);
    assert_eq!(store.gc(Interrupted::Drop).unwrap().n_blobs, 1);
    assert_eq!(fs::read(&new.paths()["y"]).unwrap(), b"both");
    // What is open stays readable where the system allows to delete it.
    let mapped = sterna_delivery::LocalFile::open(&new.paths()["x"]).unwrap();
    drop(new);
    let swept = store.gc(Interrupted::Drop).unwrap();
    assert_eq!(swept.n_blobs + swept.n_in_use, 2);
    assert_eq!(mapped.slice(0, 3).unwrap(), "new");
    assert!(files_under(&store.root().join("models")).is_empty());
}

#[test]
fn a_sweep_leaves_what_a_pull_needs() {
    let (_dir, store) = store();
    let pull = store.pull("m").unwrap();
    let small = pull.put(Algorithm::Sha256, b"{}").unwrap();
    let half = Blob::of(Algorithm::Sha256, b"0123456789");
    pull.write_at(&half, 0, b"01234").unwrap();
    assert_eq!(store.gc(Interrupted::Drop).unwrap().n_blobs, 0);
    assert_eq!(pull.present(&half).unwrap(), 5);
    drop(pull);
    // Interrupted: kept or not, as asked.
    store.gc(Interrupted::Keep).unwrap();
    let pull = store.pull("m").unwrap();
    store.gc(Interrupted::Drop).unwrap();
    assert_eq!(
        (pull.present(&half).unwrap(), pull.present(&small).unwrap()),
        (5, 2)
    );
    drop(pull);
    assert_eq!(store.gc(Interrupted::Drop).unwrap().n_blobs, 1);
    assert!(files_under(&store.root().join("partial")).is_empty());
    assert!(files_under(&store.root().join("blobs")).is_empty());
}

#[test]
fn damaged_files_are_put_aside_and_fetched_again() {
    let (_dir, store) = store();
    let entry = publish(&store, "m", &[("x", b"0123456789"), ("y", b"abcdef")]);
    let path = |file| store.model("m").unwrap().paths()[file].clone();
    // The same size: found by reading.
    fs::write(path("x"), b"0123456780").unwrap();
    let damages = store.verify("m").unwrap();
    assert_eq!((damages.len(), damages[0].file.as_str()), (1, "x"));
    let error = store.model("m").unwrap_err().to_string();
    assert!(
        error.contains(r#"file "x": is missing; fetch the model again"#),
        "{error}"
    );
    let pull = store.pull("m").unwrap();
    assert_eq!(pull.present(&entry.files["y"]).unwrap(), 6);
    assert_eq!(pull.present(&entry.files["x"]).unwrap(), 0);
    pull.put(Algorithm::Sha256, b"0123456789").unwrap();
    pull.publish(&entry).unwrap();
    assert_eq!(fs::read(path("x")).unwrap(), b"0123456789");
    // Another size: found when the model is opened, and by the pull.
    fs::write(path("y"), b"abc").unwrap();
    let error = store.model("m").unwrap_err().to_string();
    assert!(
        error.contains(r#"file "y": expected 6 bytes, found 3"#),
        "{error}"
    );
    let pull = store.pull("m").unwrap();
    assert_eq!(pull.present(&entry.files["y"]).unwrap(), 0);
    pull.put(Algorithm::Sha256, b"abcdef").unwrap();
    drop(pull);
    assert_eq!(fs::read(path("y")).unwrap(), b"abcdef");
    assert_eq!(
        store.gc(Interrupted::Drop).unwrap().n_blobs,
        2,
        "those put aside"
    );
}

#[test]
fn a_file_that_was_written_to_is_hashed_again_before_it_counts() {
    let (_dir, store) = store();
    let entry = publish(&store, "m", &[("x", b"0123456789"), ("y", b"abcdef")]);
    let path = |file| store.model("m").unwrap().paths()[file].clone();
    let date = |path: &Path| fs::metadata(path).unwrap().modified().unwrap();
    let (x, y) = (path("x"), path("y"));
    let sealed = date(&x);
    // The right bytes once more: only the date has changed, and is set back.
    fs::write(&x, b"0123456789").unwrap();
    assert_ne!(date(&x), sealed);
    let pull = store.pull("m").unwrap();
    assert_eq!(pull.present(&entry.files["x"]).unwrap(), 10);
    assert_eq!(date(&x), sealed);
    drop(pull);
    fs::write(&x, b"0123456789").unwrap();
    assert_eq!((path("x"), date(&x)), (x.clone(), sealed));
    // Wrong bytes of the right number: found by the pull, and when the model is opened.
    fs::write(&y, b"abcdeg").unwrap();
    let pull = store.pull("m").unwrap();
    assert_eq!(pull.present(&entry.files["x"]).unwrap(), 10);
    assert_eq!(pull.present(&entry.files["y"]).unwrap(), 0);
    pull.put(Algorithm::Sha256, b"abcdef").unwrap();
    pull.publish(&entry).unwrap();
    assert_eq!(fs::read(path("y")).unwrap(), b"abcdef");
    fs::write(&y, b"abcdeg").unwrap();
    let error = store.model("m").unwrap_err().to_string();
    assert!(error.contains("expected sha256 bef57ec7"), "{error}");
    assert!(!y.exists(), "nobody takes it for right any more");
}

#[cfg(target_os = "linux")]
#[test]
fn a_pull_of_many_files_has_few_open() {
    let (_dir, store) = store();
    let pull = store.pull("m").unwrap();
    let content = |i: u32| bytes(i as u8, 1000 + i as usize);
    let blobs: Vec<_> = (0..300)
        .map(|i| (Blob::of(Algorithm::Blake3, &content(i)), content(i)))
        .collect();
    for (blob, content) in &blobs {
        pull.write_at(blob, 0, &content[..500]).unwrap();
    }
    let root = store.root().to_owned();
    let open = fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
        let link = entry.as_ref().map(|entry| fs::read_link(entry.path()));
        link.is_ok_and(|link| link.is_ok_and(|link| link.starts_with(&root)))
    });
    let n_open = open.count();
    assert!(n_open < 60, "{n_open} files open");
    for (blob, content) in &blobs {
        assert_eq!(pull.present(blob).unwrap(), 500);
        pull.write_at(blob, 500, &content[500..]).unwrap();
        pull.commit(blob).unwrap();
    }
}

#[test]
fn a_damaged_index_harms_no_other_model_and_can_be_repaired_or_removed() {
    let (_dir, store) = store();
    publish(&store, "a", &[("x", b"1")]);
    for damage in ["current", "revision", "gone"] {
        publish(&store, "b", &[("x", b"2")]);
        let folder = store.root().join("models/b");
        store.gc(Interrupted::Drop).unwrap();
        let names: Vec<_> = files_under(&folder)
            .into_iter()
            .map(|(path, _)| path)
            .collect();
        let revision = names
            .iter()
            .find(|path| path.extension().is_some())
            .unwrap();
        match damage {
            "current" => fs::write(folder.join("current"), "nonsense").unwrap(),
            "revision" => fs::write(revision, "{").unwrap(),
            _ => fs::remove_file(revision).unwrap(),
        }
        let error = store.model("b").unwrap_err();
        assert!(matches!(error, StoreError::DamagedIndex { .. }), "{error}");
        store.gc(Interrupted::Drop).unwrap();
        assert_eq!(store.list().unwrap()[0].damage, None);
        assert!(store.model("a").is_ok());
        if damage == "revision" {
            store.remove("b").unwrap();
            assert!(matches!(
                store.model("b"),
                Err(StoreError::NoSuchModel { .. })
            ));
        } else {
            publish(&store, "b", &[("x", b"2")]);
            assert!(store.model("b").is_ok());
        }
        assert_eq!(store.verify("a").unwrap(), []);
    }
}

#[test]
fn a_journal_that_lies_or_is_cut_short_is_not_believed() {
    let (_dir, store) = store();
    let content = bytes(6, 100_000);
    let blob = Blob::of(Algorithm::Sha256, &content);
    let pull = store.pull("m").unwrap();
    pull.write_at(&blob, 0, &content[..50_000]).unwrap();
    drop(pull);
    let files = files_under(&store.root().join("partial/m"));
    let journal = files
        .iter()
        .map(|(path, _)| path)
        .find(|path| path.extension().is_some());
    let journal = journal.unwrap();
    let mut records = fs::read(journal).unwrap();
    assert_eq!(records.len(), 16);
    // Bytes past the end of the file, and past the end of any; then half a record.
    records.extend(
        [60_000u64, 10_000, u64::MAX, 2, 1]
            .iter()
            .flat_map(|n| n.to_le_bytes()),
    );
    fs::write(journal, &records).unwrap();
    let pull = store.pull("m").unwrap();
    assert_eq!(pull.present(&blob).unwrap(), 50_000);
    pull.write_at(&blob, 90_000, &content[90_000..]).unwrap();
    drop(pull);
    let pull = store.pull("m").unwrap();
    assert_eq!(pull.extents(&blob).unwrap(), [0..50_000, 90_000..100_000]);
    pull.write_at(&blob, 50_000, &content[50_000..90_000])
        .unwrap();
    pull.commit(&blob).unwrap();
}

#[test]
fn names_that_some_system_confuses_are_refused() {
    let (_dir, store) = store();
    publish(&store, "Llama", &[("x", b"1")]);
    let error = store.pull("llama").unwrap_err();
    assert!(
        matches!(&error, StoreError::NameTaken { existing, .. } if existing == "Llama"),
        "{error}"
    );
    assert!(matches!(
        store.model("LLAMA"),
        Err(StoreError::NoSuchModel { .. })
    ));
    for name in ["../x", "/abs", "nul", "a/b", "", "."] {
        for error in [
            store.pull(name).unwrap_err(),
            store.model(name).unwrap_err(),
            store.remove(name).unwrap_err(),
        ] {
            assert!(matches!(error, StoreError::Name { .. }), "{error}");
        }
    }
    let pull = store.pull("m").unwrap();
    let blob = pull.put(Algorithm::Sha256, b"1").unwrap();
    let mut entry = Entry::new("test");
    entry.files.insert("../../x".into(), blob);
    assert!(matches!(pull.publish(&entry), Err(StoreError::Name { .. })));
}

#[test]
fn a_model_is_fetched_by_one_at_a_time() {
    let (_dir, store) = store();
    let pull = store.pull("m").unwrap();
    assert!(matches!(store.try_pull("m"), Err(StoreError::Busy { .. })));
    assert!(matches!(store.try_pull("M"), Err(StoreError::Busy { .. })));
    let other = store.try_pull("n").unwrap();
    drop(other);
    let waiting = {
        let store = store.clone();
        std::thread::spawn(move || {
            store
                .pull("m")
                .unwrap()
                .present(&Blob::of(Algorithm::Sha256, b"1"))
        })
    };
    let blob = pull.put(Algorithm::Sha256, b"1").unwrap();
    let mut entry = Entry::new("test");
    entry.files.insert("x".into(), blob);
    pull.publish(&entry).unwrap();
    assert_eq!(
        waiting.join().unwrap().unwrap(),
        1,
        "who waited finds it there"
    );
}

#[test]
fn groups_are_found_in_shards_that_differ_and_copied() {
    let (_dir, store) = store();
    let (a, b, layer) = (bytes(1, 5000), bytes(2, 7000), bytes(3, 3 << 20));
    // The layer is in two shards of the old model and in the middle of one of the new.
    let (first, second) = layer.split_at(1_500_000);
    let old = [[&a[..], first].concat(), [second, &b].concat()];
    let new = [&b[..], &layer, &a].concat();
    let pull = store.pull("old").unwrap();
    let shards = [0, 1].map(|i| pull.put(Algorithm::Blake3, &old[i]).unwrap());
    let mut entry = Entry::new("test");
    entry.files = [("0".to_owned(), shards[0]), ("1".to_owned(), shards[1])].into();
    let digest = digest_of(Algorithm::Sha256, &layer);
    let piece = |blob, offset, len: usize| Piece {
        blob,
        offset,
        len: len as u64,
    };
    let pieces = vec![
        piece(shards[0], 5000, first.len()),
        piece(shards[1], 0, second.len()),
    ];
    entry.groups.push(Group { digest, pieces });
    pull.publish(&entry).unwrap();

    let groups = store.groups().unwrap();
    assert_eq!(groups.find(&digest_of(Algorithm::Sha256, b"other")), None);
    let blob = Blob::of(Algorithm::Sha256, &new);
    let pull = store.pull("new").unwrap();
    let mut at = b.len() as u64;
    for piece in groups.find(&digest).unwrap() {
        assert!(pull.copy_from(&blob, at, piece).unwrap());
        at += piece.len;
    }
    let arrived = pull.extents(&blob).unwrap();
    assert_eq!(arrived, Vec::from_iter(once(7000..7000 + (3 << 20))));
    pull.write_at(&blob, 0, &b).unwrap();
    pull.write_at(&blob, at, &a).unwrap();
    pull.commit(&blob).unwrap();
    // A piece that is gone is no error.
    let gone = piece(Blob::of(Algorithm::Sha256, b"gone"), 0, 4);
    assert!(!pull.copy_from(&blob, 0, &gone).unwrap());
}
