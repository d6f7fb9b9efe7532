//! What engines have no room for comes back from memory of the host and from disk, and changes no answer.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// A folder of a test, removed with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Folder {
        // Engines that have ended may still write into one: it is none of those that follow.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("sterna-tiers-{}-{name}-{n}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = fs::remove_dir_all(&path);
        Folder(path)
    }

    fn with(&self, max_bytes: u64) -> CacheFolder {
        CacheFolder {
            path: self.0.clone(),
            max_bytes,
        }
    }

    /// Its files, by name.
    fn files(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(&self.0).unwrap();
        let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    }

    fn n_bytes(&self) -> u64 {
        let files = self.files();
        files
            .iter()
            .map(|path| path.metadata().unwrap().len())
            .sum()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// An engine that keeps what it has no room for.
fn engines_with(
    n: usize,
    folder: &str,
    own: Option<&str>,
    options: EngineOptions,
    cache: Option<&CacheFolder>,
) -> Tested {
    let setup = Setup {
        n,
        own,
        cache,
        ..Setup::new(folder, options)
    };
    setup.start()
}

/// As much as anybody wants.
const MUCH: u64 = 1 << 30;

/// Engines without room for anything that isn't computed now.
fn small(host_bytes: u64) -> EngineOptions {
    EngineOptions {
        host_bytes,
        ..options(0, 2)
    }
}

impl Tested {
    fn n_on_disk(&self) -> u64 {
        self.figure(r#"sterna_cache_tier_sequences{tier="disk"}"#)
    }
}

#[test]
fn each_tier_gives_the_answers_of_no_cache() {
    for (folder, has_states) in MODELS {
        let disk = Folder::new("each");
        let kinds = [
            ("host", small(MUCH), None),
            ("disk", small(0), Some(disk.with(MUCH))),
        ];
        for (tier, options, cache) in kinds {
            let name = format!("{folder}, {tier}");
            let cached = engines_with(1, folder, None, options, cache.as_ref());
            let fresh = engine(folder, super::options(0, 1));
            let beginning = prompt(90, 1);
            let in_tier = format!("sterna_cache_tier_sequences{{tier=\"{tier}\"}}");
            let mut ids = beginning.clone();
            for turn in 0..3 {
                let answer = cached.answer(&ids);
                assert_eq!(answer.ids, fresh.answer(&ids).ids, "{name}, {turn}");
                // All that was held: everything but the last token, which nothing followed.
                let expected = if turn == 0 { 0 } else { ids.len() - 7 };
                assert_eq!(answer.n_cached, expected, "{name}, {turn}");
                ids.extend(&answer.ids);
                ids.extend(prompt(6, 9 + turn));
                // Nothing is left with the engine, and only once it is there, it is found.
                cached.wait_for("sterna_cache_sequences{engine=\"0\"}", |n| n == 0);
                cached.wait_for(&in_tier, |n| match has_states {
                    // What is a part of another is gone; states can't be cut, so they stay, and what the first prompt
                    // begins with.
                    false => n == 1,
                    true => n == u64::from(turn) + 2,
                });
            }
            let hits = format!("sterna_cache_hits_total{{tier=\"{tier}\"}}");
            assert_eq!(cached.figure(&hits), 2, "{name}");
            // Another conversation that begins the same.
            let other = [&beginning[..80], &prompt(20, 4)].concat();
            let answer = cached.answer(&other);
            assert_eq!(answer.ids, fresh.answer(&other).ids, "{name}");
            // There is a checkpoint.
            assert_eq!(answer.n_cached, 80, "{name}");
            // An answer that is written otherwise as a part of the next prompt.
            let rewritten = [&beginning[..88], &prompt(20, 5)].concat();
            let answer = cached.answer(&rewritten);
            assert_eq!(answer.ids, fresh.answer(&rewritten).ids, "{name}");
            let expected = if has_states { 80 } else { 88 };
            assert_eq!(answer.n_cached, expected, "{name}");
        }
    }
}

#[test]
fn what_was_computed_is_there_after_a_restart() {
    for (folder, has_states) in MODELS {
        let disk = Folder::new("restart");
        let cache = disk.with(MUCH);
        let n_files = if has_states { 2 } else { 1 };
        // With and without memory of the host, and with room for all until the end.
        for options in [small(0), small(MUCH), options(MUCH, 2)] {
            let name = format!("{folder}, {options:?}");
            let beginning = prompt(96, 3);
            let first = {
                let tested = engines_with(1, folder, None, options, Some(&cache));
                let first = tested.answer(&beginning);
                assert!(tested.engines.finish(PATIENCE), "{name}");
                let (one, _outputs) = replies(1);
                let refused = tested.engines.submit(vec![job(
                    Work::Score {
                        ids: prompt(3, 1),
                        n_top: 0,
                    },
                    one.into_iter().next().unwrap(),
                )]);
                assert_eq!(refused, Err(Refused::Stopped));
                first
            };
            assert_eq!(disk.files().len(), n_files, "{name}");
            let next = [&beginning[..], &first.ids, &prompt(9, 5)].concat();
            let tested = engines_with(1, folder, None, options, Some(&cache));
            assert_eq!(tested.n_on_disk(), n_files as u64);
            let again = tested.answer(&next);
            assert_eq!(again.n_cached, 96 + first.ids.len() - 1, "{name}");
            let fresh = engine(folder, super::options(0, 1));
            assert_eq!(again.ids, fresh.answer(&next).ids, "{name}");
            assert!(tested.engines.finish(PATIENCE));
            for file in disk.files() {
                fs::remove_file(file).unwrap();
            }
        }
    }
}

#[test]
fn nothing_is_shared_by_what_computes_otherwise() {
    const MODEL: &str = "reference-logits/llama";
    const ADAPTERS: [&str; 2] = ["adapters/llama/all", "adapters/llama/stabilised"];
    let disk = Folder::new("otherwise");
    let cache = disk.with(MUCH);
    let beginning = prompt(90, 3);
    // By the model, by its own adapter, and by one of the request, with two scales.
    let ask = |own: Option<&str>, by: Option<(&str, f32)>| {
        let tested = engines_with(1, MODEL, own, small(0), Some(&cache));
        let key = by.map(|(folder, scale)| {
            let key = AdapterKey::new("any");
            let files = adapter(folder);
            tested.adapters.load_as(&key, files, scale).unwrap();
            key
        });
        let answers = tested.answers_by(&[(beginning.clone(), key)]);
        assert!(tested.engines.finish(PATIENCE));
        answers.into_iter().next().unwrap()
    };
    let kinds = [
        (None, None),
        (Some(ADAPTERS[0]), None),
        (None, Some((ADAPTERS[0], 1.0))),
        (None, Some((ADAPTERS[0], 0.5))),
        (None, Some((ADAPTERS[1], 1.0))),
    ];
    let first = kinds.map(|(own, by)| ask(own, by));
    for (i, answer) in first.iter().enumerate() {
        assert_eq!(answer.n_cached, 0, "{i}");
    }
    assert_ne!(first[0].ids, first[2].ids);
    // What computes the same is known again, although the adapter was loaded again.
    for (i, ((own, by), first)) in kinds.into_iter().zip(&first).enumerate() {
        let again = ask(own, by);
        assert_eq!(again.n_cached, 89, "{i}");
        assert_eq!(again.ids, first.ids, "{i}");
    }
}

#[test]
fn what_other_weights_have_computed_is_not_used() {
    let (folder, _) = MODELS[0];
    let files =
        LocalModel::open(folder, Located::at(&testdata(folder)).unwrap(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let prompt = prompt(100, 3);
    for tier in ["engine", "host", "disk"] {
        let disk = Folder::new("generations");
        let (options, cache) = match tier {
            "engine" => (options(MUCH, 1), None),
            "host" => (small(MUCH), None),
            _ => (small(0), Some(disk.with(MUCH))),
        };
        let tested = engines_with(1, folder, None, options, cache.as_ref());
        let is_there = |n: u64| match tier {
            "engine" => tested.wait_for("sterna_cache_sequences{engine=\"0\"}", |own| own >= n),
            _ => {
                let name = format!("sterna_cache_tier_sequences{{tier=\"{tier}\"}}");
                tested.wait_for(&name, |own| own >= n);
            }
        };
        let first = tested.answer(&prompt);
        is_there(1);
        assert_eq!(tested.answer(&prompt).n_cached, 99, "{tier}");
        // The same weights again: that they are the same nobody knows.
        let groups = [sterna::swap::Group::Layer(1)];
        let swapped = files.swap_into(&tested.models[0], plan.clone(), &groups);
        assert_eq!(swapped.unwrap().0, 1);
        let answer = tested.answer(&prompt);
        assert_eq!((answer.n_cached, &answer.ids), (0, &first.ids), "{tier}");
        let again = tested.answer(&prompt);
        match tier {
            // Another process doesn't know what this generation is.
            "disk" => assert_eq!((again.n_cached, tested.n_on_disk()), (0, 1)),
            "host" => {
                is_there(2);
                assert_eq!(tested.answer(&prompt).n_cached, 99);
            }
            _ => assert_eq!(again.n_cached, 99),
        }
        assert_eq!(again.ids, first.ids, "{tier}");
    }
}

#[test]
fn damaged_files_are_dropped_and_nothing_stops() {
    let (folder, _) = MODELS[0];
    let disk = Folder::new("damaged");
    let cache = disk.with(MUCH);
    let fresh = engine(folder, options(0, 1));
    let beginning = prompt(90, 3);
    let expected = fresh.answer(&beginning);
    type Damage = fn(&mut Vec<u8>);
    let damages: [(&str, Damage); 5] = [
        ("changed within", |bytes| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        }),
        ("changed at the end", |bytes| {
            *bytes.last_mut().unwrap() ^= 1
        }),
        ("cut off", |bytes| bytes.truncate(bytes.len() - 100)),
        ("of other tokens", |bytes| bytes[100] ^= 1),
        ("of another form", |bytes| bytes[3] ^= 1),
    ];
    for (name, damage) in damages {
        let write = engines_with(1, folder, None, small(0), Some(&cache));
        assert_eq!(write.answer(&beginning).ids, expected.ids);
        assert!(write.engines.finish(PATIENCE));
        let files = disk.files();
        assert_eq!(files.len(), 1, "{name}");
        let mut bytes = fs::read(&files[0]).unwrap();
        damage(&mut bytes);
        fs::write(&files[0], &bytes).unwrap();
        let tested = engines_with(1, folder, None, options(MUCH, 1), Some(&cache));
        let answer = tested.answer(&beginning);
        assert_eq!(
            (answer.ids, answer.n_cached),
            (expected.ids.clone(), 0),
            "{name}"
        );
        let log = tested.log.lock().unwrap().join("\n");
        let said = r#""event":"cache","action":"drop","file":""#;
        assert!(log.contains(said), "{name}: {log}");
        let drops = r#"sterna_cache_drops_total{reason="refused"}"#;
        assert_eq!(tested.figure(drops), 1, "{name}");
        assert!(!files[0].exists(), "{name}");
        // A file of somebody else is left alone.
        fs::write(disk.0.join("notes.txt"), "mine").unwrap();
        assert!(tested.engines.finish(PATIENCE));
        fs::remove_file(disk.0.join("notes.txt")).unwrap();
        fs::remove_file(&disk.files()[0]).unwrap();
    }
}

#[test]
fn what_another_process_removes_or_adds_is_no_surprise() {
    let (folder, _) = MODELS[0];
    let disk = Folder::new("shared");
    let cache = disk.with(MUCH);
    let fresh = engine(folder, options(0, 1));
    let [a, b, c] = [2, 5, 8].map(|salt| prompt(90, salt));
    let one = engines_with(1, folder, None, small(0), Some(&cache));
    let other = engines_with(1, folder, None, small(0), Some(&cache));
    assert_eq!(one.answer(&a).n_cached, 0);
    one.wait_for(r#"sterna_cache_tier_sequences{tier="disk"}"#, |n| n == 1);
    // The other one looks when it writes.
    assert_eq!(other.answer(&b).n_cached, 0);
    other.wait_for(r#"sterna_cache_tier_sequences{tier="disk"}"#, |n| n == 2);
    let answer = other.answer(&a);
    assert_eq!((answer.n_cached, answer.ids), (89, fresh.answer(&a).ids));
    for file in disk.files() {
        fs::remove_file(file).unwrap();
    }
    for prompt in [&a, &b, &c] {
        let answer = other.answer(prompt);
        assert_eq!(answer.n_cached, 0);
        assert_eq!(answer.ids, fresh.answer(prompt).ids);
    }
    // That is no failure.
    for tested in [&one, &other] {
        let log = tested.log.lock().unwrap().join("\n");
        assert!(!log.contains(r#""event":"cache""#), "{log}");
    }
}

#[test]
fn tiers_are_bounded_and_lose_what_was_used_least_recently() {
    let (folder, _) = MODELS[0];
    let prompts: Vec<Vec<u32>> = (1..5).map(|salt| prompt(100, salt * 5)).collect();
    // What a conversation takes.
    let measure = Folder::new("measure");
    let one = engines_with(1, folder, None, small(0), Some(&measure.with(MUCH)));
    one.answer(&prompts[0]);
    assert!(one.engines.finish(PATIENCE));
    let n_bytes = measure.n_bytes();
    let room = 2 * n_bytes + n_bytes / 2;
    for tier in ["host", "disk"] {
        let disk = Folder::new("bounded");
        let tested = match tier {
            "host" => engine(folder, small(room)),
            _ => engines_with(1, folder, None, small(0), Some(&disk.with(room))),
        };
        let bytes = format!("sterna_cache_tier_bytes{{tier=\"{tier}\"}}");
        let sequences = format!("sterna_cache_tier_sequences{{tier=\"{tier}\"}}");
        let ask = |i: usize, n: u64| {
            let names = || (tier == "disk").then(|| disk.files());
            let before = names();
            let answer = tested.answer(&prompts[i]);
            // Files are written by a thread of their own: until it begins, as many are there as before.
            while answer.n_cached == 0 && before.is_some() && names() == before {
                thread::yield_now();
            }
            tested.wait_for("sterna_cache_sequences{engine=\"0\"}", |n| n == 0);
            tested.wait_for(&sequences, |own| own == n);
            assert!(tested.figure(&bytes) <= room, "{tier}");
            if tier == "disk" {
                assert!(disk.n_bytes() <= room);
            }
            answer.n_cached
        };
        assert_eq!([ask(0, 1), ask(1, 2)], [0, 0], "{tier}");
        // The first is used again, so the third takes the place of the second.
        assert_eq!(ask(0, 2), 99, "{tier}");
        assert_eq!(ask(2, 2), 0, "{tier}");
        assert_eq!(ask(0, 2), 99, "{tier}");
        assert_eq!(ask(1, 2), 0, "{tier}");
    }
}

#[test]
fn what_leaves_the_memory_of_the_host_goes_to_disk() {
    let (folder, _) = MODELS[0];
    let disk = Folder::new("through");
    let cache = disk.with(MUCH);
    let prompts: Vec<Vec<u32>> = (1..4).map(|salt| prompt(100, salt * 5)).collect();
    let fresh = engine(folder, options(0, 1));
    // The host has room for one.
    let files =
        LocalModel::open(folder, Located::at(&testdata(folder)).unwrap(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let one = plan.cache_bytes(128, CacheType::F32) * 3 / 2;
    let tested = engines_with(1, folder, None, small(one), Some(&cache));
    for prompt in &prompts {
        tested.answer(prompt);
    }
    tested.wait_for(r#"sterna_cache_tier_sequences{tier="disk"}"#, |n| n == 2);
    tested.wait_for(r#"sterna_cache_tier_sequences{tier="host"}"#, |n| n == 1);
    for (prompt, tier) in [(&prompts[2], "host"), (&prompts[0], "disk")] {
        let hits = format!("sterna_cache_hits_total{{tier=\"{tier}\"}}");
        let answer = tested.answer(prompt);
        assert_eq!(
            (answer.n_cached, answer.ids),
            (99, fresh.answer(prompt).ids)
        );
        assert_eq!(tested.figure(&hits), 1, "{tier}");
    }
}

#[test]
fn many_at_once_are_answered_as_alone_with_every_tier() {
    for (folder, _) in MODELS {
        let disk = Folder::new("many");
        let beginning = prompt(80, 1);
        let prompts: Vec<Vec<u32>> = (0..12)
            .map(|i| match i % 3 {
                0 => prompt(70 + i as usize, i),
                _ => [&beginning[..], &prompt(2 + i as usize, i)].concat(),
            })
            .collect();
        let alone = engine(folder, options(0, 1));
        let expected = alone.answers(&prompts);
        let room = 200_000;
        let together = engines_with(2, folder, None, small(room), Some(&disk.with(MUCH)));
        for round in 0..4 {
            // Some go away before they are answered.
            drop(together.ask(&plain(&prompts[..round]), 300));
            let found = together.answers(&prompts);
            for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(found.ids, expected.ids, "{folder}, {round}, {i}");
            }
        }
        assert!(together.engines.finish(PATIENCE));
        let log = together.log.lock().unwrap().join("\n");
        assert!(!log.contains(r#""event":"cache""#), "{log}");
    }
}
