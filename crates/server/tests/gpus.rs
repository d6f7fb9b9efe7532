//! Several engines on GPUs. Where there is one adapter, it is opened twice.
#![cfg(feature = "gpu")]

use std::sync::{Arc, Mutex};
use std::thread;

use crate::common::{Running, start_with};
use serde_json::{Value, json};
use sterna::Adapted;
use sterna::native::{
    BUILTIN, ComputeOptions, Device, DeviceKind, DeviceRequest, LoadFrom, LocalModel, Weights,
    builtin, load_on_device,
};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Activations, Model, SessionOptions};
use sterna_kernels::Isa;
use sterna_server::{EngineOptions, Served, Settings};

/// The built-in model on the best GPU.
fn on_gpu(files: &LocalModel) -> Arc<Model<Device>> {
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let request = DeviceRequest {
        kind: DeviceKind::Gpu,
        gpu_index: Some(0),
        ..DeviceRequest::default()
    };
    let compute = ComputeOptions {
        n_threads: 1,
        isa: Isa::detect(),
        activations: Activations::Int8,
        session: SessionOptions::new(512),
    };
    let load_from = LoadFrom {
        weights: Weights::Mapped,
        experts: None,
        n_threads: 1,
        progress: &|_| {},
    };
    let load = |device| files.load_on(plan.clone(), device, &load_from);
    load_on_device(&request, compute, &plan, &|_, _| {}, &mut |_| {}, load).unwrap()
}

/// Asks for an answer of 60 tokens to the question with this number.
fn answer(server: &Running, number: usize) -> Value {
    let body = json!({
        "model": BUILTIN, "prompt": format!("Story number {number}."), "seed": number, "max_tokens": 60,
        "ignore_eos": true,
    });
    server.ok("/v1/completions", &body)
}

#[test]
fn a_lost_gpu_costs_no_answer() {
    if !sterna_testing::gpu::is_there() {
        return;
    }
    let files = LocalModel::open(BUILTIN, builtin(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let models = [on_gpu(&files), on_gpu(&files)];
    let adapted = models.iter().map(|own| Adapted::new(Arc::clone(own)));
    let session = SessionOptions::new(512);
    let adapted = adapted.collect();
    let served = Served::new(BUILTIN, &files, plan, session, &mut Vec::new()).unwrap();
    let served = served.with_weights(adapted);
    let log = Arc::new(Mutex::new(Vec::new()));
    let settings = Settings {
        engine: EngineOptions {
            parallel: 2,
            ..Settings::default().engine
        },
        log: {
            let log = Arc::clone(&log);
            Arc::new(move |record| log.lock().unwrap().push(record.clone()))
        },
        ..Settings::default()
    };
    let server = start_with(vec![served], settings);
    let metrics = || server.get("/metrics", &[]).text().to_owned();
    let all: Vec<Value> = thread::scope(|scope| {
        let answers = (0..6).map(|seed| {
            scope.spawn({
                let server = &server;
                move || answer(server, seed)
            })
        });
        let answers: Vec<_> = answers.collect();
        while !metrics().contains("sterna_requests_running{engine=\"1\"} 2") {
            let are_done = answers.iter().all(|answer| answer.is_finished());
            assert!(!are_done, "all ended before two were seen to run");
            thread::yield_now();
        }
        let gpu = models[1].backend().device().expect("it is on a GPU");
        gpu.device().lose();
        answers
            .into_iter()
            .map(|answer| answer.join().unwrap())
            .collect()
    });
    let text = metrics();
    assert!(text.contains("sterna_lost_engines_total 1"), "{text}");
    assert!(
        text.contains("sterna_engine_up{engine=\"1\",device=\"\"} 0"),
        "{text}"
    );
    assert_eq!(server.get("/health", &[]).status, 200);
    let lost = |record: &serde_json::Map<String, Value>| {
        record["event"] == "engine" && record["engine"] == 1
    };
    assert!(log.lock().unwrap().iter().any(lost));
    // What the tokens are is compared on CPUs: a GPU rounds in other ways with other things in a step.
    for answer in all {
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 60, "{answer}");
    }
    // The other one goes on.
    let begun = |record: &serde_json::Map<String, Value>| record["event"] == "answer";
    assert_eq!(
        log.lock()
            .unwrap()
            .iter()
            .filter(|record| begun(record))
            .count(),
        6
    );
    answer(&server, 6);
    let log = log.lock().unwrap();
    let last = log.iter().rfind(|record| begun(record)).unwrap();
    assert_eq!(last["engines"], json!([0]));
}

#[test]
fn the_one_gpu_that_is_lost_is_opened_again() {
    if !sterna_testing::gpu::is_there() {
        return;
    }
    let files = Arc::new(LocalModel::open(BUILTIN, builtin(), None, None).unwrap());
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let first = on_gpu(&files);
    let session = SessionOptions::new(512);
    let served = Served::new(BUILTIN, &files, plan, session, &mut Vec::new()).unwrap();
    let again = Arc::new(Mutex::new(Vec::new()));
    let served = served
        .with_weights(vec![Adapted::new(Arc::clone(&first))])
        .with_loader({
            let (files, again) = (Arc::clone(&files), Arc::clone(&again));
            move |engines| {
                assert_eq!(engines, [0]);
                let model = on_gpu(&files);
                again.lock().unwrap().push(Arc::clone(&model));
                Ok(vec![Adapted::new(model)])
            }
        });
    let log = Arc::new(Mutex::new(Vec::new()));
    let settings = Settings {
        log: {
            let log = Arc::clone(&log);
            Arc::new(move |record| log.lock().unwrap().push(record.clone()))
        },
        ..Settings::default()
    };
    let server = start_with(vec![served], settings);
    let metrics = || server.get("/metrics", &[]).text().to_owned();
    let before = answer(&server, 1);
    let lose = |model: &Arc<Model<Device>>| {
        let gpu = model.backend().device().expect("it is on a GPU");
        gpu.device().lose();
    };
    // While it is idle, and the next request finds out; then within answers.
    lose(&first);
    let all: Vec<Value> = thread::scope(|scope| {
        let answers = (0..4).map(|seed| {
            let server = &server;
            scope.spawn(move || answer(server, seed))
        });
        let answers: Vec<_> = answers.collect();
        answers
            .into_iter()
            .map(|answer| answer.join().unwrap())
            .collect()
    });
    for answer in all {
        assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 60, "{answer}");
    }
    let text = metrics();
    for figure in [
        "sterna_lost_engines_total 1",
        "sterna_reopened_engines_total 1",
        "sterna_engine_up{engine=\"0\",device=\"\"} 1",
    ] {
        assert!(text.contains(figure), "{figure}: {text}");
    }
    let second = again.lock().unwrap().pop().unwrap();
    lose(&second);
    assert_eq!(answer(&server, 1)["choices"], before["choices"]);
    let actions = log.lock().unwrap();
    let actions = actions.iter().filter(|record| record["event"] == "engine");
    let actions: Vec<_> = actions.map(|record| record["action"].clone()).collect();
    assert_eq!(actions, ["lost", "reopened", "lost", "reopened"]);
    for path in ["/health", "/health/live"] {
        let answer = server.get(path, &[]);
        assert_eq!(
            (answer.status, &answer.json()["status"]),
            (200, &json!("ok")),
            "{path}"
        );
    }
}

