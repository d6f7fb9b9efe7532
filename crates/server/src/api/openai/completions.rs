//! `/v1/completions`: texts continued as they are.

use std::collections::VecDeque;
use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use sterna_text::{Decode, Encode, Tokenizer};

use super::super::json::Checked;
use super::super::shape::{COUNT, Shape, TEXT, field, required};
use super::super::stream::{self, Encoder, Frame};
use super::super::{ApiError, Caller, Named, Shared};
use super::{
    Chunks, Head, Input, MAX_TOP, UsageSum, add_receipt, encoded, fields, finish_reason, finite,
    grammar, inputs, n_choices, receipt, sampling, streaming, token_text,
};
use crate::answer::{Ask, Calls, Event, Prompt, ScoredToken, Usage, Whole, whole};
use crate::engine::{Output, Refused, Work};

/// Tokens of an answer, if nothing else is asked for: what OpenAI has.
const MAX_TOKENS: usize = 16;

/// What a request may have.
pub(crate) const REQUEST: Shape = Shape::Object(&[
    &[
        required("model", Shape::Model),
        required("prompt", fields::INPUTS),
        field("suffix", TEXT),
        field("echo", Shape::Flag),
        field("best_of", COUNT),
        field("max_tokens", Shape::Whole(0, u64::MAX)),
        field("max_completion_tokens", Shape::Whole(0, u64::MAX)),
        // Flags are how chats have it.
        field(
            "logprobs",
            Shape::OneOf(&[Shape::Flag, Shape::Whole(0, MAX_TOP as u64)]),
        ),
    ],
    fields::ANSWERS,
    fields::SAMPLING,
    fields::GRAMMARS,
]);

pub(crate) async fn answer(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model(&at.get("model"))?;
    let suffix = at.get("suffix");
    let gap = match suffix.text().filter(|text| !text.is_empty()) {
        None => None,
        Some(text) => {
            let infill = model.text.infill.clone().ok_or_else(|| {
                suffix.refused("the model isn't made to fill in between two texts")
            })?;
            Some((infill, text.to_owned()))
        }
    };
    let prompt = at.get("prompt");
    let prompts = inputs(&prompt, &model.text)?;
    let n = n_choices(&at);
    if at.get("best_of").whole().unwrap_or(n) > n {
        return Err(at.get("best_of").refused(format!(
            "expected at most n, which is {n}: all answers are returned"
        )));
    }
    let echo = at.get("echo").flag().unwrap_or(false);
    if echo && gap.is_some() {
        return Err(suffix.refused("what is filled in can't be echoed: expected echo to be false"));
    }
    let logprobs = match at.get("logprobs").value() {
        // As chats have it.
        Value::Bool(true) => Some(at.get("top_logprobs").whole().unwrap_or(0)),
        Value::Bool(false) => None,
        _ => at.get("logprobs").whole(),
    };
    let max_tokens = at.get_any(&["max_tokens", "max_completion_tokens"]);
    let max_tokens = max_tokens.whole().unwrap_or(MAX_TOKENS);
    let common = Ask {
        n,
        sampling: sampling(&at),
        max_tokens: Some(max_tokens),
        stop: at.get("stop").texts(),
        stop_ids: [
            at.get("stop_token_ids").ids(model.text.n_vocab)?,
            gap.iter()
                .flat_map(|(infill, _)| infill.stop_ids.clone())
                .collect(),
        ]
        .concat(),
        ignores_end: at.get("ignore_eos").flag().unwrap_or(false),
        max_thought: None,
        logprobs,
        grammar: grammar(&at, &app.settings)?,
        calls: Calls::None,
        receipt: receipt(&at, &model.text)?,
        prompt: Prompt::default(),
    };
    let (is_streamed, with_usage) = streaming(&at);
    let texts: Vec<Option<String>> = prompts
        .iter()
        .map(|prompt| match prompt {
            Input::Text(text) => Some(text.clone()),
            Input::Ids(_) => None,
        })
        .collect();
    let text = Arc::clone(&model.text);
    let tokens = app
        .aside(move || match gap {
            None => encoded(prompts, &text, Encode::TEXT),
            Some((infill, suffix)) => {
                let prefixes = encoded(prompts, &text, Encode::PLAIN)?;
                let prompts = prefixes.iter().map(|prefix| {
                    let prompt = infill.prompt(prefix, &suffix, &text.tokenizer);
                    Ok(prompt.map_err(sterna::Error::from)?)
                });
                prompts.collect()
            }
        })
        .await??;
    if tokens.is_empty() {
        return Err(prompt.wrong("at least one prompt"));
    }
    let mut echoes = Vec::new();
    if echo {
        for (ids, text) in tokens.iter().zip(texts) {
            let scores = match logprobs {
                Some(n_top) => Some(scores(&app, &caller, &model, ids, n_top).await?),
                None => None,
            };
            let decode = Decode { skip_special: true };
            let text = text.unwrap_or_else(|| model.text.tokenizer.decode(ids, decode));
            echoes.push(Echo {
                text,
                first: ids.first().copied(),
                scores,
            });
        }
    }
    let form = Form {
        head: Head::new("cmpl-", &model),
        has_logprobs: logprobs.is_some(),
        echoes,
        n,
    };
    let n_all = n * tokens.len();
    if echo && max_tokens == 0 && logprobs.is_some() && !is_streamed {
        // All is known.
        let whole = |ids: &Vec<u32>| Whole {
            finish: Some(crate::answer::Finish::Length),
            usage: Usage {
                n_prompt: ids.len(),
                ..Usage::default()
            },
            ..Whole::default()
        };
        let all = tokens
            .iter()
            .flat_map(|ids| (0..n).map(move |_| whole(ids)));
        return Ok(Json(form.whole(all.collect())).into_response());
    }
    // Before each has a grammar of its own.
    app.engines.expect_room(n_all)?;
    let asks = tokens.into_iter().map(|ids| Ask {
        prompt: Prompt::Ids(ids),
        ..common.clone()
    });
    let asks: Vec<Ask> = asks.collect();
    let answers = app.answers(&caller, &model, "completions", asks).await?;
    if is_streamed {
        let encoder = CompletionStream {
            chunks: Chunks::new("text_completion", with_usage, n),
            offsets: vec![0; n_all],
            form,
        };
        return Ok(stream::respond(answers, encoder));
    }
    let all = whole(answers, n_all).await?;
    Ok(Json(form.whole(all)).into_response())
}

