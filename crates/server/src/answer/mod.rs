//! Answers: from what a dialect asks for to the requests of the engine, and from its outputs to one stream of events,
//! which dialects encode.

mod budget;
pub(crate) mod channels;
pub(crate) mod recipients;
mod scan;
mod single;
mod split;
mod strict;
pub(crate) mod thoughts;
pub(crate) mod tools;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use serde_json::{Map, Value, json};
use sterna::constraint::{Grammar, bounded};
use sterna::generate::{
    Allowed, Logprobs, Request, StopReason, TextOptions, Token, TokenConstraint,
};
use sterna::receipt::Receipt;
use sterna::sampling::{SamplingOptions, random_seed};
use sterna::{Error, ErrorCode, Result};
use sterna_engine::Sampler;
use sterna_text::{Decode, Encode, Tokenizer};

use crate::engine::{Output, Outputs};
use crate::model::{ChatPrompt, Conversation, ModelText};
use crate::settings::Sign;
use crate::trace::Tracing;
use budget::ThoughtBudget;
use single::SingleCall;
use split::{Expected, Messages, Part, Splitter};
use strict::StrictCalls;
use thoughts::Thoughts;
use tools::{Tool, ToolFormat};

/// What is asked for, whatever the dialect.
#[derive(Debug, Clone, Default)]
pub(crate) struct Ask {
    pub(crate) prompt: Prompt,
    /// How many answers.
    pub(crate) n: usize,
    pub(crate) sampling: SamplingOptions,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    /// Tokens that end an answer, beside those of the model.
    pub(crate) stop_ids: Vec<u32>,
    /// Those of the model are tokens as others are.
    pub(crate) ignores_end: bool,
    /// Tokens that may be thought.
    pub(crate) max_thought: Option<usize>,
    pub(crate) logprobs: Option<usize>,
    /// What the answer has to match.
    pub(crate) grammar: Option<Asked>,
    /// What calls there may be.
    pub(crate) calls: Calls,
    /// Whether a receipt is to be written.
    pub(crate) receipt: bool,
}

/// What the answer has to match, and where that was asked for.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    pub(crate) grammar: Grammar,
    pub(crate) at: String,
}

/// What is to be continued.
#[derive(Debug, Clone)]
pub(crate) enum Prompt {
    Chat(Conversation),
    Ids(Vec<u32>),
}

impl Default for Prompt {
    fn default() -> Prompt {
        Prompt::Ids(Vec::new())
    }
}

/// Which calls of tools there may be.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) enum Calls {
    /// None.
    #[default]
    None,
    /// Of these, as the model likes.
    May { tools: Vec<Tool>, parallel: bool },
    /// Of one of these, and nothing else.
    Must { tools: Vec<Tool>, parallel: bool },
}

impl Calls {
    /// Whether they have to match something.
    pub(crate) fn have_grammar(&self) -> bool {
        match self {
            Calls::None => false,
            Calls::May { tools, .. } => tools.iter().any(|tool| tool.strict),
            Calls::Must { .. } => true,
        }
    }

    /// Whether there is one at most.
    fn are_single(&self) -> bool {
        match self {
            Calls::None => false,
            Calls::May { parallel, .. } | Calls::Must { parallel, .. } => !parallel,
        }
    }
}

/// Requests for the engine, and what their answers are read with.
pub(crate) struct Prepared {
    pub(crate) requests: Vec<Request>,
    pub(crate) readers: Vec<Reader>,
}

/// Why nothing can be asked of the engine.
#[derive(Debug)]
pub(crate) enum Unprepared {
    /// The prompt leaves no room for an answer.
    TooLong { n_prompt: usize, ctx_len: usize },
    /// What the answer, or a call, has to match can't be read, which was asked for there.
    Grammar { at: String, error: Error },
    /// Something else.
    Error(Error),
}

impl From<Error> for Unprepared {
    fn from(error: Error) -> Unprepared {
        Unprepared::Error(error)
    }
}