#[test]
fn memory_of_the_host_gives_a_gpu_back_what_it_had_no_room_for() {
    if !sterna_testing::gpu::is_there() {
        return;
    }
    let files = LocalModel::open(BUILTIN, builtin(), None, None).unwrap();
    let plan = files.plan(&PlanOptions::default()).unwrap();
    // Where the GPU keeps all, and where it keeps nothing.
    let [kept, moved] = [(1 << 30, 0), (0, 1 << 30)].map(|(cache_bytes, host_bytes)| {
        let session = SessionOptions::new(512);
        let served = Served::new(BUILTIN, &files, plan.clone(), session, &mut Vec::new()).unwrap();
        let settings = Settings {
            engine: EngineOptions {
                cache_bytes,
                host_bytes,
                ..Settings::default().engine
            },
            ..Settings::default()
        };
        let served = served.with_weights(vec![Adapted::new(on_gpu(&files))]);
        let server = start_with(vec![served], settings);
        let mut prompt = "Once upon a time, there was a fox named Ruby. ".repeat(3);
        let mut all = Vec::new();
        for turn in 0..3 {
            let body = json!({
                "model": BUILTIN, "prompt": prompt, "seed": turn, "max_tokens": 30, "ignore_eos": true,
            });
            let answer = server.ok("/v1/completions", &body);
            let text = answer["choices"][0]["text"].as_str().unwrap();
            prompt = format!("{prompt}{text} And then?");
            all.push((answer["choices"].clone(), answer["usage"].clone()));
            let forgotten = "sterna_cache_sequences{engine=\"0\"} 0";
            let metrics = || server.get("/metrics", &[]).text().to_owned();
            while cache_bytes == 0 && !metrics().contains(forgotten) {
                thread::yield_now();
            }
        }
        let text = server.get("/metrics", &[]).text().to_owned();
        let tier = if cache_bytes == 0 { "host" } else { "engine" };
        let hits = format!("sterna_cache_hits_total{{tier=\"{tier}\"}} 2");
        assert!(text.contains(&hits), "{text}");
        all
    });
    assert_eq!(kept, moved);
    for (_, usage) in &kept[1..] {
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert!(cached.unwrap() > 60, "{usage}");
    }
}
