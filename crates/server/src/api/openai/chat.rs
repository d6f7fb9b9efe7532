//! `/v1/chat/completions`.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::super::json::At;
use super::super::stream::{self, Encoder, Frame};
use super::super::{ApiError, Caller, Dialect, Shared};
use super::{
    MAX_TOP, UsageSum, conversation, fingerprint, finish_reason, grammar, messages, n_choices, now,
    sampling, scored, stops, streaming, tools,
};
use crate::answer::{Ask, Call, Event, Prompt, Whole, whole};
use crate::model::ModelText;

pub(crate) async fn answer(app: Shared, caller: Caller, body: Value) -> Result<Response, ApiError> {
    let at = At::body(&body);
    let model = app.model(&at.get("model"))?;
    if !model.text.can_chat() {
        let message =
            "a base model, which has no chat template: expected a prompt for /v1/completions";
        return Err(at.get("model").refused(message));
    }
    let parallel = at.get("parallel_tool_calls").flag()?.unwrap_or(true);
    let (told, calls) = tools(
        &at.get("tools"),
        &at.get("tool_choice"),
        parallel,
        &app.settings,
    )?;
    let n = n_choices(&at)?;
    let top = at.get("top_logprobs").whole(0..=MAX_TOP)?;
    let logprobs = match at.get("logprobs").flag()? {
        Some(true) => Some(top.unwrap_or(0)),
        _ if top.is_some_and(|top| top > 0) => {
            return Err(at
                .get("top_logprobs")
                .refused("expected logprobs to be true"));
        }
        _ => None,
    };
    let limit = at.get_any(&["max_completion_tokens", "max_tokens"]);
    let ask = Ask {
        prompt: Prompt::Chat(conversation(&at, messages(&at.get("messages"))?, told)?),
        n,
        sampling: sampling(&at)?,
        max_tokens: limit.whole(1..=usize::MAX)?,
        stop: stops(&at.get("stop"))?,
        logprobs,
        grammar: grammar(&at, &app.settings)?,
        calls,
    };
    let (is_streamed, with_usage) = streaming(&at)?;
    let answers = app.answers(&caller, &model, "chat", vec![ask]).await?;
    let form = Form {
        id: crate::id::new("chatcmpl-"),
        created: now(),
        model: model.text,
        has_logprobs: logprobs.is_some(),
    };
    if is_streamed {
        let encoder = ChatStream {
            form,
            usage: with_usage.then(|| UsageSum::new(n)),
            has_failed: false,
        };
        return Ok(stream::respond(answers, encoder));
    }
    let all = whole(answers, n).await?;
    Ok(Json(form.whole(all)).into_response())
}

/// What all of a response's parts have.
struct Form {
    id: String,
    created: u64,
    model: Arc<ModelText>,
    has_logprobs: bool,
}

impl Form {
    fn whole(&self, all: VecDeque<Whole>) -> Value {
        let mut usage = UsageSum::new(all.len());
        let choices = all.iter().enumerate().map(|(index, answer)| {
            usage.add(index, answer.usage);
            self.choice(index, answer)
        });
        let choices: Vec<Value> = choices.collect();
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": fingerprint(),
            "choices": choices,
            "usage": usage.json(),
        })
    }

    fn choice(&self, index: usize, answer: &Whole) -> Value {
        let mut message = Map::new();
        message.insert("role".to_owned(), "assistant".into());
        // Beside calls, nothing said is null.
        let content = match answer.text.is_empty() && !answer.calls.is_empty() {
            true => Value::Null,
            false => answer.text.as_str().into(),
        };
        message.insert("content".to_owned(), content);
        message.insert("refusal".to_owned(), Value::Null);
        message.insert("annotations".to_owned(), json!([]));
        if !answer.reasoning.is_empty() {
            for name in ["reasoning", "reasoning_content"] {
                message.insert(name.to_owned(), answer.reasoning.as_str().into());
            }
        }
        if !answer.calls.is_empty() {
            let calls: Vec<Value> = answer.calls.iter().map(call).collect();
            message.insert("tool_calls".to_owned(), calls.into());
        }
        let logprobs = match self.has_logprobs {
            true => self.logprobs(answer.logprobs.iter()),
            false => Value::Null,
        };
        json!({
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(answer.finish.as_ref()),
        })
    }

    fn logprobs<'a>(&self, tokens: impl Iterator<Item = &'a crate::answer::ScoredToken>) -> Value {
        let tokens = tokens.map(|token| scored(&self.model.tokenizer, token));
        json!({"content": tokens.collect::<Vec<_>>(), "refusal": null})
    }
}

