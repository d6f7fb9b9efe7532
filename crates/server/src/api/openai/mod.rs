//! OpenAI's dialect: what chat and completions have in common.

pub(super) mod chat;
pub(super) mod completions;
pub(super) mod fields;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use sterna::constraint::Grammar;
use sterna::receipt::Receipt;
use sterna::sampling::SamplingOptions;
use sterna_text::{Encode, Tokenizer};

use super::json::At;
use super::shape::{empty_enum, refused};
use super::stream::Frame;
use super::{ApiError, Dialect, Named};
use crate::answer::tools::{Tool, as_mapping, quoted};
use crate::answer::{Asked, Calls, Finish, ScoredToken, Usage};
use crate::model::{Conversation, ModelText};
use crate::settings::Settings;

/// Answers to a request at most.
const MAX_CHOICES: usize = 128;
/// The most probable tokens that may be asked for.
const MAX_TOP: usize = 20;
/// Stop strings of a request at most.
const MAX_STOPS: usize = 16;
/// What JSON has for a logarithm of 0.
const LOG_ZERO: f32 = -9999.0;

/// What the runtime is called where a fingerprint is asked for.
pub(super) fn fingerprint() -> String {
    format!("sterna-{}", crate::VERSION)
}

/// The time in seconds.
pub(super) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_secs()
}

/// How tokens are sampled.
pub(super) fn sampling(body: &At<'_>) -> SamplingOptions {
    let penalty = body.get_any(&["repetition_penalty", "repeat_penalty"]);
    SamplingOptions {
        temperature: body.get("temperature").number(),
        top_k: body.get("top_k").whole(),
        top_p: top_p(body),
        min_p: body.get("min_p").number(),
        repeat_penalty: penalty.number(),
        repeat_last_n: None,
        frequency_penalty: body.get("frequency_penalty").number(),
        presence_penalty: body.get("presence_penalty").number(),
        logit_bias: logit_bias(&body.get("logit_bias")),
        seed: body.get("seed").seed(),
    }
}

/// Whether a receipt of the answer is asked for.
///
/// Errors: none are written of `model`.
pub(super) fn receipt(body: &At<'_>, model: &ModelText) -> Result<bool, ApiError> {
    let field = body.get("receipt");
    match field.flag() {
        Some(true) if !model.has_receipts => {
            Err(field.refused("this server writes no receipts: it was started without --receipts"))
        }
        asked => Ok(asked.unwrap_or(false)),
    }
}

/// Adds the receipt of an answer to `choice`, if there is one.
///
/// It is made of its text, in which numbers are as short as they are signed.
fn add_receipt(choice: &mut Value, receipt: Option<&Receipt>) {
    if let Some(receipt) = receipt {
        let json = serde_json::from_str(&receipt.to_json());
        choice["receipt"] = json.expect("what was written is JSON");
    }
}

/// The share of the most probable tokens. The sampler takes no 0; what is nearly 0 also keeps only the best token.
pub(super) fn top_p(body: &At<'_>) -> Option<f32> {
    let top_p = body.get("top_p").number();
    top_p.map(|p| p.max(f32::MIN_POSITIVE))
}

fn logit_bias(field: &At<'_>) -> Vec<(u32, f32)> {
    let members = field.object().into_iter().flatten();
    members
        .filter_map(|(id, _)| {
            let bias = field.get(id).number()?;
            // The most that is asked for bans a token.
            let bias = match bias <= -100.0 {
                true => f32::NEG_INFINITY,
                false => bias,
            };
            Some((id.parse().ok()?, bias))
        })
        .collect()
}

