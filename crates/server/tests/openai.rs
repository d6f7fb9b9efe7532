//! OpenAI's dialect over real connections.

use crate::common::{Running, shared};
use serde_json::{Value, json};

const STORY: &str = "Tell me a story about a fox named Ruby.";

fn chat(more: Value) -> Value {
    let mut body = json!({
        "model": "builtin",
        "messages": [{"role": "user", "content": STORY}],
        "seed": 7,
    });
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// The text and the chunks of a streamed chat.
fn streamed(server: &Running, body: &Value) -> (String, Vec<Value>) {
    let answer = server.post("/v1/chat/completions", body);
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.header("content-type"), Some("text/event-stream"));
    let mut events = answer.events();
    assert_eq!(events.pop().unwrap().1, "[DONE]");
    let chunks: Vec<Value> = events.into_iter().map(|(_, data)| data).collect();
    let deltas = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
    (deltas.collect(), chunks)
}

#[test]
fn a_chat_has_what_clients_trip_over() {
    let server = shared();
    let answer = server.ok("/v1/chat/completions", &chat(json!({})));
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "builtin");
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["index"], 0);
    for (place, name) in [(choice, "logprobs"), (&choice["message"], "refusal")] {
        assert!(place.as_object().unwrap()[name].is_null(), "{name}");
    }
    assert_eq!(choice["message"]["annotations"], json!([]));
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(text.contains("Ruby") && !text.starts_with(' '), "{text}");
    let usage = &answer["usage"];
    let count = |name: &str| usage[name].as_u64().unwrap();
    assert!(count("prompt_tokens") > 5 && count("completion_tokens") > 5);
    assert_eq!(
        count("total_tokens"),
        count("prompt_tokens") + count("completion_tokens")
    );
    // Streamed, it is the same.
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let (again, chunks) = streamed(server, &body);
    assert_eq!(again, text);
    let first = &chunks[0]["choices"][0];
    assert_eq!(first["delta"], json!({"role": "assistant", "content": ""}));
    assert!(first["finish_reason"].is_null() && first.get("finish_reason").is_some());
    let [.., end, last] = &chunks[..] else {
        panic!("{chunks:?}");
    };
    assert_eq!(end["choices"][0]["finish_reason"], "stop");
    assert_eq!(end["usage"], Value::Null);
    assert_eq!(last["choices"], json!([]));
    for name in ["prompt_tokens", "completion_tokens", "total_tokens"] {
        assert_eq!(last["usage"][name], usage[name], "{name}");
    }
    // All but the prompt's last token was there by now.
    let cached = &last["usage"]["prompt_tokens_details"]["cached_tokens"];
    assert_eq!(cached.as_u64().unwrap(), count("prompt_tokens") - 1);
}

#[test]
fn settings_are_kept() {
    let server = shared();
    let text = |more: Value| {
        let answer = server.ok("/v1/chat/completions", &chat(more));
        let choice = answer["choices"][0].clone();
        let text = choice["message"]["content"].as_str().unwrap().to_owned();
        (text, choice["finish_reason"].as_str().unwrap().to_owned())
    };
    let (whole, _) = text(json!({"temperature": 0}));
    let (short, reason) = text(json!({"temperature": 0, "max_tokens": 3}));
    assert!(whole.starts_with(&short) && reason == "length", "{short}");
    let (short, _) = text(json!({"temperature": 0, "max_completion_tokens": 3}));
    assert!(whole.starts_with(&short));
    let word = whole.split(' ').nth(3).unwrap();
    for stop in [json!(word), json!(["@@", word])] {
        let (cut, reason) = text(json!({"temperature": 0, "stop": stop}));
        assert_eq!(cut, whole[..whole.find(word).unwrap()]);
        assert_eq!(reason, "stop");
    }
    assert_eq!(text(json!({"top_k": 1, "temperature": 2})).0, whole);
    assert_eq!(text(json!({"top_p": 0})).0, whole);
    assert_ne!(text(json!({"seed": 8})).0, text(json!({"seed": 9})).0);
    // A token that is banned doesn't come.
    let tokens = server.ok(
        "/tokenize",
        &json!({"content": format!(" {}", &whole[..4]), "add_special": false}),
    );
    let first = tokens["tokens"][0].to_string();
    let (other, _) = text(json!({"temperature": 0, "logit_bias": {first: -100}}));
    assert_ne!(other, whole);
    assert_ne!(
        text(json!({"temperature": 0, "repetition_penalty": 2.5})).0,
        whole
    );
}