fn call(call: &Call) -> Value {
    json!({
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    })
}

/// Encodes events as chunks.
struct ChatStream {
    form: Form,
    /// Of all answers, if it is asked for.
    usage: Option<UsageSum>,
    has_failed: bool,
}

impl ChatStream {
    fn chunk(&self, choices: Value, usage: Option<Value>) -> Frame {
        let mut chunk = json!({
            "id": self.form.id,
            "object": "chat.completion.chunk",
            "created": self.form.created,
            "model": self.form.model.name,
            "system_fingerprint": fingerprint(),
            "choices": choices,
        });
        if self.usage.is_some() {
            chunk["usage"] = usage.unwrap_or(Value::Null);
        }
        Frame::data(&chunk)
    }

    fn delta(&self, choice: usize, delta: Value, logprobs: Value, finish: Value) -> Frame {
        let choice = json!({
            "index": choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        });
        self.chunk(json!([choice]), None)
    }
}

impl Encoder for ChatStream {
    fn encode(&mut self, choice: usize, events: Vec<Event>, frames: &mut VecDeque<Frame>) {
        let tokens = events.iter().filter_map(|event| match event {
            Event::Logprobs(token) => Some(token),
            _ => None,
        });
        let tokens: Vec<_> = tokens.collect();
        let mut logprobs = match tokens.is_empty() {
            true => Value::Null,
            false => self.form.logprobs(tokens.into_iter()),
        };
        for event in events {
            let delta = match event {
                Event::Begun { .. } => json!({"role": "assistant", "content": ""}),
                Event::Text(text) => json!({"content": text}),
                Event::Reasoning(text) => json!({"reasoning": text, "reasoning_content": text}),
                Event::CallBegun { index, id, name } => {
                    json!({"tool_calls": [{
                        "index": index,
                        "id": id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }]})
                }
                Event::CallArguments { index, text } => {
                    json!({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
                }
                Event::CallEnded | Event::Logprobs(_) => continue,
                Event::Ended { finish, usage } => {
                    let reason = finish_reason(Some(&finish)).into();
                    let logprobs = logprobs.take();
                    frames.push_back(self.delta(choice, json!({}), logprobs, reason));
                    if let Some(sum) = &mut self.usage {
                        sum.add(choice, usage);
                    }
                    continue;
                }
                Event::Failed(error) => {
                    self.has_failed = true;
                    let error = ApiError::from(error).body(Dialect::OpenAi);
                    frames.push_back(Frame::data(&error));
                    continue;
                }
            };
            let frame = self.delta(choice, delta, logprobs.take(), Value::Null);
            frames.push_back(frame);
        }
        // Of a token whose text is held back.
        if !logprobs.is_null() {
            frames.push_back(self.delta(choice, json!({}), logprobs, Value::Null));
        }
    }

    fn end(&mut self, frames: &mut VecDeque<Frame>) {
        if let Some(usage) = self.usage.as_ref().filter(|_| !self.has_failed) {
            let usage = usage.json();
            frames.push_back(self.chunk(json!([]), Some(usage)));
        }
        frames.push_back(Frame {
            name: None,
            data: "[DONE]".to_owned(),
        });
    }
}
