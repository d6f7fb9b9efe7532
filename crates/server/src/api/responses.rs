//! `/v1/responses`: OpenAI's newer dialect, as Codex and Open Responses speak it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use sterna::constraint::Grammar;
use sterna::sampling::SamplingOptions;

use super::json::{At, Checked};
use super::shape::{COUNT, OBJECT, Shape, TEXT, field, items, required, word};
use super::stream::{self, Encoder, Frame};
use super::{ApiError, Caller, Named, Shared, openai};
use crate::answer::tools::as_mapping;
use crate::answer::{Answers, Ask, Asked, Call, Event, Finish, Prompt, Usage, Whole};

/// Responses that are kept at most, to be continued.
const MAX_STORED: usize = 1024;
/// Bytes of their conversations at most.
const MAX_STORED_BYTES: usize = 64 << 20;

/// Conversations that ended with a response, the oldest first.
#[derive(Default)]
pub(crate) struct Store(Mutex<Stored>);

#[derive(Default)]
struct Stored {
    all: VecDeque<(String, usize, Arc<Conversation>)>,
    bytes: usize,
}

/// A conversation, and whose it is.
struct Conversation {
    key: usize,
    messages: Vec<Value>,
}

impl Store {
    fn add(&self, id: String, key: usize, messages: Vec<Value>) {
        let bytes = messages
            .iter()
            .map(|message| message.to_string().len())
            .sum();
        let mut stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let conversation = Arc::new(Conversation { key, messages });
        stored.all.push_back((id, bytes, conversation));
        stored.bytes += bytes;
        while stored.all.len() > MAX_STORED || stored.bytes > MAX_STORED_BYTES {
            let Some((_, bytes, _)) = stored.all.pop_front() else {
                break;
            };
            stored.bytes -= bytes;
        }
    }

    /// The conversation that the response `id` to `key` ended.
    fn get(&self, id: &str, key: usize) -> Option<Vec<Value>> {
        let stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = stored.all.iter().find(|(own, ..)| own == id);
        let (.., conversation) = found.filter(|(.., conversation)| conversation.key == key)?;
        Some(conversation.messages.clone())
    }
}

/// What a request may have.
pub(super) const REQUEST: Shape = Shape::Object(&[
    &[
        required("model", Shape::Model),
        field("input", Shape::OneOf(&[TEXT, items(&ITEM, "items")])),
        field("instructions", TEXT),
        field("previous_response_id", TEXT),
        field("max_output_tokens", COUNT),
        field("stream", Shape::Flag),
        field("store", Shape::Flag),
        field("text", Shape::Object(&[&[field("format", FORMAT)]])),
        // What is only said again.
        field("metadata", Shape::Any),
        field("prompt_cache_key", Shape::Any),
        field("safety_identifier", Shape::Any),
        field("user", Shape::Any),
    ],
    openai::fields::SAMPLING,
    openai::fields::TOOLS,
    openai::fields::TEMPLATE,
]);

/// What the text of an answer has to match.
const FORMAT: Shape = Shape::OneOf(&[
    Shape::Object(&[&[required("type", word(&["text", "json_object"]))]]),
    Shape::Object(&[&[
        required("type", word(openai::fields::FORMATS)),
        required("schema", OBJECT),
    ]]),
]);

const MESSAGE: &[&str] = &["message"];
const CALL: &[&str] = &["function_call"];
const OUTPUT: &[&str] = &["function_call_output"];
const KNOWN: &[&str] = &["message", "function_call", "function_call_output"];

/// What a conversation has: messages, calls and their results; items of other kinds are of tools that aren't here.
const ITEM: Shape = Shape::OneOf(&[
    Shape::Object(&[&[
        field("type", word(MESSAGE)),
        required("role", word(&["system", "developer", "user", "assistant"])),
        required("content", openai::fields::CONTENT),
    ]]),
    Shape::Object(&[&[
        required("type", word(CALL)),
        required("name", TEXT),
        field("call_id", TEXT),
        field("arguments", TEXT),
    ]]),
    Shape::Object(&[&[
        required("type", word(OUTPUT)),
        required("call_id", TEXT),
        field("output", openai::fields::CONTENT),
    ]]),
    Shape::Object(&[&[required("type", Shape::OtherThan(KNOWN))]]),
]);