/// What the answer has to match, in any of the ways in which clients say it.
pub(super) fn grammar(body: &At<'_>, settings: &Settings) -> Result<Option<Asked>, ApiError> {
    let schema = |field: &At<'_>| {
        Grammar::JsonSchema(match field.value() {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        })
    };
    let format = body.get("response_format");
    let asked = match format.get("type").text() {
        Some("json_object") if format.get("schema").is_absent() => Some(Grammar::JsonObject),
        Some("json_object") => Some(schema(&format.get("schema"))),
        Some("json_schema") => {
            let inner = format.get("json_schema").get("schema");
            Some(schema(&match inner.is_absent() {
                true => format.get("schema"),
                false => inner,
            }))
        }
        _ => None,
    };
    let asked = asked.map(|grammar| (format, grammar));
    let structured = body.get("structured_outputs");
    let mut all: Vec<(At<'_>, Grammar)> = asked.into_iter().collect();
    for field in [
        body.get("guided_json"),
        body.get("json_schema"),
        structured.get("json"),
    ] {
        if !field.is_absent() {
            let grammar = schema(&field);
            all.push((field, grammar));
        }
    }
    for field in [
        body.get("guided_regex"),
        body.get("regex"),
        structured.get("regex"),
    ] {
        if let Some(text) = field.text() {
            all.push((field, Grammar::Regex(text.to_owned())));
        }
    }
    for field in [
        body.get("guided_grammar"),
        body.get("grammar"),
        structured.get("grammar"),
    ] {
        if let Some(text) = field.text() {
            all.push((field, Grammar::Lark(text.to_owned())));
        }
    }
    for field in [body.get("guided_choice"), structured.get("choice")] {
        if !field.is_absent() {
            let choices = field.items().into_iter();
            let choices = choices.map(|choice| quoted(choice.text().unwrap_or_default()));
            let choices: Vec<String> = choices.collect();
            let grammar = Grammar::Lark(format!("start: {}\n", choices.join(" | ")));
            all.push((field, grammar));
        }
    }
    let object = structured.get("json_object");
    if object.flag() == Some(true) {
        all.push((object, Grammar::JsonObject));
    }
    if !structured.is_absent() && all.is_empty() {
        return Err(structured
            .refused("expected json, json_object, regex, choice or grammar, found none of them"));
    }
    let mut all = all.into_iter();
    match (all.next(), all.next()) {
        (None, _) => Ok(None),
        (Some((field, _)), _) if !settings.grammars => {
            Err(field.refused("this server takes no schemas, patterns or grammars"))
        }
        (Some((field, grammar)), None) => Ok(Some(field.asks(grammar))),
        (_, Some((field, _))) => {
            Err(field.refused("expected one thing that the answer has to match, found several"))
        }
    }
}

/// The functions that `field`, a list of tools, has, and how they may be called. Tools of other kinds are left out.
pub(super) fn tools(
    field: &At<'_>,
    choice: &At<'_>,
    parallel: bool,
    settings: &Settings,
) -> Result<(Vec<Value>, Calls), ApiError> {
    let (mut told, mut tools) = (Vec::new(), Vec::new());
    for tool in field.items() {
        if tool
            .get("type")
            .text()
            .is_some_and(|kind| kind != "function")
        {
            continue;
        }
        // The Responses API has no level between.
        let inner = tool.get("function");
        let function = match inner.is_absent() {
            true => tool.clone(),
            false => inner,
        };
        let (told_of, function) = tool_of(
            &function.get("name"),
            &function.get("description"),
            &function.get("parameters"),
            &function.get("strict"),
            settings,
        )?;
        told.push(told_of);
        tools.push(function);
    }
    let named = match choice.value() {
        Value::Object(_) => match choice.get("type").text() {
            Some("allowed_tools") => None,
            _ => {
                let inner = choice.get("function").get("name");
                let name = match inner.is_absent() {
                    true => choice.get("name"),
                    false => inner,
                };
                Some((name.required_text()?.to_owned(), name))
            }
        },
        _ => None,
    };
    if let Some((name, at)) = named {
        tools.retain(|tool| tool.name == name);
        if tools.is_empty() {
            return Err(at.refused(format!("expected the name of a tool, found {name:?}")));
        }
        return must(choice, told, tools, false, settings);
    }
    let mode = match choice.value() {
        Value::Object(_) => choice.get("mode").text(),
        _ => choice.text(),
    };
    match mode {
        Some("none") => Ok((Vec::new(), Calls::None)),
        None | Some("auto") if tools.is_empty() => Ok((Vec::new(), Calls::None)),
        None | Some("auto") => Ok((told, Calls::May { tools, parallel })),
        Some(_) => must(choice, told, tools, parallel, settings),
    }
}