impl From<sterna_engine::sampling::SamplerError> for Unprepared {
    fn from(error: sterna_engine::sampling::SamplerError) -> Unprepared {
        Unprepared::Error(error.into())
    }
}

/// Prepares what `ask` asks of `model`. Takes a moment: templates, tokens and grammars are computed here.
pub(crate) fn prepare(model: &Arc<ModelText>, ask: Ask) -> Result<Prepared, Unprepared> {
    let is_chat = matches!(ask.prompt, Prompt::Chat(_));
    let prompt = match &ask.prompt {
        Prompt::Ids(ids) => ChatPrompt {
            ids: ids.clone(),
            ..ChatPrompt::default()
        },
        Prompt::Chat(conversation) => model.prompt(conversation)?,
    };
    let ChatPrompt {
        ids: prompt,
        opens_thinking,
        is_begun,
    } = prompt;
    if prompt.len() >= model.ctx_len {
        return Err(Unprepared::TooLong {
            n_prompt: prompt.len(),
            ctx_len: model.ctx_len,
        });
    }
    let messages = model.tools.messages().filter(|_| is_chat);
    let beginning = match (messages, opens_thinking) {
        (Some(Messages::Channels), true) => Beginning::Analysis,
        (Some(Messages::Channels), false) if !is_begun => Beginning::Message,
        (Some(Messages::Recipients), _) if is_begun => Beginning::Said,
        (Some(Messages::Recipients), _) => Beginning::Recipient,
        (None, true) => Beginning::Thought,
        (_, _) => Beginning::Answer,
    };
    let constraint = constraint(model, &ask, beginning)?;
    let is_constrained = constraint.is_some();
    let has_thoughts = is_chat && model.thinks && (!is_constrained || opens_thinking);
    let may_think = has_thoughts && !is_begun;
    let constraint = match constraint {
        Some(constraint) => Some(constraint),
        None => {
            let thought = (may_think, opens_thinking);
            let strict = strict_calls(model, &ask.calls, (messages, is_begun), thought);
            strict.map_err(|error| of_tools(model, &ask.calls, error))?
        }
    };
    let expected = Expected {
        opens_thinking,
        may_think,
        thoughts: match has_thoughts {
            true => model.thoughts,
            false => <&Thoughts>::default(),
        },
        calls: match &ask.calls {
            Calls::None => None,
            Calls::May { .. } | Calls::Must { .. } => Some(model.tools),
        },
        is_single: ask.calls.are_single(),
        tools: match &ask.calls {
            Calls::None => Arc::default(),
            Calls::May { tools, .. } | Calls::Must { tools, .. } => tools.as_slice().into(),
        },
        trims: is_chat && !is_constrained && !is_begun,
        messages,
        is_begun,
    };
    let mut marks = match expected.calls.is_some() || messages.is_some() {
        true => model.tools.tokens(&model.tokenizer),
        false => Vec::new(),
    };
    if has_thoughts {
        marks.extend(model.thoughts.tokens(&model.tokenizer));
    }
    let constraint = match &ask.calls {
        Calls::May {
            parallel: false, ..
        } => {
            let splitter = Splitter::new(expected.clone());
            let single = SingleCall::new(&model.tokenizer, &marks, splitter, constraint);
            Some(Box::new(single) as Box<dyn TokenConstraint>)
        }
        _ => constraint,
    };
    let constraint = match ask.max_thought.filter(|_| may_think) {
        Some(n_left) => within(model, n_left, opens_thinking, constraint),
        None => constraint,
    };
    if ask.receipt && constraint.is_some() {
        let message = "receipt: expected an answer that needn't match anything, found a schema, a grammar, a required \
                       call, a strict tool, calls one at a time, or a limit of thoughts";
        return Err(Error::new(ErrorCode::Unsupported, message).into());
    }
    let mut readers = Vec::with_capacity(ask.n);
    let mut requests = Vec::with_capacity(ask.n);
    let recommended = model.recommended.max_new_tokens;
    let max_tokens = ask.max_tokens.or(recommended).unwrap_or(usize::MAX);
    let own_ids = model.stop_ids.iter().filter(|_| !ask.ignores_end);
    let mut stop_ids: Vec<u32> = own_ids.chain(&ask.stop_ids).copied().collect();
    if messages == Some(Messages::Channels) {
        stop_ids.extend(channels::ends(&model.tokenizer));
    }
    for choice in 0..ask.n.max(1) {
        let seed = ask.sampling.seed.unwrap_or_else(random_seed);
        let sampling = SamplingOptions {
            seed: Some(seed.wrapping_add(choice as u64)),
            ..ask.sampling.clone()
        };
        let sampler = Sampler::new(sampling.config(&model.recommended), model.n_vocab)?;
        requests.push(Request {
            max_tokens,
            stop_ids: stop_ids.clone(),
            logprobs: ask.logprobs,
            text: Some(TextOptions {
                tokenizer: model.tokenizer.clone(),
                stop_strings: ask.stop.clone(),
            }),
            constraint: constraint.clone(),
            ..Request::new(prompt.clone(), sampler)
        });
        readers.push(Reader {
            splitter: Splitter::new(expected.clone()),
            marks: marks.clone(),
            tokenizer: model.tokenizer.clone(),
            stop: ask.stop.clone(),
            n_reasoning: 0,
            ids: Vec::new(),
        });
    }
    Ok(Prepared { requests, readers })
}