pub(super) async fn answer(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model(&at.get("model"))?;
    let previous = at.get("previous_response_id");
    let mut messages = match previous.text() {
        None => Vec::new(),
        Some(id) => app.store.get(id, caller.key).ok_or_else(|| {
            previous
                .refused(format!("there is no response {id:?}, or not any more"))
                .with_code("previous_response_not_found")
        })?,
    };
    input(&at.get("input"), &mut messages)?;
    // Instructions are of this response alone.
    let mut prompt = messages.clone();
    if let Some(text) = at.get("instructions").text() {
        prompt.insert(0, json!({"role": "system", "content": text}));
    }
    merge_instructions(&mut prompt);
    let parallel = at.get("parallel_tool_calls").flag().unwrap_or(true);
    let (told, calls) = openai::tools(
        &at.get("tools"),
        &at.get("tool_choice"),
        parallel,
        &app.settings,
    )?;
    let conversation = openai::conversation(&at, prompt, told);
    let ask = Ask {
        prompt: Prompt::Chat(conversation),
        n: 1,
        sampling: openai::sampling(&at),
        max_tokens: at.get("max_output_tokens").whole(),
        max_thought: openai::max_thought(&at),
        logprobs: None,
        grammar: grammar(&at, &app)?,
        calls,
        ..Ask::default()
    };
    let is_streamed = at.get("stream").flag().unwrap_or(false);
    let is_stored = at.get("store").flag().unwrap_or(true);
    let form = Form::new(&at, &model, &ask.sampling);
    let answers = app.answers(&caller, &model, "responses", vec![ask]).await?;
    let stored = is_stored.then(|| Kept {
        app: Arc::clone(&app),
        key: caller.key,
        messages,
    });
    let encoder = ResponseStream {
        form,
        stored,
        whole: Whole::default(),
        output: Vec::new(),
        open: None,
        number: 0,
    };
    match is_streamed {
        true => Ok(stream::respond(answers, encoder)),
        false => whole(answers, encoder).await,
    }
}

/// The answer at once: the response with which its stream would end.
async fn whole(mut answers: Answers, mut encoder: ResponseStream) -> Result<Response, ApiError> {
    let mut frames = VecDeque::new();
    let mut last = Value::Null;
    while let Some((_, events)) = answers.next().await {
        for event in events {
            if let Event::Failed(error) = event {
                return Err(error.into());
            }
            if let Some(response) = encoder.event(event, &mut frames) {
                last = response;
            }
            frames.clear();
        }
    }
    Ok(Json(last).into_response())
}

/// One message of instructions, at the beginning, which is where templates want it.
fn merge_instructions(messages: &mut Vec<Value>) {
    let is_system = |message: &Value| message["role"] == "system";
    let texts = messages.iter().filter(|message| is_system(message));
    let texts: Vec<&str> = texts
        .filter_map(|message| message["content"].as_str())
        .collect();
    if texts.is_empty() {
        return;
    }
    let text = texts.join("\n\n");
    messages.retain(|message| !is_system(message));
    messages.insert(0, json!({"role": "system", "content": text}));
}

fn grammar(at: &At<'_>, app: &Shared) -> Result<Option<Asked>, ApiError> {
    let format = at.get("text").get("format");
    let grammar = match format.get("type").text() {
        Some("json_object") => Some(Grammar::JsonObject),
        Some("json_schema") => {
            let schema = format.get("schema").value().to_string();
            Some(Grammar::JsonSchema(schema))
        }
        _ => None,
    };
    match grammar.is_some() && !app.settings.grammars {
        true => Err(format.refused("this server takes no schemas, patterns or grammars")),
        false => Ok(grammar.map(|grammar| format.asks(grammar))),
    }
}

