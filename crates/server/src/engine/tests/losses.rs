//! Devices that are lost, and come back or don't.

use super::*;

#[test]
fn answers_of_a_lost_engine_go_on_at_another() {
    for (folder, _) in MODELS {
        let tested = engines(2, folder, options(1 << 30, 3));
        let alone = engine(folder, options(0, 1));
        let prompts: Vec<Vec<u32>> = (0..9).map(|i| prompt(30 + i as usize, i)).collect();
        let expected = {
            let mut all: Vec<Answered> = prompts.iter().map(|_| Answered::default()).collect();
            read(&mut alone.ask(&plain(&prompts), 100), &mut all, |_| false);
            all
        };
        // Within an answer of it.
        tested.engines.lose_after(1, 6);
        let mut outputs = tested.ask(&plain(&prompts), 100);
        let mut found: Vec<Answered> = prompts.iter().map(|_| Answered::default()).collect();
        read(&mut outputs, &mut found, |_| false);
        assert!(found.iter().any(|answer| answer.engine == 1), "{found:?}");
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert_eq!(found.ids.len(), 100, "{folder}, {i}");
            assert_eq!(found.ids, expected.ids, "{folder}, {i}");
        }
        assert!(tested.engines.is_well());
        let log = tested.log.lock().unwrap().join("\n");
        for said in [
            r#""event":"engine","action":"lost","engine":1,"device":"device 1""#,
            r#""n_left":1"#,
        ] {
            assert!(log.contains(said), "{said}: {log}");
        }
        let text = tested.metrics.text();
        for figure in [
            r#"sterna_engine_up{engine="0",device="device 0"} 1"#,
            r#"sterna_engine_up{engine="1",device="device 1"} 0"#,
            "sterna_lost_engines_total 1",
            r#"sterna_requests_running{engine="1"} 0"#,
        ] {
            assert!(text.contains(figure), "{figure}: {text}");
        }
        // The other one takes all, also what the lost one held.
        for (i, prompt) in prompts.iter().enumerate().take(2) {
            assert_eq!(tested.answer(prompt).engine, 0, "{folder}, {i}");
        }
    }
}

#[test]
fn without_an_engine_left_what_waits_fails() {
    let (folder, _) = MODELS[0];
    let tested = engines(2, folder, options(1 << 30, 1));
    tested.engines.lose(0);
    tested.engines.lose(1);
    let prompts: Vec<Vec<u32>> = (0..6).map(|i| prompt(9, i)).collect();
    let mut outputs = tested.ask(&plain(&prompts), 5);
    let mut n_failed = 0;
    while let Some((_, output)) = outputs.blocking_recv() {
        if let Output::Failed(error) = output {
            assert_eq!(error.code(), sterna::ErrorCode::DeviceLost);
            n_failed += 1;
        }
    }
    assert_eq!(n_failed, 6);
    assert!(!tested.engines.is_well());
    let (one, _outputs) = replies(1);
    let work = || Work::Generate(Box::new(tested.request(&prompts[0], 1)));
    let jobs = one.into_iter().map(|reply| job(work(), reply));
    let refused = tested.engines.submit(jobs.collect());
    assert_eq!(refused, Err(Refused::Stopped));
}

#[test]
fn scores_and_vectors_of_a_lost_engine_are_computed_by_another() {
    let (folder, _) = MODELS[0];
    let ask = |tested: &Tested| {
        let (all, mut outputs) = replies(3);
        let works = [
            Work::Generate(Box::new(tested.request(&prompt(9, 1), 1))),
            Work::Score {
                ids: prompt(60, 2),
                n_top: 1,
            },
            Work::Embed {
                texts: vec![prompt(20, 3), prompt(30, 4)],
                pooling: Pooling::Mean,
                normalised: true,
            },
        ];
        let jobs = all.into_iter().zip(works);
        let jobs = jobs.map(|(reply, work)| job(work, reply));
        tested.engines.submit(jobs.collect()).unwrap();
        let (mut scores, mut vectors) = (Vec::new(), Vec::new());
        while let Some((_, output)) = outputs.blocking_recv() {
            match output {
                Output::Scored(all) => scores.extend(all.iter().map(|scored| scored.chosen)),
                Output::Embedded(vector) => vectors.push(vector),
                Output::Failed(error) => panic!("{error:#}"),
                _ => {}
            }
        }
        (scores, vectors)
    };
    let expected = ask(&engine(folder, options(0, 3)));
    assert_eq!((expected.0.len(), expected.1.len()), (59, 2));
    for lost in [0, 1] {
        let tested = engines(2, folder, options(1 << 30, 3));
        tested.engines.lose(lost);
        assert_eq!(ask(&tested), expected, "{lost}");
    }
}