/// Any token of `n_vocab`, or the end.
fn anything(n_vocab: usize) -> Allowed {
    let mut tokens = vec![u32::MAX; n_vocab.div_ceil(32)];
    if let (Some(last), n @ 1..) = (tokens.last_mut(), n_vocab % 32) {
        *last = (1 << n) - 1;
    }
    Allowed { tokens, end: true }
}

/// `constraint`, and a thought of at most `n_left` tokens before.
fn within(
    model: &ModelText,
    n_left: usize,
    is_thinking: bool,
    inner: Option<Box<dyn TokenConstraint>>,
) -> Option<Box<dyn TokenConstraint>> {
    let Some((begin, end, label)) = model.thoughts.ids(&model.tokenizer) else {
        return inner;
    };
    // What belongs to the beginning isn't thought.
    let label = model.tokenizer.encode(label, Encode::PLAIN);
    let n_label = label.map_or(0, |ids| ids.len());
    Some(Box::new(ThoughtBudget {
        begin,
        end,
        is_thinking,
        n_left: n_left + if is_thinking { 0 } else { n_label },
        n_vocab: model.n_vocab,
        inner,
    }))
}

/// What calls have to match that the model may make, if a tool is strict: arguments of the others are any objects. A
/// call without a mark is no more than an answer up to its end, and isn't held to anything. In messages to recipients a mark
/// may also begin something else, and the first is before the answer: all of that has to match.
fn strict_calls(
    model: &ModelText,
    calls: &Calls,
    (messages, is_begun): (Option<Messages>, bool),
    thought: (bool, bool),
) -> Result<Option<Box<dyn TokenConstraint>>> {
    let Calls::May { tools, .. } = calls else {
        return Ok(None);
    };
    if !calls.have_grammar() {
        return Ok(None);
    }
    if messages == Some(Messages::Recipients) {
        let rules = strict_rules(model.tools, tools, &model.tokenizer);
        let answer = recipients::strict_grammar(&rules, tools, is_begun);
        return model.constraints.of(&Grammar::Lark(answer)).map(Some);
    }
    let Some(mark) = model.tools.mark() else {
        return Ok(None);
    };
    let grammar = strict_grammar(model.tools, tools, &model.tokenizer);
    let call = model.constraints.of(&grammar)?;
    let strict = StrictCalls::new(&model.tokenizer, mark, call, (model.thoughts, thought));
    Ok(Some(Box::new(strict)))
}