/// Adds what `field` says to `messages`.
fn input(field: &At<'_>, messages: &mut Vec<Value>) -> Result<(), ApiError> {
    if let Value::String(text) = field.value() {
        messages.push(json!({"role": "user", "content": text}));
        return Ok(());
    }
    for item in field.items() {
        let kind = item.get("type");
        match kind.text() {
            None | Some("message") => {
                let role = match item.get("role").required_text()? {
                    "developer" => "system",
                    known => known,
                };
                let text = openai::text_of(&item.get("content"));
                messages.push(json!({"role": role, "content": text}));
            }
            Some("function_call") => {
                let name = item.get("name").required_text()?;
                let id = item.get("call_id").text().unwrap_or_default();
                let arguments = item.get("arguments").text().unwrap_or_default();
                let call = openai::called(id, name, as_mapping(arguments));
                add_call(messages, call);
            }
            Some("function_call_output") => {
                let id = item.get("call_id").required_text()?;
                let text = openai::text_of(&item.get("output"));
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": text}));
            }
            // What models thought before isn't told again; other items are of tools that aren't here.
            Some(_) => {}
        }
    }
    Ok(())
}

/// Adds `call` to the newest message, if that is the model's, or in one of its own.
fn add_call(messages: &mut Vec<Value>, call: Value) {
    if let Some(message) = messages.last_mut()
        && message["role"] == "assistant"
    {
        match &mut message["tool_calls"] {
            Value::Array(calls) => calls.push(call),
            other => *other = json!([call]),
        }
        return;
    }
    messages.push(json!({"role": "assistant", "content": "", "tool_calls": [call]}));
}

/// What a response repeats of its request.
struct Form {
    id: String,
    created: u64,
    model: String,
    repeated: Map<String, Value>,
}

impl Form {
    /// Of a request that is answered with `sampling`.
    fn new(at: &At<'_>, model: &Named, sampling: &SamplingOptions) -> Form {
        let used = sampling.config(&model.text.recommended);
        // Numbers as clients write them.
        let number = |value: f32| Value::from((f64::from(value) * 1e6).round() / 1e6);
        let or = |name: &str, default: Value| match at.get(name).value() {
            Value::Null => default,
            value => value.clone(),
        };
        let tools = match at.get("tools").value() {
            Value::Array(tools) => tools
                .iter()
                .filter(|tool| tool["type"] == "function")
                .map(|tool| {
                    json!({
                        "type": "function",
                        "name": tool["name"],
                        "description": tool["description"],
                        "parameters": tool["parameters"],
                        "strict": tool["strict"].as_bool().unwrap_or(true),
                    })
                })
                .collect(),
            _ => Vec::new(),
        };
        let reasoning = at.get("reasoning");
        let format = at.get("text").get("format");
        let format = match format.is_absent() {
            true => json!({"type": "text"}),
            false => format.value().clone(),
        };
        let repeated = [
            (
                "previous_response_id",
                or("previous_response_id", Value::Null),
            ),
            ("instructions", or("instructions", Value::Null)),
            ("tools", tools.into()),
            ("tool_choice", or("tool_choice", "auto".into())),
            ("truncation", "disabled".into()),
            (
                "parallel_tool_calls",
                or("parallel_tool_calls", true.into()),
            ),
            ("text", json!({ "format": format })),
            ("top_p", or("top_p", number(used.top_p))),
            (
                "presence_penalty",
                or("presence_penalty", number(used.presence_penalty)),
            ),
            (
                "frequency_penalty",
                or("frequency_penalty", number(used.frequency_penalty)),
            ),
            ("top_logprobs", 0.into()),
            ("temperature", or("temperature", number(used.temperature))),
            (
                "reasoning",
                json!({
                    "effort": reasoning.get("effort").value(),
                    "summary": reasoning.get("summary").value(),
                }),
            ),
            ("max_output_tokens", or("max_output_tokens", Value::Null)),
            ("max_tool_calls", Value::Null),
            ("store", or("store", true.into())),
            ("background", false.into()),
            ("service_tier", "default".into()),
            ("metadata", or("metadata", json!({}))),
            ("safety_identifier", or("safety_identifier", Value::Null)),
            ("prompt_cache_key", or("prompt_cache_key", Value::Null)),
            ("user", or("user", Value::Null)),
        ];
        let repeated = repeated.map(|(name, value)| (name.to_owned(), value));
        Form {
            id: crate::id::new("resp_"),
            created: openai::now(),
            model: model.name.clone(),
            repeated: repeated.into_iter().collect(),
        }
    }

