//! OpenAI's dialect: what chat and completions have in common.

pub(super) mod chat;
pub(super) mod completions;

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use sterna::constraint::Grammar;
use sterna::sampling::SamplingOptions;
use sterna_text::{Encode, Tokenizer};

use super::ApiError;
use super::json::At;
use crate::answer::tools::{Tool, as_mapping};
use crate::answer::{Calls, Finish, ScoredToken, Usage};
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
pub(super) fn sampling(body: &At<'_>) -> Result<SamplingOptions, ApiError> {
    let any = f32::MIN..=f32::MAX;
    let penalty = body.get_any(&["repetition_penalty", "repeat_penalty"]);
    let top_p = body.get("top_p").number(0.0..=1.0)?;
    // -1 keeps all, for some clients.
    let top_k = body.get("top_k");
    let top_k = match top_k.value().as_i64() {
        Some(-1) => Some(0),
        _ => top_k.whole(0..=usize::MAX)?,
    };
    Ok(SamplingOptions {
        temperature: body.get("temperature").number(0.0..=f32::MAX)?,
        top_k,
        // The sampler takes no 0; this also keeps only the best token.
        top_p: top_p.map(|p| p.max(f32::MIN_POSITIVE)),
        min_p: body.get("min_p").number(0.0..=1.0)?,
        repeat_penalty: penalty.number(f32::MIN_POSITIVE..=f32::MAX)?,
        repeat_last_n: None,
        frequency_penalty: body.get("frequency_penalty").number(any.clone())?,
        presence_penalty: body.get("presence_penalty").number(any)?,
        logit_bias: logit_bias(&body.get("logit_bias"))?,
        seed: body.get("seed").seed()?,
    })
}

fn logit_bias(field: &At<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let members = field.object()?.into_iter().flatten();
    members
        .map(|(id, _)| {
            let bias = field.get(id);
            let id = id
                .parse()
                .map_err(|_| bias.refused("expected the id of a token as its name"))?;
            let bias = bias
                .number(-100.0..=100.0)?
                .ok_or_else(|| bias.wrong("a number"))?;
            // The most that is asked for bans a token.
            Ok((
                id,
                if bias <= -100.0 {
                    f32::NEG_INFINITY
                } else {
                    bias
                },
            ))
        })
        .collect()
}

/// Text that ends the answer.
pub(super) fn stops(field: &At<'_>) -> Result<Vec<String>, ApiError> {
    let stops = field.texts()?;
    match stops.len() > MAX_STOPS || stops.iter().any(String::is_empty) {
        true => Err(field.refused(format!(
            "expected at most {MAX_STOPS} texts, none of them empty"
        ))),
        false => Ok(stops),
    }
}