/// Calls that there have to be.
pub(super) fn must(
    choice: &At<'_>,
    told: Vec<Value>,
    tools: Vec<Tool>,
    parallel: bool,
    settings: &Settings,
) -> Result<(Vec<Value>, Calls), ApiError> {
    if tools.is_empty() {
        return Err(choice.refused("a call is required: expected tools, found none"));
    }
    if !settings.grammars {
        return Err(choice.refused("this server takes no schemas, so no call can be required"));
    }
    Ok((told, Calls::Must { tools, parallel }))
}

/// A function, as templates are told of it, and as calls of it are read.
pub(super) fn tool_of(
    name: &At<'_>,
    description: &At<'_>,
    parameters: &At<'_>,
    strict: &At<'_>,
    settings: &Settings,
) -> Result<(Value, Tool), ApiError> {
    let text = name.required_text()?;
    let schema = parameters.object().map(|_| parameters.value());
    if let Some(path) = schema.and_then(|schema| empty_enum(schema, parameters.path())) {
        return Err(refused(&path, "expected a value at least, found none"));
    }
    let mut tool = Tool::new(text, schema);
    tool.strict = strict.flag() == Some(true);
    if tool.strict && !settings.grammars {
        return Err(strict.refused("this server takes no schemas, so no call can be held to one"));
    }
    let told = json!({"type": "function", "function": {
        "name": text,
        "description": description.text().unwrap_or_default(),
        "parameters": schema.cloned().unwrap_or_else(|| json!({"type": "object", "properties": {}})),
    }});
    Ok((told, tool))
}

/// Messages in the form that templates know: texts joined, arguments as mappings.
pub(super) fn messages(field: &At<'_>) -> Result<Vec<Value>, ApiError> {
    field.items().iter().map(message).collect()
}

fn message(at: &At<'_>) -> Result<Value, ApiError> {
    let role = match at.get("role").required_text()? {
        "developer" => "system",
        known => known,
    };
    let calls = at.get("tool_calls");
    let content = text_of(&at.get("content"));
    let mut message = Map::new();
    message.insert("role".to_owned(), role.into());
    message.insert("content".to_owned(), content.into());
    if let Some(thought) = at
        .get_any(&["reasoning", "reasoning_content"])
        .value()
        .as_str()
    {
        message.insert("reasoning_content".to_owned(), thought.into());
    }
    let calls = calls.items();
    if !calls.is_empty() {
        let calls = calls.iter().map(|call| {
            let function = call.get("function");
            let name = function.get("name").required_text()?;
            let arguments = match function.get("arguments").value() {
                Value::String(text) => as_mapping(text),
                Value::Null => json!({}),
                other => other.clone(),
            };
            let id = call.get("id").text().unwrap_or_default();
            Ok(called(id, name, arguments))
        });
        let calls = calls.collect::<Result<Vec<_>, ApiError>>()?;
        message.insert("tool_calls".to_owned(), calls.into());
    }
    for name in ["tool_call_id", "name"] {
        if let Some(text) = at.get(name).text() {
            message.insert(name.to_owned(), text.into());
        }
    }
    Ok(message.into())
}