    fn response(
        &self,
        status: &str,
        output: &[Value],
        usage: Option<Usage>,
        error: Value,
    ) -> Value {
        let is_over = status != "in_progress";
        let usage = usage.map(|usage| {
            json!({
                "input_tokens": usage.n_prompt,
                "input_tokens_details": {"cached_tokens": usage.n_cached},
                "output_tokens": usage.n_generated,
                "output_tokens_details": {"reasoning_tokens": usage.n_reasoning},
                "total_tokens": usage.n_prompt + usage.n_generated,
            })
        });
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": is_over.then(openai::now),
            "status": status,
            "incomplete_details": (status == "incomplete").then(|| json!({"reason": "max_output_tokens"})),
            "model": self.model,
            "output": output,
            "error": error,
            "usage": usage,
        });
        if let Value::Object(members) = &mut response {
            members.extend(self.repeated.clone());
        }
        response
    }
}

/// A conversation that is kept once it has an answer.
struct Kept {
    app: Shared,
    key: usize,
    messages: Vec<Value>,
}

/// An item of the output that has begun.
struct Open {
    kind: Kind,
    id: String,
    /// Its text, or its arguments.
    text: String,
    call: Option<Call>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call,
}

struct ResponseStream {
    form: Form,
    stored: Option<Kept>,
    whole: Whole,
    /// Items that are complete.
    output: Vec<Value>,
    open: Option<Open>,
    /// The number of the next event.
    number: usize,
}

impl ResponseStream {
    fn send(&mut self, name: &'static str, data: Value, frames: &mut VecDeque<Frame>) {
        let mut event = Map::new();
        event.insert("type".to_owned(), name.into());
        event.insert("sequence_number".to_owned(), self.number.into());
        if let Value::Object(data) = data {
            event.extend(data);
        }
        self.number += 1;
        frames.push_back(Frame::named(name, &event.into()));
    }

    /// Encodes one event; returns the response, once it is complete.
    fn event(&mut self, event: Event, frames: &mut VecDeque<Frame>) -> Option<Value> {
        match event {
            Event::Begun { .. } => {
                for name in ["response.created", "response.in_progress"] {
                    let response = self.form.response("in_progress", &[], None, Value::Null);
                    self.send(name, json!({ "response": response }), frames);
                }
            }
            Event::Reasoning(text) => {
                self.open(Kind::Reasoning, None, frames);
                self.add("response.reasoning_text.delta", &text, frames);
                self.whole.reasoning += &text;
            }
            Event::Text(text) => {
                self.open(Kind::Message, None, frames);
                self.add("response.output_text.delta", &text, frames);
                self.whole.text += &text;
            }
            Event::CallBegun { id, name, .. } => {
                let call = Call {
                    id,
                    name,
                    arguments: String::new(),
                };
                self.open(Kind::Call, Some(call), frames);
            }
            Event::CallArguments { text, .. } => {
                self.add("response.function_call_arguments.delta", &text, frames);
            }
            Event::CallEnded => self.close("completed", frames),
            Event::Logprobs(_) => {}
            Event::Ended { finish, usage, .. } => return Some(self.finish(&finish, usage, frames)),
            Event::Failed(error) => {
                let error = ApiError::from(error).response_error();
                let output = std::mem::take(&mut self.output);
                let response = self.form.response("failed", &output, None, error);
                self.send("response.failed", json!({ "response": response }), frames);
            }
        }
        None
    }

    fn finish(&mut self, finish: &Finish, usage: Usage, frames: &mut VecDeque<Frame>) -> Value {
        let (status, name) = match finish {
            Finish::Length => ("incomplete", "response.incomplete"),
            _ => ("completed", "response.completed"),
        };
        if self.output.is_empty() && self.open.is_none() {
            self.open(Kind::Message, None, frames);
        }
        self.close(status, frames);
        let output = std::mem::take(&mut self.output);
        let response = self
            .form
            .response(status, &output, Some(usage), Value::Null);
        if let Some(mut kept) = self.stored.take() {
            let calls = self
                .whole
                .calls
                .iter()
                .map(|call| openai::called(&call.id, &call.name, as_mapping(&call.arguments)));
            let calls: Vec<Value> = calls.collect();
            let mut message = json!({"role": "assistant", "content": self.whole.text});
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            kept.messages.push(message);
            let id = self.form.id.clone();
            kept.app.store.add(id, kept.key, kept.messages);
        }
        self.send(name, json!({ "response": response }), frames);
        response
    }