/// What the log says of engines, in order.
fn actions(tested: &Tested) -> Vec<String> {
    let log = tested.log.lock().unwrap();
    let action = |record: &String| {
        let record: serde_json::Value = serde_json::from_str(record).unwrap();
        let is_own = record["event"] == "engine";
        is_own.then(|| record["action"].as_str().unwrap().to_owned())
    };
    log.iter().filter_map(action).collect()
}

#[test]
fn a_lost_device_is_opened_again_and_its_answers_go_on() {
    for (folder, _) in MODELS {
        for n in [1, 2] {
            let setup = Setup {
                n,
                reopens: Some(2),
                ..Setup::new(folder, options(1 << 30, 3))
            };
            let tested = setup.start();
            let alone = engine(folder, options(0, 1));
            let prompts: Vec<Vec<u32>> = (0..7).map(|i| prompt(30 + i as usize, i)).collect();
            let all_of = |tested: &Tested| {
                let mut outputs = tested.ask(&plain(&prompts), 60);
                let mut all: Vec<Answered> = prompts.iter().map(|_| Answered::default()).collect();
                read(&mut outputs, &mut all, |_| false);
                all.into_iter().map(|answer| answer.ids).collect::<Vec<_>>()
            };
            let expected = all_of(&alone);
            // Within an answer of it.
            tested.engines.lose_after(0, 6);
            assert_eq!(all_of(&tested), expected, "{folder}, {n}");
            tested.wait_for("sterna_reopened_engines_total", |n| n == 1);
            assert!(tested.engines.is_well());
            let said = ["lost", "reopen_failed", "reopen_failed", "reopened"];
            assert_eq!(actions(&tested), said, "{folder}, {n}");
            let up = r#"sterna_engine_up{engine="0",device="device 0"}"#;
            assert_eq!(tested.figure(up), 1);
            // It takes its part again.
            assert_eq!(all_of(&tested), expected, "{folder}, {n}");
            tested.engines.lose(0);
            assert_eq!(all_of(&tested), expected, "{folder}, {n}");
        }
    }
}

#[test]
fn a_device_whose_weights_were_replaced_is_not_opened_with_those_of_the_files() {
    let (folder, _) = MODELS[0];
    let setup = Setup {
        reopens: Some(0),
        ..Setup::new(folder, options(1 << 30, 1))
    };
    let tested = setup.start();
    assert_eq!(tested.answer(&prompt(9, 1)).engine, 0);
    tested.library.swap(0, "another revision", &[]).unwrap();
    assert_eq!(tested.answer(&prompt(9, 1)).n_cached, 0);
    tested.engines.lose(0);
    let mut outputs = tested.ask(&plain(&[prompt(9, 2)]), 5);
    let mut failures = Vec::new();
    while let Some((_, output)) = outputs.blocking_recv() {
        if let Output::Failed(error) = output {
            failures.push(error.to_string());
        }
    }
    assert!(
        matches!(&failures[..], [said] if said.contains("weights were replaced")),
        "{failures:?}"
    );
    assert_eq!(actions(&tested), ["lost", "given_up"]);
    assert!(!tested.engines.is_well());
}

