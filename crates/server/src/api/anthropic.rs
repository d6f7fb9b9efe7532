//! `/v1/messages` and `/v1/messages/count_tokens`: Anthropic's dialect.

use std::collections::VecDeque;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use sterna::constraint::Grammar;
use sterna::sampling::SamplingOptions;

use super::json::{At, Checked};
use super::openai::fields;
use super::shape::{COUNT, Field, OBJECT, Shape, TEXT, field, items, required, some, word};
use super::stream::{self, Encoder, Frame};
use super::{ApiError, Caller, Dialect, Shared, openai};
use crate::answer::tools::as_mapping;
use crate::answer::{Ask, Asked, Calls, Event, Finish, Prompt, Usage, Whole, whole};
use crate::model::{Begun, Conversation};
use crate::settings::Settings;

/// What a request may have.
pub(super) const REQUEST: Shape = Shape::Object(&[
    &[
        required("max_tokens", COUNT),
        field("temperature", fields::TEMPERATURE),
        field("top_k", fields::TOP_K),
        field("top_p", fields::SHARE),
        field("seed", fields::SEED),
        field("stop_sequences", fields::STOPS),
        field("stream", Shape::Flag),
        field(
            "output_config",
            Shape::Object(&[&[field("format", FORMAT)]]),
        ),
        field("output_format", FORMAT),
    ],
    CONVERSATION,
]);

/// What a request to count tokens may have.
pub(super) const COUNT_REQUEST: Shape = Shape::Object(&[CONVERSATION]);

const CONVERSATION: &[Field] = &[
    required("model", Shape::Model),
    required("messages", some(&TURN, "messages")),
    field("system", fields::CONTENT),
    field("tools", items(&TOOL, "tools")),
    field(
        "tool_choice",
        Shape::OneOf(&[
            Shape::Object(&[&[
                required("type", word(&["auto", "any", "none"])),
                field("disable_parallel_tool_use", Shape::Flag),
            ]]),
            Shape::Object(&[&[
                required("type", word(&["tool"])),
                required("name", TEXT),
                field("disable_parallel_tool_use", Shape::Flag),
            ]]),
        ]),
    ),
    field(
        "thinking",
        Shape::Object(&[&[
            required("type", word(&["enabled", "adaptive", "disabled"])),
            field("budget_tokens", COUNT),
        ]]),
    ),
];

const FORMAT: Shape = Shape::Object(&[&[
    required("type", word(&["json_schema"])),
    required("schema", OBJECT),
]]);

/// Tools that Anthropic's own servers have are not here.
const TOOL: Shape = Shape::OneOf(&[
    Shape::Object(&[&[
        field("type", word(&["custom"])),
        required("name", Shape::Name),
        field("description", TEXT),
        field("input_schema", OBJECT),
        field("strict", Shape::Flag),
    ]]),
    Shape::Object(&[&[required("type", Shape::OtherThan(&["custom"]))]]),
]);

const TURN: Shape = Shape::Object(&[&[
    required("role", word(&["user", "assistant", "system"])),
    required("content", Shape::OneOf(&[TEXT, items(&BLOCK, "blocks")])),
]]);

const BLOCK: Shape = Shape::OneOf(&[
    Shape::Object(&[&[
        required(
            "type",
            Shape::Word(&["text"], ", which is all that models read"),
        ),
        required("text", TEXT),
    ]]),
    Shape::Object(&[&[
        required("type", word(&["thinking"])),
        required("thinking", TEXT),
    ]]),
    Shape::Object(&[&[required("type", word(&["redacted_thinking"]))]]),
    Shape::Object(&[&[
        required("type", word(&["tool_use"])),
        required("name", TEXT),
        field("id", TEXT),
        field("input", OBJECT),
    ]]),
    Shape::Object(&[&[
        required("type", word(&["tool_result"])),
        required("tool_use_id", TEXT),
        field("content", fields::CONTENT),
    ]]),
]);