/// A call, in a message for templates.
pub(super) fn called(id: &str, name: &str, arguments: Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// The text of a message's content: itself, or its parts, joined by line breaks; empty if there is none.
pub(super) fn text_of(content: &At<'_>) -> String {
    if let Value::Array(_) = content.value() {
        let parts = content.items().into_iter();
        let texts = parts.filter_map(|part| part.get_any(&["text", "refusal"]).text());
        return texts.collect::<Vec<_>>().join("\n");
    }
    content.text().unwrap_or_default().to_owned()
}

/// A conversation, with what else its template is told.
pub(super) fn conversation(body: &At<'_>, messages: Vec<Value>, tools: Vec<Value>) -> Conversation {
    let variables = body.get("chat_template_kwargs");
    let thinking = variables.get("enable_thinking").flag();
    let mut variables = variables.object().cloned().unwrap_or_default();
    variables.remove("enable_thinking");
    // What the conversation itself is can't be said twice.
    for name in ["messages", "tools", "documents", "add_generation_prompt"] {
        variables.remove(name);
    }
    let effort = body.get("reasoning_effort");
    let effort = match effort.is_absent() {
        true => body.get("reasoning").get("effort"),
        false => effort,
    };
    let effort = effort.text();
    if let Some(effort) = effort {
        let value = Value::from(effort);
        variables.entry("reasoning_effort").or_insert(value);
    }
    Conversation {
        messages,
        tools,
        thinking: thinking.or((effort == Some("none")).then_some(false)),
        variables,
        begun: None,
    }
}

/// Tokens that the model may think.
pub(super) fn max_thought(body: &At<'_>) -> Option<usize> {
    let own = body.get("thinking_token_budget").whole();
    own.or_else(|| body.get("reasoning").get("max_tokens").whole())
}

/// Texts, or texts as tokens.
pub(super) enum Input {
    Text(String),
    Ids(Vec<u32>),
}

/// What `field` has: a text, an array of texts, the ids of one, or an array of those.
pub(super) fn inputs(field: &At<'_>, model: &ModelText) -> Result<Vec<Input>, ApiError> {
    let Value::Array(items) = field.value() else {
        let text = field.required_text()?;
        return Ok(vec![Input::Text(text.to_owned())]);
    };
    match items.first() {
        Some(Value::Number(_)) => Ok(vec![Input::Ids(field.ids(model.n_vocab)?)]),
        Some(Value::Array(_)) => {
            let items = field.items();
            let inner = items
                .iter()
                .map(|item| item.ids(model.n_vocab).map(Input::Ids));
            inner.collect()
        }
        _ => Ok(field.texts().into_iter().map(Input::Text).collect()),
    }
}

/// The tokens of `inputs`.
pub(super) fn encoded(
    inputs: Vec<Input>,
    model: &ModelText,
    encode: Encode,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let encoded = inputs.into_iter().map(|input| match input {
        Input::Ids(ids) => Ok(ids),
        Input::Text(text) => {
            let ids = model.tokenizer.encode(&text, encode);
            Ok(ids.map_err(sterna::Error::from)?)
        }
    });
    encoded.collect()
}

/// How many answers.
pub(super) fn n_choices(body: &At<'_>) -> usize {
    body.get("n").whole().unwrap_or(1)
}

/// Whether the answer is streamed, and whether that ends with its usage.
pub(super) fn streaming(body: &At<'_>) -> (bool, bool) {
    let options = body.get("stream_options");
    let usage = options.get("include_usage").flag().unwrap_or(false);
    (body.get("stream").flag().unwrap_or(false), usage)
}

pub(super) fn finish_reason(finish: Option<&Finish>) -> &'static str {
    match finish {
        Some(Finish::Length) => "length",
        Some(Finish::Calls) => "tool_calls",
        Some(Finish::Stop | Finish::StopString(_)) | None => "stop",
    }
}

/// The tokens of several answers to prompts: those of a prompt count once for each of `n` answers to it.
#[derive(Debug, Default, Clone)]
pub(super) struct UsageSum {
    all: Vec<Option<Usage>>,
    per_prompt: usize,
}

impl UsageSum {
    /// Of answers to prompts, each of which has `per_prompt`.
    pub(super) fn new(per_prompt: usize) -> UsageSum {
        UsageSum {
            all: Vec::new(),
            per_prompt: per_prompt.max(1),
        }
    }

    /// Adds the usage of the answer `choice`.
    pub(super) fn add(&mut self, choice: usize, usage: Usage) {
        if self.all.len() <= choice {
            self.all.resize(choice + 1, None);
        }
        self.all[choice] = Some(usage);
    }