/// What follows the mark of a call of one of `tools`.
fn strict_grammar(format: ToolFormat, tools: &[Tool], tokenizer: &Tokenizer) -> Grammar {
    let rules = strict_rules(format, tools, tokenizer);
    Grammar::Lark(format!("start: after_mark\n{rules}"))
}

/// Rules of a Lark grammar for calls of `tools`, of which those that aren't strict take any arguments.
fn strict_rules(format: ToolFormat, tools: &[Tool], tokenizer: &Tokenizer) -> String {
    let held = tools.iter().map(|tool| match tool.strict {
        true => tool.clone(),
        false => Tool::new(&tool.name, None),
    });
    let held: Vec<Tool> = held.collect();
    format.grammar(&held, true, tokenizer)
}

/// What the answer to `ask` has to match.
fn constraint(
    model: &ModelText,
    ask: &Ask,
    beginning: Beginning,
) -> Result<Option<Box<dyn TokenConstraint>>, Unprepared> {
    let asked = ask.grammar.as_ref();
    let grammar = grammar(
        model.tools,
        (&model.tokenizer, model.thoughts),
        &ask.calls,
        asked.map(|asked| &asked.grammar),
        beginning,
    );
    let constraint = grammar.and_then(|grammar| {
        let constraint = grammar.map(|grammar| model.constraints.of(&grammar));
        constraint.transpose()
    });
    constraint.map_err(|error| match (&ask.calls, asked) {
        (Calls::Must { .. }, _) | (_, None) => of_tools(model, &ask.calls, error),
        (_, Some(asked)) => Unprepared::Grammar {
            at: asked.at.clone(),
            error,
        },
    })
}

/// Tools that are looked at for what is wrong, at most: each takes as long as it does alone.
const MAX_BLAMED: usize = 16;

/// `error`, because of which calls can't be held to anything, with the tool that is to blame, if one alone is.
fn of_tools(model: &ModelText, calls: &Calls, error: Error) -> Unprepared {
    // Those that calls are held to.
    let held: Vec<&Tool> = match calls {
        Calls::None => return error.into(),
        Calls::May { tools, .. } => tools.iter().filter(|tool| tool.strict).collect(),
        Calls::Must { tools, .. } => tools.iter().collect(),
    };
    let few = held.into_iter().take(MAX_BLAMED);
    let blamed = few.into_iter().find_map(|tool| {
        let schema = Grammar::JsonSchema(tool.parameters.to_string());
        Some((&tool.name, model.constraints.of(&schema).err()?))
    });
    let error = match blamed {
        Some((name, error)) => {
            let message = format!("the parameters of {name}: {error:#}");
            Error::new(error.code(), message)
        }
        None => error,
    };
    let at = "tools".to_owned();
    Unprepared::Grammar { at, error }
}

/// Where what is generated begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beginning {
    /// In the answer.
    Answer,
    /// In a thought.
    Thought,
    /// Before the header of a message, or in one on the channel of thoughts.
    Message,
    Analysis,
    /// Before the recipient of a message, or in what is said to all.
    Recipient,
    Said,
}