/// The log-probabilities of the tokens `ids`, but for the first.
async fn scores(
    app: &Shared,
    caller: &Caller,
    model: &Named,
    ids: &[u32],
    n_top: usize,
) -> Result<Vec<ScoredToken>, ApiError> {
    let ctx_len = model.text.ctx_len;
    if ids.is_empty() || ids.len() > ctx_len {
        let found = ids.len();
        return Err(ApiError::invalid(format!(
            "prompt: expected 1 to {ctx_len} tokens, found {found}"
        ))
        .at("prompt"));
    }
    let work = Work::Score {
        ids: ids.to_vec(),
        n_top,
    };
    let mut outputs = app.submit(caller, model, work, ids.len())?;
    match outputs.recv().await {
        Some((_, Output::Scored(scores))) => {
            let scored = ids[1..].iter().zip(scores);
            Ok(scored
                .map(|(id, scores)| ScoredToken::new(*id, scores))
                .collect())
        }
        Some((_, Output::Failed(error))) => Err(error.into()),
        _ => Err(Refused::Stopped.into()),
    }
}

/// A prompt that is repeated before its answers.
struct Echo {
    text: String,
    first: Option<u32>,
    scores: Option<Vec<ScoredToken>>,
}

struct Form {
    head: Head,
    has_logprobs: bool,
    echoes: Vec<Echo>,
    /// Answers to each prompt.
    n: usize,
}

impl Form {
    fn echo(&self, choice: usize) -> Option<&Echo> {
        self.echoes.get(choice / self.n.max(1))
    }

    fn whole(&self, all: VecDeque<Whole>) -> Value {
        let mut usage = UsageSum::new(self.n);
        let choices = all.iter().enumerate().map(|(index, answer)| {
            usage.add(index, answer.usage);
            let echo = self.echo(index);
            let text = echo.map(|echo| echo.text.as_str()).unwrap_or_default();
            let mut logprobs = Logprobs::default();
            if let Some(echo) = echo {
                logprobs.add_echo(echo, &self.head.model.tokenizer);
            }
            for token in &answer.logprobs {
                logprobs.add(token, &self.head.model.tokenizer);
            }
            let mut choice = json!({
                "index": index,
                "text": format!("{text}{}", answer.text),
                "logprobs": self.has_logprobs.then(|| logprobs.json()),
                "finish_reason": finish_reason(answer.finish.as_ref()),
            });
            add_receipt(&mut choice, answer.receipt.as_deref());
            choice
        });
        let choices: Vec<Value> = choices.collect();
        let mut body = self.head.body("text_completion", choices.into());
        body["usage"] = usage.json();
        body
    }
}