pub(super) async fn answer(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model(&at.get("model"))?;
    let (conversation, calls) = conversation(&at, &app.settings)?;
    let ask = Ask {
        prompt: Prompt::Chat(conversation),
        n: 1,
        sampling: SamplingOptions {
            temperature: at.get("temperature").number(),
            top_k: at.get("top_k").whole(),
            top_p: openai::top_p(&at),
            seed: at.get("seed").seed(),
            ..SamplingOptions::default()
        },
        max_tokens: at.get("max_tokens").whole(),
        stop: at.get("stop_sequences").texts(),
        max_thought: at.get("thinking").get("budget_tokens").whole(),
        grammar: grammar(&at, &app.settings)?,
        calls,
        ..Ask::default()
    };
    let is_streamed = at.get("stream").flag().unwrap_or(false);
    let answers = app.answers(&caller, &model, "messages", vec![ask]).await?;
    let form = Form {
        id: crate::id::new("msg_"),
        model: model.name,
    };
    if is_streamed {
        let encoder = MessageStream {
            form,
            n_blocks: 0,
            open: None,
        };
        return Ok(stream::respond(answers, encoder));
    }
    let all = whole(answers, 1).await?;
    let message = all.front().map(|answer| form.whole(answer));
    Ok(Json(message).into_response())
}

/// How many tokens a request's prompt has.
pub(super) async fn count_tokens(
    app: Shared,
    _: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model(&at.get("model"))?.text;
    let (conversation, _) = conversation(&at, &app.settings)?;
    let prompt = app.aside(move || model.prompt(&conversation)).await??;
    Ok(Json(json!({"input_tokens": prompt.ids.len()})).into_response())
}

fn grammar(at: &At<'_>, settings: &Settings) -> Result<Option<Asked>, ApiError> {
    let format = at.get("output_config").get("format");
    let format = match format.is_absent() {
        true => at.get("output_format"),
        false => format,
    };
    match (format.is_absent(), settings.grammars) {
        (true, _) => Ok(None),
        (false, false) => Err(format.refused("this server takes no schemas")),
        (false, true) => {
            let schema = format.get("schema").value().to_string();
            Ok(Some(format.asks(Grammar::JsonSchema(schema))))
        }
    }
}

/// What is to be answered, in the form that templates know.
fn conversation(at: &At<'_>, settings: &Settings) -> Result<(Conversation, Calls), ApiError> {
    let mut messages = Vec::new();
    let system = at.get("system");
    if !system.is_absent() {
        let text = openai::text_of(&system);
        messages.push(json!({"role": "system", "content": text}));
    }
    for turn in at.get("messages").items() {
        message(&turn, &mut messages)?;
    }
    let (told, calls) = tools(at, settings)?;
    let thinking = at.get("thinking").get("type").text();
    let thinking = thinking.map(|kind| kind != "disabled");
    let conversation = Conversation {
        begun: Begun::take(&mut messages),
        messages,
        tools: told,
        thinking,
        variables: Map::new(),
    };
    Ok((conversation, calls))
}

fn tools(at: &At<'_>, settings: &Settings) -> Result<(Vec<Value>, Calls), ApiError> {
    let (mut told, mut tools) = (Vec::new(), Vec::new());
    for tool in at.get("tools").items() {
        // Tools that Anthropic's own servers have are not here.
        if tool.get("type").text().is_some_and(|kind| kind != "custom") {
            continue;
        }
        let (told_of, function) = openai::tool_of(
            &tool.get("name"),
            &tool.get("description"),
            &tool.get("input_schema"),
            &tool.get("strict"),
            settings,
        )?;
        told.push(told_of);
        tools.push(function);
    }
    let choice = at.get("tool_choice");
    let kind = choice.get("type");
    let alone = choice.get("disable_parallel_tool_use");
    let parallel = !alone.flag().unwrap_or(false);
    match kind.text() {
        Some("none") => Ok((Vec::new(), Calls::None)),
        None | Some("auto") if tools.is_empty() => Ok((Vec::new(), Calls::None)),
        None | Some("auto") => Ok((told, Calls::May { tools, parallel })),
        Some("any") => openai::must(&choice, told, tools, parallel, settings),
        Some(_) => {
            let name = choice.get("name");
            let named = name.required_text()?;
            tools.retain(|tool| tool.name == named);
            match tools.is_empty() {
                true => Err(name.wrong("the name of a tool")),
                false => openai::must(&choice, told, tools, false, settings),
            }
        }
    }
}