/// The same as a grammar: `calls`, or else what is `asked`, after what the model thinks.
fn grammar(
    format: ToolFormat,
    (tokenizer, thoughts): (&Tokenizer, &Thoughts),
    calls: &Calls,
    asked: Option<&Grammar>,
    beginning: Beginning,
) -> Result<Option<Grammar>> {
    // What comes first; what is between that and an answer; and their rules.
    let (before, header, rules) = match beginning {
        Beginning::Answer => ("", "", String::new()),
        Beginning::Thought => ("thought blank", "said_begin", thoughts.rules(tokenizer)),
        Beginning::Message => ("analysis?", "final_header", channels::rules(tokenizer)),
        Beginning::Analysis => ("analysis_rest", "final_header", channels::rules(tokenizer)),
        Beginning::Recipient => ("", "recipient_all", recipients::rules()),
        Beginning::Said => ("recipient_mark", "", recipients::rules()),
    };
    Ok(match (calls, asked) {
        (Calls::Must { tools, parallel }, _) => {
            let calls = format.grammar(tools, *parallel, tokenizer);
            Some(Grammar::Lark(format!(
                "start: {before} calls\n{rules}{calls}"
            )))
        }
        (_, None) => None,
        (_, Some(grammar)) if matches!(beginning, Beginning::Answer | Beginning::Said) => {
            Some(grammar.clone())
        }
        (_, Some(grammar)) => {
            let body = match grammar {
                Grammar::JsonSchema(schema) => {
                    // What isn't JSON is refused where the grammar is read.
                    let bounded = serde_json::from_str(schema).map(bounded);
                    let schema =
                        bounded.map_or_else(|_| schema.clone(), |schema| schema.to_string());
                    format!("body: %json {schema}\n")
                }
                Grammar::JsonObject => {
                    format!("body: %json {}\n", bounded(json!({"type": "object"})))
                }
                Grammar::Regex(pattern) => format!("body: /{}/\n", pattern.replace('/', "\\/")),
                // Its rules have a scope of their own.
                Grammar::Lark(rules) => format!("body: %lark {{\n{rules}\n}}\n"),
                _ => {
                    return Err(Error::new(
                        ErrorCode::Unsupported,
                        "a grammar for the answer of a model that writes something before it: expected a schema, a \
                         regular expression or a Lark grammar (or thinking switched off, if that is it)",
                    ));
                }
            };
            Some(Grammar::Lark(format!(
                "start: {before} {header} body\n{rules}{body}"
            )))
        }
    })
}

/// How an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Finish {
    /// At its end.
    Stop,
    /// At this stop string.
    StopString(String),
    /// At a limit.
    Length,
    /// With calls.
    Calls,
}

/// Tokens of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) n_prompt: usize,
    /// Those of the prompt that were not computed again.
    pub(crate) n_cached: usize,
    pub(crate) n_generated: usize,
    /// Those of the answer that the model thought.
    pub(crate) n_reasoning: usize,
}

/// A token with its log-probability.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ScoredToken {
    pub(crate) id: u32,
    pub(crate) logprob: f32,
    pub(crate) top: Vec<(u32, f32)>,
}

impl ScoredToken {
    pub(crate) fn new(id: u32, logprobs: Logprobs) -> ScoredToken {
        ScoredToken {
            id,
            logprob: logprobs.chosen,
            top: logprobs.top,
        }
    }
}

/// What becomes of an answer. All dialects are encoded from these.
#[derive(Debug)]
pub(crate) enum Event {
    /// It was begun; so much of the prompt was there.
    Begun {
        n_prompt: usize,
        n_cached: usize,
    },
    Reasoning(String),
    Text(String),
    CallBegun {
        index: usize,
        id: String,
        name: String,
    },
    CallArguments {
        index: usize,
        text: String,
    },
    CallEnded,
    /// Of a token, whose text follows or was said.
    Logprobs(ScoredToken),
    /// Nothing follows.
    Ended {
        finish: Finish,
        usage: Usage,
        /// If it was asked for.
        receipt: Option<Box<Receipt>>,
    },
    /// The same.
    Failed(Error),
}