#[test]
fn adapters_come_back_with_the_device() {
    const MODEL: &str = "reference-logits/llama";
    let setup = Setup {
        reopens: Some(0),
        ..Setup::new(MODEL, options(1 << 30, 6))
    };
    let tested = setup.start();
    let folders = ["adapters/llama/all", "adapters/llama/stabilised"];
    let load = |tested: &Tested, folder: &str| {
        let key = AdapterKey::new(folder);
        let loaded = tested.adapters.load_as(&key, adapter(folder), 1.0);
        loaded.unwrap();
        Some(key)
    };
    let keys = folders.map(|folder| load(&tested, folder));
    let prompt = prompt(40, 3);
    let asked: Vec<_> = (keys.iter().cloned().chain([None]))
        .map(|key| (prompt.clone(), key))
        .collect();
    let before = tested.answers_by(&asked);
    tested.engines.lose(0);
    let after = tested.answers_by(&asked);
    assert_eq!(actions(&tested), ["lost", "reopened"]);
    for (i, (before, after)) in before.iter().zip(&after).enumerate() {
        assert_eq!(after.ids, before.ids, "{i}");
    }
    assert_ne!(before[0].ids, before[1].ids);
    assert_ne!(before[1].ids, before[2].ids);
    // So do those that are loaded afterwards.
    let other = load(&tested, folders[0]);
    let answers = tested.answers_by(&[(prompt, other)]);
    assert_eq!(answers[0].ids, before[0].ids);
}

#[test]
fn what_one_device_has_lost_another_tier_still_has() {
    let (folder, _) = MODELS[0];
    let setup = Setup {
        reopens: Some(0),
        ..Setup::new(
            folder,
            EngineOptions {
                host_bytes: 1 << 30,
                ..options(0, 2)
            },
        )
    };
    let tested = setup.start();
    let prompt = prompt(100, 3);
    let first = tested.answer(&prompt);
    tested.wait_for(r#"sterna_cache_tier_sequences{tier="host"}"#, |n| n == 1);
    tested.engines.lose(0);
    // Begun before it is lost, and gone on with after that.
    let again = tested.answer(&prompt);
    assert_eq!((again.ids, again.n_cached), (first.ids.clone(), 99));
    assert_eq!(actions(&tested), ["lost", "reopened"]);
    assert_eq!(tested.answer(&prompt).ids, first.ids);
}

#[test]
fn who_comes_while_a_device_is_opened_waits_for_it() {
    let (folder, _) = MODELS[0];
    // More often than it may fail.
    let setup = Setup {
        reopens: Some(1000),
        ..Setup::new(folder, options(0, 1))
    };
    let tested = setup.start();
    tested.engines.lose(0);
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| prompt(9, i)).collect();
    let mut first = tested.ask(&plain(&prompts[..1]), 5);
    tested.wait_for("sterna_lost_engines_total", |n| n == 1);
    if tested.engines.has_future() {
        assert!(!tested.engines.is_well());
    }
    let mut failed = 0;
    while let Some((_, output)) = first.blocking_recv() {
        if let Output::Failed(error) = output {
            assert_eq!(error.code(), ErrorCode::DeviceLost);
            failed += 1;
        }
    }
    assert_eq!(failed, 1);
    // By then it is given up.
    assert!(!tested.engines.has_future());
    let all = actions(&tested);
    assert_eq!(
        all.iter()
            .filter(|action| *action == "reopen_failed")
            .count(),
        6
    );
    assert_eq!(all.last().unwrap(), "given_up");
    let (one, _outputs) = replies(1);
    let work = |reply| {
        job(
            Work::Generate(Box::new(tested.request(&prompts[1], 1))),
            reply,
        )
    };
    let refused = tested.engines.submit(one.into_iter().map(work).collect());
    assert_eq!(refused, Err(Refused::Stopped));
}

#[test]
fn a_job_that_loses_every_device_fails_and_the_others_are_answered() {
    let (folder, _) = MODELS[0];
    let setup = Setup {
        reopens: Some(0),
        ..Setup::new(folder, options(0, 1))
    };
    let tested = setup.start();
    let expected = tested.answer(&prompt(9, 7));
    let mut outputs = tested.ask(&plain(&[prompt(9, 1)]), 300);
    for n in 1..=3 {
        tested.engines.lose(0);
        tested.wait_for("sterna_lost_engines_total", |lost| lost == n);
    }
    let mut last = None;
    while let Some((_, output)) = outputs.blocking_recv() {
        last = Some(output);
    }
    assert!(
        matches!(&last, Some(Output::Failed(error)) if error.code() == ErrorCode::DeviceLost),
        "{last:?}"
    );
    assert_eq!(tested.answer(&prompt(9, 7)), expected);
    tested.wait_for("sterna_reopened_engines_total", |n| n == 3);
}