/// Log-probabilities in the shape of completions: lists side by side.
#[derive(Default)]
struct Logprobs {
    tokens: Vec<String>,
    of_tokens: Vec<Option<f32>>,
    top: Vec<Option<Map<String, Value>>>,
    offsets: Vec<usize>,
    /// Characters so far.
    offset: usize,
}

impl Logprobs {
    fn push(&mut self, token: String, logprob: Option<f32>, top: Option<Map<String, Value>>) {
        self.offsets.push(self.offset);
        self.offset += token.chars().count();
        self.tokens.push(token);
        self.of_tokens.push(logprob);
        self.top.push(top);
    }

    fn add(&mut self, token: &ScoredToken, tokenizer: &Tokenizer) {
        let mut top = Map::new();
        for &(id, logprob) in &token.top {
            let text = token_text(tokenizer, id);
            // Of several tokens that look alike, the most probable one.
            top.entry(text).or_insert_with(|| finite(logprob).into());
        }
        let text = token_text(tokenizer, token.id);
        self.push(text, Some(finite(token.logprob)), Some(top));
    }

    fn add_echo(&mut self, echo: &Echo, tokenizer: &Tokenizer) {
        let Some(scores) = &echo.scores else { return };
        if let Some(first) = echo.first {
            // Nothing is before it.
            self.push(token_text(tokenizer, first), None, None);
        }
        for token in scores {
            self.add(token, tokenizer);
        }
    }

    fn json(&self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.of_tokens,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        })
    }
}

struct CompletionStream {
    form: Form,
    chunks: Chunks,
    /// Characters of each answer's tokens so far.
    offsets: Vec<usize>,
}

impl CompletionStream {
    fn text(&mut self, choice: usize, text: &str, logprobs: Logprobs) -> Frame {
        let choice = self.choice(choice, text, logprobs, Value::Null);
        self.chunks.of(&self.form.head, choice)
    }

    fn choice(&mut self, choice: usize, text: &str, logprobs: Logprobs, finish: Value) -> Value {
        self.offsets[choice] = logprobs.offset.max(self.offsets[choice]);
        let has_some = self.form.has_logprobs && !logprobs.tokens.is_empty();
        json!({
            "index": choice,
            "text": text,
            "logprobs": has_some.then(|| logprobs.json()),
            "finish_reason": finish,
        })
    }
}

impl Encoder for CompletionStream {
    fn encode(&mut self, choice: usize, events: Vec<Event>, frames: &mut VecDeque<Frame>) {
        let mut logprobs = Logprobs {
            offset: self.offsets[choice],
            ..Logprobs::default()
        };
        for event in &events {
            if let Event::Logprobs(token) = event {
                logprobs.add(token, &self.form.head.model.tokenizer);
            }
        }
        let mut is_said = logprobs.tokens.is_empty();
        for event in events {
            match event {
                Event::Begun { .. } => {
                    if let Some(echo) = self.form.echo(choice) {
                        let mut of_echo = Logprobs::default();
                        of_echo.add_echo(echo, &self.form.head.model.tokenizer);
                        let text = echo.text.clone();
                        let frame = self.text(choice, &text, of_echo);
                        frames.push_back(frame);
                    }
                }
                Event::Text(text) => {
                    is_said = true;
                    let logprobs = std::mem::take(&mut logprobs);
                    let frame = self.text(choice, &text, logprobs);
                    frames.push_back(frame);
                }
                Event::Ended {
                    finish,
                    usage,
                    receipt,
                } => {
                    is_said = true;
                    let reason = finish_reason(Some(&finish)).into();
                    let logprobs = std::mem::take(&mut logprobs);
                    let mut last = self.choice(choice, "", logprobs, reason);
                    add_receipt(&mut last, receipt.as_deref());
                    frames.push_back(self.chunks.of(&self.form.head, last));
                    self.chunks.ended(choice, usage);
                }
                Event::Failed(error) => {
                    frames.push_back(self.chunks.failed(error));
                }
                _ => {}
            }
        }
        if !is_said {
            let frame = self.text(choice, "", logprobs);
            frames.push_back(frame);
        }
    }

    fn end(&mut self, frames: &mut VecDeque<Frame>) {
        self.chunks.end(&self.form.head, frames);
    }
}