/// Reads one answer.
pub(crate) struct Reader {
    splitter: Splitter,
    /// Control tokens that mean something.
    marks: Vec<(u32, &'static str)>,
    tokenizer: Tokenizer,
    stop: Vec<String>,
    n_reasoning: usize,
    /// Tokens so far, where stop strings are to be found.
    ids: Vec<u32>,
}

impl Reader {
    fn read(&mut self, output: Output) -> Vec<Event> {
        match output {
            Output::Begun {
                n_prompt, n_cached, ..
            } => vec![Event::Begun { n_prompt, n_cached }],
            Output::Token(Token { id, text, logprobs }) => {
                let mut events = Vec::new();
                if let Some(logprobs) = logprobs {
                    events.push(Event::Logprobs(ScoredToken::new(id, logprobs)));
                }
                if !self.stop.is_empty() {
                    self.ids.push(id);
                }
                self.n_reasoning += usize::from(self.splitter.is_reasoning());
                let parts = self.splitter.push(&with_mark(text, id, &self.marks));
                events.extend(parts.into_iter().map(event));
                events
            }
            Output::Ended {
                reason,
                text,
                stats,
                receipt,
            } => {
                let mut parts = self.splitter.push(&text);
                let is_over = self.splitter.is_over();
                parts.extend(self.splitter.finish());
                let finish = match reason {
                    _ if is_over => Finish::Calls,
                    StopReason::MaxTokens | StopReason::ContextFull => Finish::Length,
                    _ if self.splitter.n_calls() > 0 => Finish::Calls,
                    StopReason::StopString => Finish::StopString(self.stop_string()),
                    StopReason::StopToken | StopReason::Complete => Finish::Stop,
                };
                let usage = Usage {
                    n_prompt: stats.n_prompt,
                    n_cached: stats.n_reused,
                    n_generated: stats.n_generated,
                    n_reasoning: self.n_reasoning,
                };
                let ended = Event::Ended {
                    finish,
                    usage,
                    receipt,
                };
                parts.into_iter().map(event).chain([ended]).collect()
            }
            Output::Failed(error) => vec![Event::Failed(error)],
            Output::Scored(_) | Output::Embedded(_) => Vec::new(),
        }
    }