#[test]
fn answers_are_continued() {
    let server = shared();
    let text = |messages: Value, more: Value| {
        let mut body = chat(json!({"messages": messages, "temperature": 0, "max_tokens": 40}));
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let answer = server.ok("/v1/chat/completions", &body);
        let text = answer["choices"][0]["message"]["content"].as_str();
        text.unwrap().to_owned()
    };
    let user = json!({"role": "user", "content": STORY});
    let whole = text(json!([user]), json!({}));
    // The rest of the answer, whose first words were said.
    let at = whole.match_indices(' ').nth(5).unwrap().0;
    let begun = json!([user, {"role": "assistant", "content": &whole[..at]}]);
    for more in [json!({}), json!({"continue_final_message": true})] {
        let rest = text(begun.clone(), more);
        assert!(
            format!("{}{rest}", &whole[..at]).starts_with(&whole),
            "{rest}"
        );
    }
    // As a turn of its own it isn't continued.
    let next = text(begun, json!({"continue_final_message": false}));
    assert!(!next.starts_with(' '), "{next}");
    let refused = server.post(
        "/v1/chat/completions",
        &chat(json!({"continue_final_message": true})),
    );
    assert_eq!(refused.json()["error"]["param"], "continue_final_message");
}

#[test]
fn tokens_end_answers_as_clients_say() {
    let server = shared();
    let ask = |more: Value| {
        let mut body = json!({"model": "builtin", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 8});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        server.ok("/v1/completions", &body)
    };
    let whole = ask(json!({"logprobs": 0}));
    let tokens = whole["choices"][0]["logprobs"]["tokens"]
        .as_array()
        .unwrap();
    let third = tokens[2].as_str().unwrap();
    let id = server.ok(
        "/tokenize",
        &json!({"content": third, "add_special": false}),
    );
    let cut = ask(json!({"stop_token_ids": id["tokens"], "logprobs": 0}));
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    assert!(cut["usage"]["completion_tokens"].as_u64().unwrap() <= 3);
    // The model would end long before.
    let mut body = chat(json!({"temperature": 0, "max_tokens": 300, "ignore_eos": true}));
    let answer = server.ok("/v1/chat/completions", &body);
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    body["stop_token_ids"] = json!([1_000_000]);
    let refused = server.post("/v1/chat/completions", &body);
    assert_eq!(refused.json()["error"]["param"], "stop_token_ids[0]");
    let body = json!({"model": "builtin", "prompt": "def f(", "suffix": "return x"});
    let refused = server.post("/v1/completions", &body);
    assert_eq!(
        (refused.status, &refused.json()["error"]["param"]),
        (400, &json!("suffix"))
    );
}

#[test]
fn several_answers_are_those_of_their_seeds() {
    let server = shared();
    let texts = |answer: &Value| -> Vec<String> {
        let choices = answer["choices"].as_array().unwrap().iter();
        choices
            .map(|choice| choice["message"]["content"].as_str().unwrap().to_owned())
            .collect()
    };
    let all = server.ok(
        "/v1/chat/completions",
        &chat(json!({"n": 3, "max_tokens": 20})),
    );
    let mut single = Vec::new();
    for seed in 7..10 {
        let body = chat(json!({"seed": seed, "max_tokens": 20}));
        single.extend(texts(&server.ok("/v1/chat/completions", &body)));
    }
    assert_eq!(texts(&all), single);
    assert_eq!(all["usage"]["completion_tokens"], 60);
}

