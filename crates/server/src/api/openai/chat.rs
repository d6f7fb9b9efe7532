//! `/v1/chat/completions`.

use std::collections::VecDeque;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};

use super::super::json::Checked;
use super::super::shape::{COUNT, Shape, field, required};
use super::super::stream::{self, Encoder, Frame};
use super::super::{ApiError, Caller, Shared};
use super::{
    Chunks, Head, UsageSum, add_receipt, conversation, fields, finish_reason, grammar, max_thought,
    messages, n_choices, receipt, sampling, scored, streaming, tools,
};
use crate::answer::{Ask, Call, Event, Prompt, Whole, whole};
use crate::model::{Begun, Conversation};

/// What a request may have.
pub(crate) const REQUEST: Shape = Shape::Object(&[
    &[
        required("model", Shape::Model),
        fields::MESSAGES,
        field("max_tokens", COUNT),
        field("max_completion_tokens", COUNT),
        field("logprobs", Shape::Flag),
        field("continue_final_message", Shape::Flag),
    ],
    fields::ANSWERS,
    fields::SAMPLING,
    fields::TOOLS,
    fields::GRAMMARS,
    fields::TEMPLATE,
]);

pub(crate) async fn answer(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model(&at.get("model"))?;
    if !model.text.can_chat() {
        let message =
            "a base model, which has no chat template: expected a prompt for /v1/completions";
        return Err(at.get("model").refused(message));
    }
    let parallel = at.get("parallel_tool_calls").flag().unwrap_or(true);
    let (told, calls) = tools(
        &at.get("tools"),
        &at.get("tool_choice"),
        parallel,
        &app.settings,
    )?;
    let n = n_choices(&at);
    let top = at.get("top_logprobs").whole();
    let logprobs = match at.get("logprobs").flag() {
        Some(true) => Some(top.unwrap_or(0)),
        _ if top.is_some_and(|top| top > 0) => {
            return Err(at
                .get("top_logprobs")
                .refused("expected logprobs to be true"));
        }
        _ => None,
    };
    let limit = at.get_any(&["max_completion_tokens", "max_tokens"]);
    let mut messages = messages(&at.get("messages"))?;
    let continues = at.get("continue_final_message");
    let begun = match continues.flag() {
        Some(false) => None,
        _ => Begun::take(&mut messages),
    };
    if continues.flag() == Some(true) && begun.is_none() {
        let message = "expected a message of the assistant, without calls, at the end of messages";
        return Err(continues.refused(message));
    }
    let conversation = Conversation {
        begun,
        ..conversation(&at, messages, told)
    };
    let ask = Ask {
        prompt: Prompt::Chat(conversation),
        n,
        sampling: sampling(&at),
        max_tokens: limit.whole(),
        stop: at.get("stop").texts(),
        stop_ids: at.get("stop_token_ids").ids(model.text.n_vocab)?,
        ignores_end: at.get("ignore_eos").flag().unwrap_or(false),
        max_thought: max_thought(&at),
        logprobs,
        grammar: grammar(&at, &app.settings)?,
        calls,
        receipt: receipt(&at, &model.text)?,
    };
    let (is_streamed, with_usage) = streaming(&at);
    let answers = app.answers(&caller, &model, "chat", vec![ask]).await?;
    let form = Form {
        head: Head::new("chatcmpl-", &model),
        has_logprobs: logprobs.is_some(),
    };
    if is_streamed {
        let encoder = ChatStream {
            form,
            chunks: Chunks::new("chat.completion.chunk", with_usage, n),
        };
        return Ok(stream::respond(answers, encoder));
    }
    let all = whole(answers, n).await?;
    Ok(Json(form.whole(all)).into_response())
}

/// What all of a response's parts have.
struct Form {
    head: Head,
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
        let mut body = self.head.body("chat.completion", choices.into());
        body["usage"] = usage.json();
        body
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
        let mut choice = json!({
            "index": index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": finish_reason(answer.finish.as_ref()),
        });
        add_receipt(&mut choice, answer.receipt.as_deref());
        choice
    }

    fn logprobs<'a>(&self, tokens: impl Iterator<Item = &'a crate::answer::ScoredToken>) -> Value {
        let tokens = tokens.map(|token| scored(&self.head.model.tokenizer, token));
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
    chunks: Chunks,
}

impl ChatStream {
    fn delta(&self, choice: usize, delta: Value, logprobs: Value) -> Frame {
        let choice = Self::choice(choice, delta, logprobs, Value::Null);
        self.chunks.of(&self.form.head, choice)
    }

    fn choice(choice: usize, delta: Value, logprobs: Value, finish: Value) -> Value {
        json!({
            "index": choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish,
        })
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
                Event::Ended {
                    finish,
                    usage,
                    receipt,
                } => {
                    let reason = finish_reason(Some(&finish)).into();
                    let mut last = Self::choice(choice, json!({}), logprobs.take(), reason);
                    add_receipt(&mut last, receipt.as_deref());
                    frames.push_back(self.chunks.of(&self.form.head, last));
                    self.chunks.ended(choice, usage);
                    continue;
                }
                Event::Failed(error) => {
                    frames.push_back(self.chunks.failed(error));
                    continue;
                }
            };
            let frame = self.delta(choice, delta, logprobs.take());
            frames.push_back(frame);
        }
        // Of a token whose text is held back.
        if !logprobs.is_null() {
            frames.push_back(self.delta(choice, json!({}), logprobs));
        }
    }

    fn end(&mut self, frames: &mut VecDeque<Frame>) {
        self.chunks.end(&self.form.head, frames);
    }
}