    /// The stop string that ended the answer: the first in its text.
    fn stop_string(&self) -> String {
        let options = Decode { skip_special: true };
        let text = self.tokenizer.decode(&self.ids, options);
        let found = self.stop.iter().filter(|stop| !stop.is_empty());
        let found = found.filter_map(|stop| Some((text.find(stop.as_str())?, stop)));
        let first = found.min_by_key(|(at, _)| *at).map(|(_, stop)| stop);
        first.or(self.stop.first()).cloned().unwrap_or_default()
    }
}

/// `text`, and what the token `id` behind it means, if it is one of `marks`.
fn with_mark(mut text: String, id: u32, marks: &[(u32, &'static str)]) -> String {
    let mark = marks.iter().find(|(mark, _)| *mark == id);
    text += mark.map_or("", |(_, mark)| mark);
    text
}

fn event(part: Part) -> Event {
    match part {
        Part::Reasoning(text) => Event::Reasoning(text),
        Part::Text(text) => Event::Text(text),
        Part::CallBegun { index, name } => Event::CallBegun {
            index,
            id: crate::id::new("call_"),
            name,
        },
        Part::CallArguments { index, text } => Event::CallArguments { index, text },
        Part::CallEnded { .. } => Event::CallEnded,
    }
}

/// The answers to a request, as they come. Dropping it ends them.
pub(crate) struct Answers {
    outputs: Outputs,
    readers: Vec<Reader>,
    /// Answers that have not ended.
    n_left: usize,
    summary: Summary,
    /// Is told at the end.
    tell: Option<Tell>,
    /// Signs their receipts.
    sign: Option<Sign>,
}

/// Takes what is said of answers in logs.
type Tell = Box<dyn FnOnce(&Summary) + Send>;

/// What is said of answers in logs.
#[derive(Debug)]
pub(crate) struct Summary {
    begun: Instant,
    usage: Usage,
    /// Tokens of them that came, also of those that did not end.
    pub(crate) n_read: usize,
    /// The engines that began them.
    engines: Vec<usize>,
    /// How they ended, each.
    finishes: Vec<&'static str>,
    /// When what became of each.
    courses: Vec<Course>,
}

/// When what became of an answer, as far as it came.
#[derive(Debug, Clone, Default)]
struct Course {
    begun: Option<Instant>,
    first: Option<Instant>,
    ended: Option<Instant>,
    usage: Usage,
    n_read: usize,
    finish: Option<&'static str>,
}

impl Summary {
    /// Adds it to a record.
    pub(crate) fn add_to(&self, record: &mut Map<String, Value>) {
        let Summary {
            begun,
            usage,
            engines,
            finishes,
            ..
        } = self;
        let ms = begun.elapsed().as_millis() as u64;
        record.insert("n_prompt".into(), usage.n_prompt.into());
        record.insert("n_cached".into(), usage.n_cached.into());
        record.insert("n_generated".into(), usage.n_generated.into());
        record.insert("engines".into(), engines.clone().into());
        record.insert("finish".into(), finishes.clone().into());
        record.insert("ms".into(), ms.into());
    }

    /// Adds the answers to a trace: that each waited for its place, that its prompt was computed up to the first
    /// token, and that the others were. What did not end did until now.
    pub(crate) fn trace(&self, tracing: &Tracing) {
        let now = Instant::now();
        for (choice, course) in self.courses.iter().enumerate() {
            let ended = course.ended.unwrap_or(now);
            let waited = (self.begun, course.begun.unwrap_or(ended));
            tracing.add("queue", waited, vec![("sterna.choice", choice.into())]);
            let Some(begun) = course.begun else { continue };
            let attributes = vec![
                ("sterna.choice", choice.into()),
                ("gen_ai.usage.input_tokens", course.usage.n_prompt.into()),
                ("sterna.usage.cached_tokens", course.usage.n_cached.into()),
            ];
            tracing.add(
                "prefill",
                (begun, course.first.unwrap_or(ended)),
                attributes,
            );
            let Some(first) = course.first else { continue };
            let finish = course.finish.unwrap_or("cancelled");
            let attributes = vec![
                ("sterna.choice", choice.into()),
                ("gen_ai.usage.output_tokens", course.n_read.into()),
                ("gen_ai.response.finish_reasons", vec![finish].into()),
            ];
            tracing.add("decode", (first, ended), attributes);
        }
    }

    /// Notes that an output of the answer `choice` came.
    fn came(&mut self, choice: usize, output: &Output) {
        let Some(course) = self.courses.get_mut(choice) else {
            return;
        };
        match output {
            Output::Begun {
                engine,
                n_prompt,
                n_cached,
            } => {
                self.engines.push(*engine);
                course.begun = Some(Instant::now());
                course.usage.n_prompt = *n_prompt;
                course.usage.n_cached = *n_cached;
            }
            Output::Token(_) => {
                self.n_read += 1;
                course.n_read += 1;
                course.first.get_or_insert_with(Instant::now);
            }
            _ => {}
        }
    }

    /// Notes what happened to the answer `choice`.
    fn note(&mut self, choice: usize, event: &Event) {
        let finish = match event {
            Event::Ended { finish, usage, .. } => {
                self.usage.n_prompt += usage.n_prompt;
                self.usage.n_cached += usage.n_cached;
                self.usage.n_generated += usage.n_generated;
                match finish {
                    Finish::Stop => "stop",
                    Finish::StopString(_) => "stop_string",
                    Finish::Length => "length",
                    Finish::Calls => "tool_calls",
                }
            }
            Event::Failed(error) => error.code().as_str(),
            _ => return,
        };
        self.finishes.push(finish);
        if let Some(course) = self.courses.get_mut(choice) {
            course.ended = Some(Instant::now());
            course.finish = Some(finish);
        }
    }
}

impl Drop for Answers {
    fn drop(&mut self) {
        let n_left = std::mem::take(&mut self.n_left);
        self.summary
            .finishes
            .extend((0..n_left).map(|_| "cancelled"));
        if let Some(tell) = self.tell.take() {
            tell(&self.summary);
        }
    }
}

impl Answers {
    /// Those whose outputs are `outputs`; `sign` signs their receipts, and `tell` is told how they ended.
    pub(crate) fn new(
        outputs: Outputs,
        readers: Vec<Reader>,
        sign: Option<Sign>,
        tell: impl FnOnce(&Summary) + Send + 'static,
    ) -> Answers {
        let courses = vec![Course::default(); readers.len()];
        Answers {
            outputs,
            n_left: readers.len(),
            readers,
            summary: Summary {
                begun: Instant::now(),
                usage: Usage::default(),
                n_read: 0,
                engines: Vec::new(),
                finishes: Vec::new(),
                courses,
            },
            tell: Some(Box::new(tell)),
            sign,
        }
    }

    /// What happens next to one of them; `None` once all have ended. An answer that the engine gave up ends with an
    /// error.
    pub(crate) async fn next(&mut self) -> Option<(usize, Vec<Event>)> {
        while self.n_left > 0 {
            let Some((choice, output)) = self.outputs.recv().await else {
                self.n_left = 0;
                let error = Error::new(
                    ErrorCode::Compute,
                    "the answer was given up: it was read too slowly, or the engine has stopped",
                );
                return Some((0, vec![Event::Failed(error)]));
            };
            let Some(reader) = self.readers.get_mut(choice) else {
                continue;
            };
            self.summary.came(choice, &output);
            let mut events = reader.read(output);
            if let Some(sign) = &self.sign {
                for event in &mut events {
                    let Event::Ended {
                        receipt: Some(receipt),
                        ..
                    } = event
                    else {
                        continue;
                    };
                    if let Err(error) = sign(receipt) {
                        *event = Event::Failed(error);
                    }
                }
            }
            events
                .iter()
                .for_each(|event| self.summary.note(choice, event));
            let is_over = |event: &Event| matches!(event, Event::Ended { .. } | Event::Failed(_));
            if events.iter().any(is_over) {
                self.n_left -= 1;
            }
            if !events.is_empty() {
                return Some((choice, events));
            }
        }
        None
    }
}

/// A call of a tool, complete.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Call {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) arguments: String,
}

/// A whole answer.
#[derive(Debug, Default)]
pub(crate) struct Whole {
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) logprobs: Vec<ScoredToken>,
    pub(crate) finish: Option<Finish>,
    pub(crate) usage: Usage,
    pub(crate) receipt: Option<Box<Receipt>>,
}

impl Whole {
    /// Adds what `event` says.
    ///
    /// Errors: the answer failed.
    pub(crate) fn add(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Begun { n_prompt, n_cached } => {
                self.usage.n_prompt = n_prompt;
                self.usage.n_cached = n_cached;
            }
            Event::Reasoning(text) => self.reasoning += &text,
            Event::Text(text) => self.text += &text,
            Event::CallBegun { id, name, .. } => self.calls.push(Call {
                id,
                name,
                arguments: String::new(),
            }),
            Event::CallArguments { text, .. } => {
                if let Some(call) = self.calls.last_mut() {
                    call.arguments += &text;
                }
            }
            Event::CallEnded => {}
            Event::Logprobs(token) => self.logprobs.push(token),
            Event::Ended {
                finish,
                usage,
                receipt,
            } => {
                self.finish = Some(finish);
                self.usage = usage;
                self.receipt = receipt;
            }
            Event::Failed(error) => return Err(error),
        }
        Ok(())
    }
}

/// All of `n` answers, once they have ended.
///
/// Errors: one of them failed.
pub(crate) async fn whole(mut answers: Answers, n: usize) -> Result<VecDeque<Whole>> {
    let mut all: VecDeque<Whole> = (0..n).map(|_| Whole::default()).collect();
    while let Some((choice, events)) = answers.next().await {
        for event in events {
            if let Some(whole) = all.get_mut(choice) {
                whole.add(event)?;
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
