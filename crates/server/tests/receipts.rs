//! Receipts of answers, which are asked for with them, and checked without the server.

use std::thread;

use crate::common::{Running, adapter, loaded, model_on, open, start_with};
use serde_json::{Value, json};
use sterna::native::{BUILTIN, LocalModel, builtin};
use sterna::receipt::{Checked, Device, Difference, Receipt, Setup};
use sterna::{Adapted, AdapterFiles};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Activations, Backend, CacheType, Cpu, SessionOptions};
use sterna_server::{Served, Settings};

const CTX_LEN: usize = 600;

fn described<B: Backend>(adapted: &Adapted<B>) -> sterna::Result<Setup> {
    let files = LocalModel::open(BUILTIN, builtin(), None, None)?;
    let plan = files.plan(&PlanOptions::default())?;
    let (digest, cache) = (files.digest(&|_| {})?, CacheType::F32);
    let device = Device::Cpu("some".to_owned());
    let setup = Setup::new(
        "tales",
        digest,
        &plan,
        Activations::Int8,
        CTX_LEN,
        cache,
        device,
    );
    setup.with_adapters(adapted)
}

fn served() -> Served<Cpu> {
    let tales = model_on(1, "tales", CTX_LEN).with_receipts(described);
    let path = adapter(9);
    tales.with_adapter("red", 0.75, move || Ok(adapter_at(path.to_str().unwrap())))
}

fn adapter_at(path: &str) -> AdapterFiles {
    open(path).unwrap()
}

/// What the receipt in `choice` comes to here, with the adapters of these salts.
fn check(choice: &Value, adapters: &[(u32, f32)]) -> (Receipt, Checked) {
    let receipt = Receipt::parse(choice["receipt"].to_string().as_bytes()).unwrap();
    let files = LocalModel::open(BUILTIN, builtin(), None, None).unwrap();
    let mut adapted = loaded(1).remove(0);
    for (salt, scale) in adapters {
        let files_of = adapter_at(adapter(*salt).to_str().unwrap());
        let added = adapted.add(files_of, &files, (*scale, None), &mut Vec::new());
        added.unwrap();
    }
    let setup = described(&adapted).unwrap();
    let mut session = adapted.session(SessionOptions::new(CTX_LEN)).unwrap();
    let checked = receipt.check(&setup, &mut session).unwrap();
    (receipt, checked)
}

fn chat(seed: u64) -> Value {
    json!({
        "model": "tales", "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
        "seed": seed, "max_tokens": 24, "receipt": true,
    })
}

fn answer(server: &Running, path: &str, body: &Value) -> Value {
    let answer = server.post(path, body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.json()
}

#[test]
fn answers_at_once_have_receipts_of_their_own() {
    let server = start_with(vec![served()], Settings::default());
    let chats = "/v1/chat/completions";
    let all: Vec<Value> = thread::scope(|scope| {
        let ask = |seed| {
            let server = &server;
            scope.spawn(move || answer(server, chats, &chat(seed)))
        };
        let asked: Vec<_> = (0..4).map(ask).collect();
        asked
            .into_iter()
            .map(|asked| asked.join().unwrap())
            .collect()
    });
    for answer in &all {
        let choice = &answer["choices"][0];
        let (receipt, checked) = check(choice, &[]);
        assert_eq!(checked, Checked::Same);
        assert_eq!(receipt.model().name, "tales");
        let n = answer["usage"]["completion_tokens"].as_u64().unwrap();
        assert_eq!(receipt.answer().len() as u64, n);
    }
    assert_ne!(
        all[0]["choices"][0]["receipt"],
        all[1]["choices"][0]["receipt"]
    );
    // Once more, with the prompt in the cache: the same receipt.
    let again = answer(&server, chats, &chat(0));
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64() > Some(0));
    assert_eq!(
        again["choices"][0]["receipt"],
        all[0]["choices"][0]["receipt"]
    );
    // Several answers to one request.
    let mut body = chat(3);
    body["n"] = json!(2);
    let both = answer(&server, chats, &body);
    for choice in both["choices"].as_array().unwrap() {
        assert_eq!(check(choice, &[]).1, Checked::Same);
    }
    // Nobody else has one.
    body.as_object_mut().unwrap().remove("receipt");
    let without = answer(&server, chats, &body);
    assert!(without["choices"][0].get("receipt").is_none());
    // A changed one doesn't check.
    let mut choice = both["choices"][1].clone();
    choice["receipt"]["answer"][2] = json!(17);
    let (_, checked) = check(&choice, &[]);
    assert!(
        matches!(
            checked,
            Checked::Differs(Difference::Token { index: 2, .. })
        ),
        "{checked:?}"
    );
}