/// Adds what `turn` says: results of tools are messages of their own.
fn message(turn: &At<'_>, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = turn.get("role").required_text()?;
    let content = turn.get("content");
    if let Some(text) = content.value().as_str() {
        messages.push(json!({"role": role, "content": text}));
        return Ok(());
    }
    let (mut texts, mut thought, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for block in content.items() {
        let kind = block.get("type");
        match kind.required_text()? {
            "text" => texts.push(block.get("text").required_text()?),
            "thinking" => thought.push(block.get("thinking").required_text()?),
            "redacted_thinking" => {}
            "tool_use" => {
                let name = block.get("name").required_text()?;
                let id = block.get("id").text().unwrap_or_default();
                let input = block.get("input");
                let input = match input.object() {
                    Some(_) => input.value().clone(),
                    None => json!({}),
                };
                calls.push(openai::called(id, name, input));
            }
            "tool_result" => {
                let text = openai::text_of(&block.get("content"));
                let id = block.get("tool_use_id").required_text()?;
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
            }
            // The table has no others.
            _ => {}
        }
    }
    let is_result_alone = texts.is_empty() && calls.is_empty() && role == "user";
    if is_result_alone {
        return Ok(());
    }
    let mut message = json!({"role": role, "content": texts.join("\n")});
    if !thought.is_empty() {
        message["reasoning_content"] = thought.join("\n").into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    messages.push(message);
    Ok(())
}

struct Form {
    id: String,
    model: String,
}

fn stop_reason(finish: Option<&Finish>) -> (&'static str, Option<&str>) {
    match finish {
        Some(Finish::Length) => ("max_tokens", None),
        Some(Finish::Calls) => ("tool_use", None),
        Some(Finish::StopString(stop)) => ("stop_sequence", Some(stop)),
        Some(Finish::Stop) | None => ("end_turn", None),
    }
}

/// The arguments of a call, which have to be an object: what was cut off is none.
fn input(arguments: &str) -> Value {
    match as_mapping(arguments) {
        object @ Value::Object(_) => object,
        _ => json!({}),
    }
}

/// Tokens that were cached are no input tokens here.
fn usage_of(usage: Usage) -> Value {
    json!({
        "input_tokens": usage.n_prompt - usage.n_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.n_cached,
        "output_tokens": usage.n_generated,
        "cache_creation": null,
        "inference_geo": null,
        "output_tokens_details": null,
        "server_tool_use": null,
        "service_tier": null,
    })
}

impl Form {
    fn message(
        &self,
        content: Vec<Value>,
        finish: Value,
        stop: Option<&str>,
        usage: Usage,
    ) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": finish,
            "stop_sequence": stop,
            "stop_details": null,
            "container": null,
            "usage": usage_of(usage),
        })
    }

    fn whole(&self, answer: &Whole) -> Value {
        let mut content = Vec::new();
        if !answer.reasoning.is_empty() {
            content.push(json!({
                "type": "thinking", "thinking": answer.reasoning, "signature": "",
            }));
        }
        if !answer.text.is_empty() || answer.calls.is_empty() {
            content.push(json!({"type": "text", "text": answer.text, "citations": []}));
        }
        for call in &answer.calls {
            content.push(json!({
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": input(&call.arguments),
                "caller": {"type": "direct"},
            }));
        }
        let (reason, stop) = stop_reason(answer.finish.as_ref());
        self.message(content, reason.into(), stop, answer.usage)
    }
}