#[test]
fn logprobs_are_of_the_tokens_that_were_said() {
    let server = shared();
    let more = json!({"temperature": 0, "max_tokens": 8, "logprobs": true, "top_logprobs": 2});
    let answer = server.ok("/v1/chat/completions", &chat(more.clone()));
    let choice = &answer["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 8);
    let said: String = tokens
        .iter()
        .map(|t| t["token"].as_str().unwrap())
        .collect();
    assert_eq!(
        said.trim_start(),
        choice["message"]["content"].as_str().unwrap()
    );
    for token in tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["token"]), (2, &token["token"]));
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        assert!(token["bytes"].is_array());
    }
    let mut body = chat(more);
    body["stream"] = true.into();
    let (_, chunks) = streamed(server, &body);
    let streamed = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array())
        .flatten();
    assert_eq!(
        streamed.collect::<Vec<_>>(),
        tokens.iter().collect::<Vec<_>>()
    );
}

#[test]
fn answers_match_what_they_have_to() {
    let server = shared();
    let schema = json!({
        "type": "object",
        "properties": {"name": {"enum": ["Ruby", "Max"]}, "age": {"type": "integer", "maximum": 99, "minimum": 1}},
        "required": ["name", "age"],
        "additionalProperties": false,
    });
    let text = |more: Value| {
        let answer = server.ok("/v1/chat/completions", &chat(more));
        answer["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    for more in [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
        json!({"guided_json": schema}),
    ] {
        let value: Value = serde_json::from_str(&text(more)).unwrap();
        assert!(
            ["Ruby", "Max"].contains(&value["name"].as_str().unwrap()),
            "{value}"
        );
        assert!(
            (1..100).contains(&value["age"].as_u64().unwrap()),
            "{value}"
        );
    }
    let object = text(
        json!({"response_format": {"type": "json_object"}, "max_tokens": 400, "temperature": 0}),
    );
    assert!(object.starts_with('{'), "{object}");
    assert!(["yes", "no"].contains(&text(json!({"guided_regex": "yes|no"})).as_str()));
    for more in [
        json!({"guided_choice": ["ze\"bra", "yak"]}),
        json!({"structured_outputs": {"choice": ["ze\"bra", "yak"]}}),
    ] {
        let said = text(more);
        assert!(["ze\"bra", "yak"].contains(&&*said), "{said}");
    }
    let object = text(json!({"structured_outputs": {"json_object": true}, "max_tokens": 400}));
    assert!(object.starts_with('{'), "{object}");
    let lark = json!({"grammar": "start: \"a\" \"b\"{2,4}"});
    assert!(text(lark).starts_with("abb"));
}

#[test]
fn required_calls_are_made() {
    let server = shared();
    let tools = json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": {
            "type": "object",
            "properties": {"place": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": false,
        }}},
        {"type": "function", "function": {"name": "stop", "parameters": {
            "type": "object", "properties": {}, "additionalProperties": false,
        }}},
        {"type": "web_search"},
    ]);
    let named = json!({"type": "function", "function": {"name": "get_weather"}});
    for choice in [named, json!("required")] {
        let more = json!({"tools": tools, "tool_choice": choice, "parallel_tool_calls": false});
        let answer = server.ok("/v1/chat/completions", &chat(more.clone()));
        let found = &answer["choices"][0];
        assert_eq!(found["finish_reason"], "tool_calls");
        assert!(found["message"]["content"].is_null());
        let calls = found["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        let function = &calls[0]["function"];
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        if function["name"] == "get_weather" {
            assert!(["Rome", "Oslo"].contains(&arguments["place"].as_str().unwrap()));
            assert!(arguments["days"].is_u64());
        } else {
            assert_eq!(arguments, json!({}));
        }
        // Streamed, in pieces.
        let mut body = chat(more);
        body["stream"] = true.into();
        let (text, chunks) = streamed(server, &body);
        assert_eq!(text, "");
        let pieces: Vec<&Value> = chunks
            .iter()
            .filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0))
            .collect();
        assert_eq!(pieces[0]["function"]["name"], function["name"]);
        assert!(pieces[0]["id"].as_str().unwrap().starts_with("call_"));
        let said: String = pieces
            .iter()
            .map(|piece| piece["function"]["arguments"].as_str().unwrap())
            .collect();
        assert_eq!(said, function["arguments"].as_str().unwrap());
        let last = &chunks[chunks.len() - 1]["choices"][0];
        assert_eq!(last["finish_reason"], "tool_calls");
        // The next turn, with the result.
        let turns = json!([
            {"role": "user", "content": "weather?"},
            {"role": "assistant", "content": null, "tool_calls": calls},
            {"role": "tool", "tool_call_id": calls[0]["id"], "content": "rain"},
        ]);
        let body = json!({"model": "builtin", "messages": turns, "tools": tools, "max_tokens": 4});
        server.ok("/v1/chat/completions", &body);
    }
}