    /// Begins an item, unless one of the kind is open that goes on.
    fn open(&mut self, kind: Kind, call: Option<Call>, frames: &mut VecDeque<Frame>) {
        if kind != Kind::Call && self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", frames);
        let prefix = match kind {
            Kind::Reasoning => "rs_",
            Kind::Message => "msg_",
            Kind::Call => "fc_",
        };
        let open = Open {
            kind,
            id: crate::id::new(prefix),
            text: String::new(),
            call,
        };
        let item = open.item("in_progress");
        let index = self.output.len();
        let id = open.id.clone();
        self.open = Some(open);
        let added = json!({"output_index": index, "item": item});
        self.send("response.output_item.added", added, frames);
        if kind != Kind::Call {
            let part = part(kind, "");
            let added = json!({
                "item_id": id, "output_index": index, "content_index": 0, "part": part,
            });
            self.send("response.content_part.added", added, frames);
        }
    }

    /// Adds to the text of the open item.
    fn add(&mut self, name: &'static str, text: &str, frames: &mut VecDeque<Frame>) {
        let index = self.output.len();
        let Some(open) = &mut self.open else { return };
        open.text += text;
        let mut delta = json!({"item_id": open.id, "output_index": index, "delta": text});
        if open.kind != Kind::Call {
            delta["content_index"] = 0.into();
        }
        if open.kind == Kind::Message {
            delta["logprobs"] = json!([]);
        }
        self.send(name, delta, frames);
    }

    /// Ends the open item, if there is one.
    fn close(&mut self, status: &str, frames: &mut VecDeque<Frame>) {
        let Some(mut open) = self.open.take() else {
            return;
        };
        let index = self.output.len();
        let place = json!({"item_id": open.id, "output_index": index, "content_index": 0});
        let with = |more: Value| match (place.clone(), more) {
            (Value::Object(mut place), Value::Object(more)) => {
                place.extend(more);
                Value::Object(place)
            }
            (place, _) => place,
        };
        match open.kind {
            Kind::Call => {
                if let Some(call) = &mut open.call {
                    call.arguments.clone_from(&open.text);
                    self.whole.calls.push(call.clone());
                    let done = json!({
                        "item_id": open.id, "output_index": index,
                        "name": call.name, "arguments": call.arguments,
                    });
                    self.send("response.function_call_arguments.done", done, frames);
                }
            }
            kind => {
                let mut done = json!({ "text": open.text });
                let name = match kind {
                    Kind::Message => {
                        done["logprobs"] = json!([]);
                        "response.output_text.done"
                    }
                    _ => "response.reasoning_text.done",
                };
                self.send(name, with(done), frames);
                let done = with(json!({"part": part(kind, &open.text)}));
                self.send("response.content_part.done", done, frames);
            }
        }
        let item = open.item(status);
        let done = json!({"output_index": index, "item": item});
        self.send("response.output_item.done", done, frames);
        self.output.push(item);
    }
}

impl Open {
    /// The item as it is so far.
    fn item(&self, status: &str) -> Value {
        let is_begun = status == "in_progress";
        match (self.kind, &self.call) {
            (Kind::Call, Some(call)) => json!({
                "type": "function_call",
                "id": self.id,
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }),
            (Kind::Reasoning, _) => {
                let content = match is_begun {
                    true => Vec::new(),
                    false => vec![part(self.kind, &self.text)],
                };
                json!({
                    "type": "reasoning",
                    "id": self.id,
                    "summary": [],
                    "content": content,
                    "encrypted_content": null,
                    "status": status,
                })
            }
            _ => {
                let content = match is_begun {
                    true => Vec::new(),
                    false => vec![part(self.kind, &self.text)],
                };
                json!({
                    "type": "message",
                    "id": self.id,
                    "role": "assistant",
                    "status": status,
                    "content": content,
                })
            }
        }
    }
}

fn part(kind: Kind, text: &str) -> Value {
    match kind {
        Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
        _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
    }
}

impl Encoder for ResponseStream {
    fn encode(&mut self, _: usize, events: Vec<Event>, frames: &mut VecDeque<Frame>) {
        for event in events {
            self.event(event, frames);
        }
    }

    fn end(&mut self, _: &mut VecDeque<Frame>) {}
}