    /// In OpenAI's shape: a prompt counts once, and as much of it was cached as for its first answer.
    pub(super) fn json(&self) -> Value {
        let (mut n_prompt, mut n_cached, mut n_generated, mut n_reasoning) = (0, 0, 0, 0);
        for (choice, usage) in self.all.iter().enumerate() {
            let Some(usage) = usage else { continue };
            if choice % self.per_prompt.max(1) == 0 {
                n_prompt += usage.n_prompt;
                n_cached += usage.n_cached;
            }
            n_generated += usage.n_generated;
            n_reasoning += usage.n_reasoning;
        }
        json!({
            "prompt_tokens": n_prompt,
            "completion_tokens": n_generated,
            "total_tokens": n_prompt + n_generated,
            "prompt_tokens_details": {"cached_tokens": n_cached},
            "completion_tokens_details": {"reasoning_tokens": n_reasoning},
        })
    }
}

/// What every part of a response says of it.
pub(super) struct Head {
    id: String,
    created: u64,
    /// What the request called the model.
    name: String,
    model: Arc<ModelText>,
}

impl Head {
    /// Of a response by `model`, with an id that begins with `prefix`.
    pub(super) fn new(prefix: &str, model: &Named) -> Head {
        Head {
            id: crate::id::new(prefix),
            created: now(),
            name: model.name.clone(),
            model: Arc::clone(&model.text),
        }
    }

    /// The kind of response called `object`, with these choices.
    fn body(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.name,
            "system_fingerprint": fingerprint(),
            "choices": choices,
        })
    }
}

/// What chunks of a stream have in common, whatever is in their choices.
pub(super) struct Chunks {
    /// The kind of chunks.
    object: &'static str,
    /// Of all answers, if it is asked for.
    usage: Option<UsageSum>,
    has_failed: bool,
}

impl Chunks {
    /// Chunks of the kind `object`; the usage of `n` answers to each prompt comes last if `with_usage`.
    fn new(object: &'static str, with_usage: bool, n: usize) -> Chunks {
        Chunks {
            object,
            usage: with_usage.then(|| UsageSum::new(n)),
            has_failed: false,
        }
    }

    fn chunk(&self, head: &Head, choices: Value, usage: Option<Value>) -> Frame {
        let mut chunk = head.body(self.object, choices);
        if self.usage.is_some() {
            chunk["usage"] = usage.unwrap_or(Value::Null);
        }
        Frame::data(&chunk)
    }

    /// A chunk with a part of one answer.
    fn of(&self, head: &Head, choice: Value) -> Frame {
        self.chunk(head, json!([choice]), None)
    }

    /// Notes what the answer `choice`, which has ended, used.
    fn ended(&mut self, choice: usize, usage: Usage) {
        if let Some(sum) = &mut self.usage {
            sum.add(choice, usage);
        }
    }

    /// What is sent of an answer that failed.
    fn failed(&mut self, error: sterna::Error) -> Frame {
        self.has_failed = true;
        Frame::data(&ApiError::from(error).body(Dialect::OpenAi))
    }

    /// Sends what comes after all answers.
    fn end(&self, head: &Head, frames: &mut VecDeque<Frame>) {
        if let Some(usage) = self.usage.as_ref().filter(|_| !self.has_failed) {
            frames.push_back(self.chunk(head, json!([]), Some(usage.json())));
        }
        frames.push_back(Frame {
            name: None,
            data: "[DONE]".to_owned(),
        });
    }
}

/// What a token is as text: what it spells, or its name.
pub(super) fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    match tokenizer.token_bytes(id) {
        Some(bytes) if !tokenizer.is_special(id) => String::from_utf8_lossy(&bytes).into_owned(),
        _ => tokenizer.piece(id).unwrap_or_default().to_owned(),
    }
}

/// A logarithm that JSON can have.
pub(super) fn finite(logprob: f32) -> f32 {
    match logprob.is_finite() {
        true => logprob.max(LOG_ZERO),
        false => LOG_ZERO,
    }
}

/// A token with its log-probability, in the shape of chats.
pub(super) fn scored(tokenizer: &Tokenizer, token: &ScoredToken) -> Value {
    let one = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        json!({
            "token": token_text(tokenizer, id),
            "logprob": finite(logprob),
            "bytes": bytes,
        })
    };
    let mut value = one(token.id, token.logprob);
    let top: Vec<Value> = token.top.iter().map(|&(id, p)| one(id, p)).collect();
    value["top_logprobs"] = top.into();
    value
}