#[test]
fn texts_are_continued_and_scored() {
    let server = shared();
    let body = json!({"model": "builtin", "prompt": "Once upon a time", "max_tokens": 5, "temperature": 0});
    let with = |more: Value| {
        let mut body = body.clone();
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        body
    };
    let plain = server.ok("/v1/completions", &body);
    assert_eq!(plain["object"], "text_completion");
    let text = plain["choices"][0]["text"].as_str().unwrap();
    assert_eq!(plain["choices"][0]["finish_reason"], "length");
    let echoed = server.ok(
        "/v1/completions",
        &with(json!({"echo": true, "logprobs": 1})),
    );
    let choice = &echoed["choices"][0];
    assert_eq!(choice["text"], format!("Once upon a time{text}"));
    let logprobs = &choice["logprobs"];
    let n = echoed["usage"]["total_tokens"].as_u64().unwrap() as usize;
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[name].as_array().unwrap().len(), n, "{name}");
    }
    assert!(logprobs["token_logprobs"][0].is_null());
    // Scored alone, without an answer.
    let scored = server.ok(
        "/v1/completions",
        &with(json!({"echo": true, "logprobs": 1, "max_tokens": 0})),
    );
    let n_prompt = scored["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    let alone = scored["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap();
    assert_eq!(
        alone[..],
        logprobs["token_logprobs"].as_array().unwrap()[..n_prompt]
    );
    // The answer's own, scored as a prompt, are the same bits.
    let ids = server.ok("/tokenize", &json!({"content": "Once upon a time"}))["tokens"].clone();
    let answer = server.ok(
        "/v1/completions",
        &with(json!({"prompt": ids, "logprobs": 0})),
    );
    assert_eq!(answer["choices"][0]["text"], text);
    let of_answer = answer["choices"][0]["logprobs"]["token_logprobs"]
        .as_array()
        .unwrap();
    assert_eq!(
        of_answer[..],
        logprobs["token_logprobs"].as_array().unwrap()[n_prompt..]
    );
    // Several prompts, several answers to each.
    let many = json!({"prompt": ["Once", "The fox"], "n": 2, "seed": 1, "temperature": 1, "max_tokens": 2});
    let many = server.ok("/v1/completions", &with(many));
    let indices: Vec<u64> = (many["choices"].as_array().unwrap().iter())
        .map(|choice| choice["index"].as_u64().unwrap())
        .collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    let streamed = server.post(
        "/v1/completions",
        &with(json!({"stream": true, "echo": true})),
    );
    let texts = streamed.events();
    let texts = texts
        .iter()
        .filter_map(|(_, data)| data["choices"][0]["text"].as_str());
    assert_eq!(texts.collect::<String>(), format!("Once upon a time{text}"));
}