/// What the answer has to match, in any of the ways in which clients say it.
pub(super) fn grammar(body: &At<'_>, settings: &Settings) -> Result<Option<Grammar>, ApiError> {
    let schema = |field: &At<'_>| match field.value() {
        Value::String(text) => Ok(Grammar::JsonSchema(text.clone())),
        value @ (Value::Object(_) | Value::Bool(_)) => Ok(Grammar::JsonSchema(value.to_string())),
        _ => Err(field.wrong("a JSON schema")),
    };
    let format = body.get("response_format");
    let kind = format.get("type");
    let asked = match kind.text()? {
        None if format.is_absent() => None,
        Some("text") => None,
        Some("json_object") if format.get("schema").is_absent() => {
            Some((format.clone(), Grammar::JsonObject))
        }
        Some("json_object") => Some((format.clone(), schema(&format.get("schema"))?)),
        Some("json_schema") => {
            let inner = format.get("json_schema").get("schema");
            let inner = match inner.is_absent() {
                true => format.get("schema"),
                false => inner,
            };
            Some((format.clone(), schema(&inner)?))
        }
        _ => return Err(kind.wrong("text, json_object or json_schema")),
    };
    let structured = body.get("structured_outputs");
    let mut all: Vec<(At<'_>, Grammar)> = asked.into_iter().collect();
    for field in [
        body.get("guided_json"),
        body.get("json_schema"),
        structured.get("json"),
    ] {
        if !field.is_absent() {
            let grammar = schema(&field)?;
            all.push((field, grammar));
        }
    }
    for field in [
        body.get("guided_regex"),
        body.get("regex"),
        structured.get("regex"),
    ] {
        if let Some(text) = field.text()? {
            all.push((field, Grammar::Regex(text.to_owned())));
        }
    }
    for field in [
        body.get("guided_grammar"),
        body.get("grammar"),
        structured.get("grammar"),
    ] {
        if let Some(text) = field.text()? {
            all.push((field, Grammar::Lark(text.to_owned())));
        }
    }
    let mut all = all.into_iter();
    match (all.next(), all.next()) {
        (None, _) => Ok(None),
        (Some((field, _)), _) if !settings.grammars => {
            Err(field.refused("this server takes no schemas, patterns or grammars"))
        }
        (Some((_, grammar)), None) => Ok(Some(grammar)),
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
    for tool in field.items()? {
        if tool
            .get("type")
            .text()?
            .is_some_and(|kind| kind != "function")
        {
            continue;
        }
        // The Responses API has no level between.
        let function = match tool.get("function").is_absent() {
            true => tool.clone(),
            false => tool.get("function"),
        };
        let (told_of, function) = tool_of(
            &function.get("name"),
            &function.get("description"),
            &function.get("parameters"),
        )?;
        told.push(told_of);
        tools.push(function);
    }
    let named = match choice.value() {
        Value::Object(_) => match choice.get("type").text()? {
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
        Value::Object(_) => choice.get("mode").text()?,
        _ => choice.text()?,
    };
    match mode {
        Some("none") => Ok((Vec::new(), Calls::None)),
        None | Some("auto") if tools.is_empty() => Ok((Vec::new(), Calls::None)),
        None | Some("auto") => Ok((told, Calls::May)),
        Some("required" | "any") => must(choice, told, tools, parallel, settings),
        Some(_) => Err(choice.wrong("none, auto, required or the name of a function")),
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
) -> Result<(Value, Tool), ApiError> {
    const MAX_NAME: usize = 128;
    let text = name.required_text()?;
    let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if text.is_empty() || text.len() > MAX_NAME || !text.chars().all(fits) {
        return Err(name.wrong(&format!("1 to {MAX_NAME} letters, digits, - and _")));
    }
    let schema = parameters.object()?.map(|_| parameters.value());
    let tool = Tool::new(text, schema);
    let told = json!({"type": "function", "function": {
        "name": text,
        "description": description.text()?.unwrap_or_default(),
        "parameters": schema.cloned().unwrap_or_else(|| json!({"type": "object", "properties": {}})),
    }});
    Ok((told, tool))
}

/// Messages in the form that templates know: texts joined, arguments as mappings.
pub(super) fn messages(field: &At<'_>) -> Result<Vec<Value>, ApiError> {
    if field.is_absent() {
        return Err(field.wrong("an array of messages"));
    }
    field.items()?.iter().map(message).collect()
}

fn message(at: &At<'_>) -> Result<Value, ApiError> {
    if at.object()?.is_none() {
        return Err(at.wrong("a message"));
    }
    let role = at.get("role");
    let role = match role.required_text()? {
        "developer" => "system",
        known @ ("system" | "user" | "assistant" | "tool" | "function") => known,
        _ => return Err(role.wrong("system, developer, user, assistant or tool")),
    };
    let calls = at.get("tool_calls");
    let content = at.get("content");
    let content = match content.is_absent() {
        true if role == "assistant" => String::new(),
        _ => text_of(&content)?,
    };
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
    let calls = calls.items()?;
    if !calls.is_empty() {
        let calls = calls.iter().map(|call| {
            let function = call.get("function");
            let name = function.get("name").required_text()?;
            let arguments = match function.get("arguments").value() {
                Value::String(text) => as_mapping(text),
                Value::Null => json!({}),
                other => other.clone(),
            };
            let id = call.get("id").text()?.unwrap_or_default();
            Ok(called(id, name, arguments))
        });
        let calls = calls.collect::<Result<Vec<_>, ApiError>>()?;
        message.insert("tool_calls".to_owned(), calls.into());
    }
    for name in ["tool_call_id", "name"] {
        if let Some(text) = at.get(name).text()? {
            message.insert(name.to_owned(), text.into());
        }
    }
    Ok(message.into())
}

/// A call, in a message for templates.
pub(super) fn called(id: &str, name: &str, arguments: Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

/// The text of a message's content: itself, or its parts, joined by line breaks.
pub(super) fn text_of(content: &At<'_>) -> Result<String, ApiError> {
    match content.value() {
        Value::String(text) => Ok(text.clone()),
        Value::Array(_) => {
            let mut texts = Vec::new();
            for part in content.items()? {
                let kind = part.get("type");
                match kind.text()? {
                    None | Some("text" | "input_text" | "output_text" | "refusal") => {
                        let text = part.get_any(&["text", "refusal"]);
                        texts.push(text.required_text()?);
                    }
                    Some(other) => {
                        return Err(kind.refused(format!(
                            "expected text, which is all that the model reads, found {other:?}"
                        )));
                    }
                }
            }
            Ok(texts.join("\n"))
        }
        _ => Err(content.wrong("text or an array of parts")),
    }
}

/// A conversation, with what else its template is told.
pub(super) fn conversation(
    body: &At<'_>,
    messages: Vec<Value>,
    tools: Vec<Value>,
) -> Result<Conversation, ApiError> {
    let variables = body.get("chat_template_kwargs");
    let thinking = variables.get("enable_thinking").flag()?;
    let mut variables = variables.object()?.cloned().unwrap_or_default();
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
    let effort = effort.text()?;
    if let Some(effort) = effort {
        let value = Value::from(effort);
        variables.entry("reasoning_effort").or_insert(value);
    }
    Ok(Conversation {
        messages,
        tools,
        thinking: thinking.or((effort == Some("none")).then_some(false)),
        variables,
    })
}

/// Texts, or texts as tokens.
pub(super) enum Input {
    Text(String),
    Ids(Vec<u32>),
}

/// What `field` has: a text, an array of texts, the ids of one, or an array of those.
pub(super) fn inputs(field: &At<'_>, model: &ModelText) -> Result<Vec<Input>, ApiError> {
    match field.value() {
        Value::String(text) => Ok(vec![Input::Text(text.clone())]),
        Value::Array(items) => match items.first() {
            Some(Value::Number(_)) => Ok(vec![Input::Ids(ids(field, model)?)]),
            Some(Value::Array(_)) => {
                let items = field.items()?;
                let inner = items.iter().map(|item| ids(item, model).map(Input::Ids));
                inner.collect()
            }
            _ => Ok(field.texts()?.into_iter().map(Input::Text).collect()),
        },
        _ => Err(field.wrong("text, an array of texts, or ids of tokens")),
    }
}

/// Ids of tokens of `model`.
pub(super) fn ids(field: &At<'_>, model: &ModelText) -> Result<Vec<u32>, ApiError> {
    if field.is_absent() {
        return Err(field.wrong("an array of ids"));
    }
    let most = model.n_vocab.saturating_sub(1);
    let ids = field.items()?.into_iter().map(|id| {
        let found = id.whole(0..=most)?;
        found.map(|id| id as u32).ok_or_else(|| id.wrong("an id"))
    });
    ids.collect()
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
pub(super) fn n_choices(body: &At<'_>) -> Result<usize, ApiError> {
    Ok(body.get("n").whole(1..=MAX_CHOICES)?.unwrap_or(1))
}

/// Whether the answer is streamed, and whether that ends with its usage.
pub(super) fn streaming(body: &At<'_>) -> Result<(bool, bool), ApiError> {
    let options = body.get("stream_options");
    let usage = options.get("include_usage").flag()?.unwrap_or(false);
    Ok((body.get("stream").flag()?.unwrap_or(false), usage))
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