/// What a block of content is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Block {
    Thinking,
    Text,
    Tool,
}

struct MessageStream {
    form: Form,
    n_blocks: usize,
    /// The block that has begun and not ended.
    open: Option<Block>,
}

impl MessageStream {
    /// Begins a block, unless one of the kind is open that goes on.
    fn open(&mut self, block: Block, content: Value, frames: &mut VecDeque<Frame>) {
        if self.open == Some(block) && block != Block::Tool {
            return;
        }
        self.close(frames);
        self.open = Some(block);
        frames.push_back(Frame::named(
            "content_block_start",
            &json!({"type": "content_block_start", "index": self.n_blocks, "content_block": content}),
        ));
    }

    fn close(&mut self, frames: &mut VecDeque<Frame>) {
        let Some(block) = self.open.take() else {
            return;
        };
        if block == Block::Thinking {
            self.delta(json!({"type": "signature_delta", "signature": ""}), frames);
        }
        frames.push_back(Frame::named(
            "content_block_stop",
            &json!({"type": "content_block_stop", "index": self.n_blocks}),
        ));
        self.n_blocks += 1;
    }

    fn delta(&self, delta: Value, frames: &mut VecDeque<Frame>) {
        frames.push_back(Frame::named(
            "content_block_delta",
            &json!({"type": "content_block_delta", "index": self.n_blocks, "delta": delta}),
        ));
    }
}

impl Encoder for MessageStream {
    fn encode(&mut self, _: usize, events: Vec<Event>, frames: &mut VecDeque<Frame>) {
        for event in events {
            match event {
                Event::Begun { n_prompt, n_cached } => {
                    let usage = Usage {
                        n_prompt,
                        n_cached,
                        ..Usage::default()
                    };
                    let message = self.form.message(Vec::new(), Value::Null, None, usage);
                    frames.push_back(Frame::named(
                        "message_start",
                        &json!({"type": "message_start", "message": message}),
                    ));
                    frames.push_back(Frame::named("ping", &json!({"type": "ping"})));
                }
                Event::Reasoning(text) => {
                    let block = json!({"type": "thinking", "thinking": "", "signature": ""});
                    self.open(Block::Thinking, block, frames);
                    self.delta(json!({"type": "thinking_delta", "thinking": text}), frames);
                }
                Event::Text(text) => {
                    let block = json!({"type": "text", "text": "", "citations": []});
                    self.open(Block::Text, block, frames);
                    self.delta(json!({"type": "text_delta", "text": text}), frames);
                }
                Event::CallBegun { id, name, .. } => {
                    let block = json!({
                        "type": "tool_use", "id": id, "name": name, "input": {}, "caller": {"type": "direct"},
                    });
                    self.open(Block::Tool, block, frames);
                }
                Event::CallArguments { text, .. } => {
                    self.delta(
                        json!({"type": "input_json_delta", "partial_json": text}),
                        frames,
                    );
                }
                Event::CallEnded => self.close(frames),
                Event::Logprobs(_) => {}
                Event::Ended { finish, usage, .. } => {
                    if self.n_blocks == 0 && self.open.is_none() {
                        let block = json!({"type": "text", "text": "", "citations": []});
                        self.open(Block::Text, block, frames);
                    }
                    self.close(frames);
                    let (reason, stop) = stop_reason(Some(&finish));
                    frames.push_back(Frame::named(
                        "message_delta",
                        &json!({
                            "type": "message_delta",
                            "delta": {"stop_reason": reason, "stop_sequence": stop},
                            "usage": usage_of(usage),
                        }),
                    ));
                    let stop = json!({"type": "message_stop"});
                    frames.push_back(Frame::named("message_stop", &stop));
                }
                Event::Failed(error) => {
                    let error = ApiError::from(error).body(Dialect::Anthropic);
                    frames.push_back(Frame::named("error", &error));
                }
            }
        }
    }

    fn end(&mut self, _: &mut VecDeque<Frame>) {}
}