#[test]
fn models_tokens_and_vectors() {
    let server = shared();
    let list = server.get("/v1/models", &[]).json();
    assert_eq!(list["data"][0]["id"], "builtin");
    assert_eq!(list["data"], list["models"]);
    assert_eq!(server.get("/v1/models/builtin", &[]).status, 200);
    assert_eq!(server.get("/v1/models/other", &[]).status, 404);
    let anthropic = server
        .get("/v1/models", &[("anthropic-version", "2023-06-01")])
        .json();
    assert_eq!(anthropic["data"][0]["type"], "model");
    assert_eq!(anthropic["has_more"], false);
    let tokens = server.ok(
        "/tokenize",
        &json!({"prompt": STORY, "add_special_tokens": false}),
    );
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    let text = server.ok("/detokenize", &json!({"tokens": tokens["tokens"]}));
    assert_eq!(text["content"], STORY);
    let ask = |more: Value| {
        let mut body = json!({"model": "builtin", "input": ["a fox", "a dog"], "pooling": "mean"});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        server.ok("/v1/embeddings", &body)
    };
    let vectors = ask(json!({}));
    let vector = |index: usize| -> Vec<f64> {
        let values = vectors["data"][index]["embedding"].as_array().unwrap();
        values.iter().map(|x| x.as_f64().unwrap()).collect()
    };
    assert_eq!(vector(0).len(), 256);
    let length: f64 = vector(0).iter().map(|x| x * x).sum();
    assert!((length - 1.0).abs() < 1e-4);
    assert_ne!(vector(0), vector(1));
    // The first elements, of length 1 again.
    let short = ask(json!({"dimensions": 16}));
    let short: Vec<f64> = (short["data"][1]["embedding"].as_array().unwrap().iter())
        .map(|x| x.as_f64().unwrap())
        .collect();
    let length: f64 = vector(1)[..16].iter().map(|x| x * x).sum::<f64>().sqrt();
    assert_eq!(short.len(), 16);
    for (a, b) in short.iter().zip(vector(1)) {
        assert!((a - b / length).abs() < 1e-5, "{a} {b}");
    }
    let mut body = json!({"model": "builtin", "input": "x", "pooling": "mean", "dimensions": 257});
    let refused = server.post("/v1/embeddings", &body);
    assert_eq!(refused.json()["error"]["param"], "dimensions");
    body.as_object_mut().unwrap().remove("pooling");
    body["dimensions"] = 1.into();
    let refused = server.post("/v1/embeddings", &body);
    assert_eq!(refused.json()["error"]["param"], "pooling");
    let coded = ask(json!({"encoding_format": "base64"}));
    assert_eq!(
        coded["data"][0]["embedding"].as_str().unwrap().len(),
        4 * (256 * 4_usize).div_ceil(3)
    );
}

#[test]
fn documents_are_sorted_by_how_near_they_are() {
    let server = shared();
    let texts = ["The dog ran home.", "A fox named Ruby.", "The fox slept."];
    let query = "A fox named Ruby.";
    let body = json!({
        "model": "builtin", "query": query, "documents": [texts[0], {"text": texts[1]}, texts[2]],
        "pooling": "mean", "return_documents": true,
    });
    let ranking = server.ok("/v1/rerank", &body);
    let results = ranking["results"].as_array().unwrap();
    assert_eq!((&results[0]["index"], results.len()), (&json!(1), 3));
    assert!((results[0]["relevance_score"].as_f64().unwrap() - 1.0).abs() < 1e-4);
    // The cosines of the vectors that embeddings are.
    let body_of = json!({"model": "builtin", "input": [query, texts[0], texts[1], texts[2]], "pooling": "mean"});
    let vectors = server.ok("/v1/embeddings", &body_of);
    let vector = |index: usize| -> Vec<f64> {
        let values = vectors["data"][index]["embedding"].as_array().unwrap();
        values.iter().map(|x| x.as_f64().unwrap()).collect()
    };
    for result in results {
        let index = result["index"].as_u64().unwrap() as usize;
        let cosine: f64 = vector(0)
            .iter()
            .zip(vector(index + 1))
            .map(|(a, b)| a * b)
            .sum();
        assert!((result["relevance_score"].as_f64().unwrap() - cosine).abs() < 1e-5);
        assert_eq!(result["document"]["text"], texts[index]);
    }
    let mut few = body.clone();
    few["top_n"] = 1.into();
    few["return_documents"] = false.into();
    let few = server.ok("/rerank", &few);
    assert_eq!(few["results"].as_array().unwrap().len(), 1);
    assert!(few["results"][0].get("document").is_none());
    assert_eq!(few["usage"], vectors["usage"]);
    let mut none = body;
    none["documents"] = json!([]);
    let refused = server.post("/v1/rerank", &none);
    assert_eq!(refused.json()["error"]["param"], "documents");
}