#[test]
fn streams_end_with_their_receipts() {
    let server = start_with(vec![served()], Settings::default());
    let completion = json!({
        "model": "tales", "prompt": "Once upon a time", "seed": 5, "max_tokens": 24, "receipt": true,
    });
    for (path, body) in [
        ("/v1/chat/completions", chat(5)),
        ("/v1/completions", completion),
    ] {
        let whole = answer(&server, path, &body);
        let mut streamed = body.clone();
        streamed["stream"] = json!(true);
        let events = server.post(path, &streamed).events();
        let choices: Vec<&Value> = events
            .iter()
            .map(|(_, chunk)| &chunk["choices"][0])
            .collect();
        let with: Vec<&&Value> = choices
            .iter()
            .filter(|c| c.get("receipt").is_some())
            .collect();
        let [last] = with[..] else {
            panic!("{path}: {} receipts", with.len());
        };
        assert!(last["finish_reason"].is_string());
        assert_eq!(last["receipt"], whole["choices"][0]["receipt"]);
        assert_eq!(check(last, &[]).1, Checked::Same);
    }
}

#[test]
fn the_adapter_of_a_request_is_in_its_receipt() {
    let server = start_with(vec![served()], Settings::default());
    let mut body = chat(1);
    body["model"] = json!("tales:red");
    let answer = answer(&server, "/v1/chat/completions", &body);
    let choice = &answer["choices"][0];
    let (receipt, checked) = check(choice, &[(9, 0.75)]);
    assert_eq!(checked, Checked::Same);
    assert_eq!(
        (&receipt.adapters()[0].name[..], receipt.adapters()[0].scale),
        ("red", 0.75)
    );
    for adapters in [&[][..], &[(8, 0.75)], &[(9, 0.5)], &[(9, 0.75), (8, 0.5)]] {
        let (_, checked) = check(choice, adapters);
        assert!(
            matches!(checked, Checked::Differs(Difference::Adapters { .. })),
            "{adapters:?}"
        );
    }
}

#[test]
fn receipts_are_signed_by_whoever_composes_the_server() {
    let settings = Settings {
        sign: Some(std::sync::Arc::new(|_: &mut Receipt| {
            let error = "the key is lost";
            Err(sterna::Error::new(sterna::ErrorCode::Compute, error))
        })),
        ..Settings::default()
    };
    let server = start_with(vec![served()], settings);
    let refused = server.post("/v1/chat/completions", &chat(1));
    assert_eq!(refused.status, 500, "{}", refused.text());
    let mut without = chat(1);
    without["receipt"] = json!(false);
    answer(&server, "/v1/chat/completions", &without);
}

#[test]
fn what_has_no_receipt_is_refused_at_once() {
    let plain = model_on(1, "plain", CTX_LEN);
    let replaced = model_on(1, "replaced", CTX_LEN).with_receipts(|_| {
        let error = "its weights were replaced";
        Err(sterna::Error::new(sterna::ErrorCode::Unsupported, error))
    });
    let server = start_with(vec![served(), plain, replaced], Settings::default());
    for (field, value, message) in [
        (
            "response_format",
            json!({"type": "json_object"}),
            "receipt: expected an answer that needn't match",
        ),
        (
            "guided_regex",
            json!("a+"),
            "receipt: expected an answer that needn't match",
        ),
        ("receipt", json!("yes"), "receipt: expected true or false"),
        ("model", json!("plain"), "this server writes no receipts"),
        ("model", json!("replaced"), "its weights were replaced"),
    ] {
        let mut body = chat(1);
        body[field] = value;
        let refused = server.post("/v1/chat/completions", &body);
        assert_eq!(refused.status, 400, "{field}: {}", refused.text());
        let text = refused.json()["error"]["message"]
            .as_str()
            .unwrap()
            .to_owned();
        assert!(text.contains(message), "{field}: {text}");
    }
}
