//! Fetching into the store.

use std::fs;

use sterna_delivery::{
    fetch::{self, Cancel, Event, Limits},
    hash::{Algorithm, Expected, digest_of},
    source::FolderSource,
    store::{Blob, Entry, Store},
};

/// Fetches `files` of `folder` into the model `name`; gives the number of files that were fetched.
fn pull(store: &Store, folder: &std::path::Path, name: &str, files: &[&str]) -> usize {
    let pull = store.pull(name).unwrap();
    let source = FolderSource::new(folder);
    let mut entry = Entry::new("folder");
    let mut blobs = Vec::new();
    for file in files {
        let content = fs::read(folder.join(file)).unwrap();
        let digest = digest_of(Algorithm::Sha256, &content);
        let size = content.len() as u64;
        blobs.push(fetch::Blob::new(file, size, Expected::Digest(digest)).unwrap());
        entry
            .files
            .insert((*file).to_owned(), Blob { digest, size });
    }
    let mut ignore = |_: Event<'_>| {};
    let (limits, cancel) = (Limits::default(), Cancel::new());
    let report = fetch::fetch(blobs, &[&source], &pull, limits, &cancel, &mut ignore).unwrap();
    pull.publish(&entry).unwrap();
    report.verified.iter().flatten().count()
}

#[test]
fn an_update_moves_only_what_changed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("store")).unwrap();
    let folder = dir.path().join("package");
    fs::create_dir(&folder).unwrap();
    let files = ["manifest.json", "shard_00000.bin", "shard_00001.bin"];
    let shard = |seed: u32| {
        (0..2_000_000u32)
            .map(|i| (i ^ (i >> 7) ^ seed) as u8)
            .collect::<Vec<_>>()
    };
    fs::write(folder.join(files[0]), "{}").unwrap();
    fs::write(folder.join(files[1]), shard(1)).unwrap();
    fs::write(folder.join(files[2]), shard(2)).unwrap();
    assert_eq!(pull(&store, &folder, "m", &files), 3);
    assert_eq!(pull(&store, &folder, "same", &files), 0);
    fs::write(folder.join(files[0]), "{ }").unwrap();
    fs::write(folder.join(files[2]), shard(3)).unwrap();
    assert_eq!(pull(&store, &folder, "m", &files), 2);
    assert_eq!(store.verify("m").unwrap(), []);
    let model = store.model("m").unwrap();
    assert!(fs::read(&model.paths()["shard_00001.bin"]).unwrap() == shard(3));
}