#[test]
fn wrong_values_are_refused_with_their_path() {
    let server = shared();
    let user = json!([{"role": "user", "content": "hi"}]);
    for (body, status, param, message) in [
        (
            json!({"messages": user}),
            400,
            json!("model"),
            "model: expected text, found nothing",
        ),
        (
            json!({"model": "gpt-4o", "messages": user}),
            404,
            json!("model"),
            "the model `gpt-4o` does not exist",
        ),
        (
            json!({"model": "builtin"}),
            400,
            json!("messages"),
            "messages: expected an array",
        ),
        (
            json!({"model": "builtin", "messages": []}),
            400,
            json!("messages"),
            "messages: expected an array of messages, 1 at least, found",
        ),
        (
            json!({"model": "builtin", "messages": [{"role": "user", "content": 3}]}),
            400,
            json!("messages[0].content"),
            "messages[0].content: expected text or an array of parts, found 3",
        ),
        (
            json!({"model": "builtin", "messages": [{"role": "king", "content": ""}]}),
            400,
            json!("messages[0].role"),
            "messages[0].role: expected assistant, system",
        ),
        (
            json!({"model": "builtin", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            400,
            json!("messages[0].content[0].type"),
            "messages[0].content[0].type: expected text, input_text, output_text or refusal, which",
        ),
        (
            json!({"model": "builtin", "messages": user, "temperature": "hot"}),
            400,
            json!("temperature"),
            "temperature: expected a number of at least 0, found \"hot\"",
        ),
        (
            json!({"model": "builtin", "messages": user, "temperature": -1}),
            400,
            json!("temperature"),
            "temperature",
        ),
        (
            json!({"model": "builtin", "messages": user, "top_p": 2}),
            400,
            json!("top_p"),
            "top_p",
        ),
        (
            json!({"model": "builtin", "messages": user, "n": 0}),
            400,
            json!("n"),
            "n: expected",
        ),
        (
            json!({"model": "builtin", "messages": user, "stop": [1]}),
            400,
            json!("stop[0]"),
            "stop[0]",
        ),
        (
            json!({"model": "builtin", "messages": user, "logit_bias": {"x": 1}}),
            400,
            json!("logit_bias.x"),
            "logit_bias.x",
        ),
        (
            json!({"model": "builtin", "messages": user, "logit_bias": {"99999": 1}}),
            400,
            json!("logit_bias"),
            "sampling: expected logit_bias ids",
        ),
        (
            json!({"model": "builtin", "messages": user, "tool_choice": "required"}),
            400,
            json!("tool_choice"),
            "tool_choice: a call is required",
        ),
        (
            json!({"model": "builtin", "messages": user, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}),
            400,
            json!("response_format"),
            "response_format: JSON schema: /type: ",
        ),
        (
            json!({"model": "builtin", "messages": user, "tools": [{"type": "function", "function": {
                "name": "a", "strict": true, "parameters": {"properties": {"x": {"type": "nonsense"}}},
            }}]}),
            400,
            json!("tools"),
            "tools: the parameters of a: JSON schema: /properties/x/type: ",
        ),
        (
            json!({"model": "builtin", "messages": user, "structured_outputs": {"regexp": "a"}}),
            400,
            json!("structured_outputs"),
            "structured_outputs: expected json, json_object, regex, choice or grammar",
        ),
        (
            json!({"model": "builtin", "messages": user, "tools": [{"type": "function", "function": {
                "name": "a", "parameters": {"properties": {"x": {"enum": []}}},
            }}]}),
            400,
            json!("tools[0].function.parameters.properties.x.enum"),
            "tools[0].function.parameters.properties.x.enum: expected a value at least, found none",
        ),
        (
            json!({"model": "builtin", "messages": user, "regex": "a", "grammar": "start: \"a\""}),
            400,
            json!("grammar"),
            "grammar: expected one thing",
        ),
        (
            json!({"model": "builtin", "messages": [{"role": "user", "content": "word ".repeat(5000)}]}),
            400,
            json!("messages"),
            "This model's maximum context length is 4096 tokens",
        ),
    ] {
        let answer = server.post("/v1/chat/completions", &body);
        let error = &answer.json()["error"];
        assert_eq!(answer.status, status, "{error}");
        let found = error["message"].as_str().unwrap();
        assert!(found.starts_with(message), "{found}");
        assert_eq!(error["param"], param, "{found}");
        assert!(error["type"].is_string());
    }
    // What nobody knows is tolerated.
    let body = json!({"model": "builtin", "messages": user, "max_tokens": 1, "frobnicate": {"x": []}, "user": "u"});
    server.ok("/v1/chat/completions", &body);
}
