//! The prompts of a file, answered together: several sequences in shared steps.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, IsTerminal};

use anyhow::{Context, Result, anyhow, bail};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use sterna::constraint::{Constraints, Grammar};
use sterna::generate::{Event, Request, TextOptions, TokenConstraint};
use sterna::native::Device;
use sterna::sampling::SamplingOptions;
use sterna::scheduler::{Scheduler, SequenceId};
use sterna::sequence::Sequence;
use sterna_engine::{Sampler, Session};
use sterna_format::hf::GenerationConfig;
use sterna_text::{ChatInput, ChatTemplate, Encode, Tokenizer};

use crate::output;
use crate::progress::Progress;
use crate::prompt::{EMPTY_PROMPT, now};
use crate::runtime::{self, StatsReport};

/// A line of the file.
pub(crate) struct Line {
    /// Returned with the result.
    id: Option<Value>,
    prompt: Result<Prompt>,
}

/// A prompt, and what differs for it from the flags.
#[derive(Debug, Default)]
struct Prompt {
    text: Option<String>,
    messages: Option<Vec<Value>>,
    temperature: Option<f32>,
    top_k: Option<usize>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    repeat_last_n: Option<usize>,
    frequency_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    seed: Option<u64>,
    max_tokens: Option<usize>,
    stop: Vec<String>,
    /// What the answer has to match.
    grammar: Option<Grammar>,
}

/// The lines of `text`, the content of the file called `name`, that aren't blank: each a prompt. If the first
/// begins with `{`, all are JSON.
///
/// Errors: there are none. A line that is no prompt has an error of its own.
pub(crate) fn parse(name: &str, text: &str) -> Result<Vec<Line>> {
    let lines = text.lines().enumerate();
    let lines: Vec<(usize, &str)> = lines.filter(|(_, line)| !line.trim().is_empty()).collect();
    let Some((_, first)) = lines.first() else {
        bail!("{name}: expected a prompt on each line, found none");
    };
    let is_json = first.trim_start().starts_with('{');
    let lines = lines.into_iter().map(|(index, line)| match is_json {
        true => {
            let Line { id, prompt } = parse_json(line);
            let prompt = prompt.with_context(|| format!("line {}", index + 1));
            Line { id, prompt }
        }
        false => Line {
            id: None,
            prompt: Ok(Prompt {
                text: Some(line.to_owned()),
                ..Prompt::default()
            }),
        },
    });
    Ok(lines.collect())
}

fn parse_json(line: &str) -> Line {
    let members = match serde_json::from_str(line) {
        Ok(Value::Object(members)) => Ok(members),
        Ok(other) => Err(anyhow!(
            "expected a JSON object, found {}",
            described(&other)
        )),
        Err(error) => Err(anyhow!(
            "expected a JSON object, found text that is no JSON at column {}",
            error.column()
        )),
    };
    match members {
        Ok(mut members) => Line {
            id: members.remove("id").filter(|id| !id.is_null()),
            prompt: Prompt::of(Members(members)),
        },
        Err(error) => Line {
            id: None,
            prompt: Err(error),
        },
    }
}

/// The members of a JSON object that have not been read yet.
struct Members(Map<String, Value>);

impl Members {
    fn take<T: DeserializeOwned>(&mut self, name: &str, expected: &str) -> Result<Option<T>> {
        let value = self.0.remove(name).unwrap_or_default();
        let found = described(&value);
        serde_json::from_value(value)
            .map_err(|_| anyhow!("`{name}`: expected {expected}, found {found}"))
    }

    fn number(&mut self, name: &str) -> Result<Option<f32>> {
        self.take(name, "a number")
    }

    fn whole<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>> {
        self.take(name, "a whole number of at least 0")
    }

    fn grammar(&mut self) -> Result<Option<Grammar>> {
        let schema = self.0.remove("json_schema");
        let object: Option<bool> = self.take("json_object", "true or false")?;
        let regex = self.take("regex", "text")?;
        let lark = self.take("grammar", "text")?;
        let asked = [
            schema.map(|schema| Grammar::JsonSchema(schema.to_string())),
            object.unwrap_or(false).then_some(Grammar::JsonObject),
            regex.map(Grammar::Regex),
            lark.map(Grammar::Lark),
        ];
        let mut asked = asked.into_iter().flatten();
        match (asked.next(), asked.next()) {
            (grammar, None) => Ok(grammar),
            _ => bail!(
                "expected one of `json_schema`, `json_object`, `regex` and `grammar`, found several"
            ),
        }
    }
}

/// What `value` is, in words.
fn described(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => format!("the number {value}"),
        Value::String(_) => "text".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

impl Prompt {
    fn of(mut members: Members) -> Result<Prompt> {
        let stop = match members.0.remove("stop") {
            Some(Value::String(text)) => Some(vec![text]),
            Some(other) => {
                members.0.insert("stop".to_owned(), other);
                members.take("stop", "a text or an array of texts")?
            }
            None => None,
        };
        let prompt = Prompt {
            text: members.take("prompt", "text")?,
            messages: members.take("messages", "an array of messages")?,
            temperature: members.number("temperature")?,
            top_k: members.whole("top_k")?,
            top_p: members.number("top_p")?,
            min_p: members.number("min_p")?,
            repeat_penalty: members.number("repeat_penalty")?,
            repeat_last_n: members.whole("repeat_last_n")?,
            frequency_penalty: members.number("frequency_penalty")?,
            presence_penalty: members.number("presence_penalty")?,
            seed: members.whole("seed")?,
            max_tokens: members.whole("max_tokens")?,
            stop: stop.unwrap_or_default(),
            grammar: members.grammar()?,
        };
        if let Some(name) = members.0.keys().next() {
            bail!("expected `prompt` or `messages`, settings and `id`, found `{name}`");
        }
        match (&prompt.text, &prompt.messages) {
            (Some(_), None) | (None, Some(_)) => {}
            (None, None) => bail!("expected `prompt` or `messages`, found neither"),
            (Some(_), Some(_)) => bail!("expected `prompt` or `messages`, found both"),
        }
        if prompt.stop.iter().any(String::is_empty) {
            bail!("`stop`: expected text that ends the answer, found none");
        }
        Ok(prompt)
    }
}

/// What all prompts have in common.
pub(crate) struct BatchOptions {
    pub(crate) tokenizer: Tokenizer,
    /// Turns messages into prompts; without it, every prompt is continued as it is.
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) system: Option<String>,
    pub(crate) sampling: SamplingOptions,
    pub(crate) recommended: GenerationConfig,
    pub(crate) stop_ids: Vec<u32>,
    pub(crate) stop_strings: Vec<String>,
    /// Maximum tokens of an answer.
    pub(crate) max_tokens: usize,
    /// Maximum tokens to draft.
    pub(crate) speculate: Option<usize>,
    /// What answers have to match, unless their line says.
    pub(crate) constraint: Option<Box<dyn TokenConstraint>>,
    pub(crate) constraints: Constraints,
    pub(crate) n_vocab: usize,
    /// Maximum number of sequences.
    pub(crate) n_parallel: usize,
}

/// The result of a prompt.
#[derive(Serialize)]
#[serde(untagged)]
enum Outcome {
    Answer {
        text: String,
        ids: Vec<u32>,
        seed: u64,
        #[serde(flatten)]
        stats: StatsReport,
    },
    Failure {
        error: String,
    },
}

#[derive(Serialize)]
struct Report {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Value>,
    #[serde(flatten)]
    outcome: Outcome,
}

/// An answer in progress.
struct Running {
    index: usize,
    id: Option<Value>,
    text: String,
    seed: u64,
}

/// Answers `lines` and prints the results in their order; `open` begins empty sessions of one model, which is
/// loaded again if its argument is true.
///
/// Errors: some failed; their results say why.
pub(crate) fn answer(
    lines: Vec<Line>,
    options: &BatchOptions,
    mut open: impl FnMut(bool) -> Result<Session<Device>>,
) -> Result<()> {
    let n_lines = lines.len();
    // Not between results.
    let progress =
        (!io::stdout().is_terminal()).then(|| Progress::items("answering", n_lines as u64));
    let first = open(false)?;
    let mut scheduler = Scheduler::new(runtime::scheduling(&first));
    let mut free = vec![scheduler.add(Sequence::new(first))];
    while free.len() < options.n_parallel.min(n_lines) {
        match open(false) {
            Ok(session) => free.push(scheduler.add(Sequence::new(session))),
            Err(error) => {
                let n = free.len();
                output::note(format_args!("note: {n} prompts at a time: {error:#}"));
                break;
            }
        }
    }
    let mut lines = lines.into_iter().enumerate();
    let mut running: HashMap<SequenceId, Running> = HashMap::new();
    let mut printer = Printer::default();
    loop {
        while let Some(&sequence) = free.last()
            && let Some((index, line)) = lines.next()
        {
            match options.start(&mut scheduler, sequence, index, line) {
                Ok(answer) => {
                    running.insert(sequence, answer);
                    free.pop();
                }
                Err(failed) => printer.add(*failed),
            }
        }
        let n_printed = printer.print()?;
        progress.iter().for_each(|progress| progress.add(n_printed));
        if running.is_empty() {
            break;
        }
        let mut lost = None;
        let stepped = scheduler.step();
        for (sequence, event) in stepped.or_else(|error| printer.leave(error.into()))? {
            let outcome = match event {
                Event::Token(token) => {
                    let answer = running.get_mut(&sequence).expect("it was started");
                    answer.text += &token.text;
                    continue;
                }
                Event::Ended { text, .. } => Ok(text),
                Event::Failed(error) => Err(error),
                Event::DeviceLost { message } => {
                    lost = Some(message);
                    continue;
                }
                _ => continue,
            };
            let Running {
                index,
                id,
                text,
                seed,
            } = running.remove(&sequence).expect("it was started");
            let generator = scheduler.finish(sequence).expect("it was started");
            free.push(sequence);
            let outcome = match outcome {
                Ok(end) => Outcome::Answer {
                    text: text + &end,
                    ids: generator.answer().to_vec(),
                    seed,
                    stats: (*generator.stats()).into(),
                },
                Err(error) => failure(&error.into()),
            };
            printer.add(Report { index, id, outcome });
        }
        if let Some(message) = lost {
            output::note(format_args!("note: {message}; loading the model again"));
            let mut again = true;
            let restored = scheduler.restore(|_| open(std::mem::take(&mut again)));
            restored.or_else(|error| printer.leave(error))?;
        }
    }
    match printer.n_failed {
        0 => Ok(()),
        n => bail!("{n} of {n_lines} prompts failed"),
    }
}

impl BatchOptions {
    /// Begins to answer `line` on `sequence`.
    fn start(
        &self,
        scheduler: &mut Scheduler<Device>,
        sequence: SequenceId,
        index: usize,
        line: Line,
    ) -> Result<Running, Box<Report>> {
        let Line { id, prompt } = line;
        let request = prompt.and_then(|prompt| self.request(prompt));
        let started = request.and_then(|request| {
            let seed = request.sampler.config().seed;
            scheduler.start(sequence, request)?;
            Ok(seed)
        });
        match started {
            Ok(seed) => Ok(Running {
                index,
                id,
                text: String::new(),
                seed,
            }),
            Err(error) => Err(Box::new(Report {
                index,
                id,
                outcome: failure(&error),
            })),
        }
    }

    fn request(&self, prompt: Prompt) -> Result<Request> {
        let all = &self.sampling;
        let sampling = SamplingOptions {
            temperature: prompt.temperature.or(all.temperature),
            top_k: prompt.top_k.or(all.top_k),
            top_p: prompt.top_p.or(all.top_p),
            min_p: prompt.min_p.or(all.min_p),
            repeat_penalty: prompt.repeat_penalty.or(all.repeat_penalty),
            repeat_last_n: prompt.repeat_last_n.or(all.repeat_last_n),
            frequency_penalty: prompt.frequency_penalty.or(all.frequency_penalty),
            presence_penalty: prompt.presence_penalty.or(all.presence_penalty),
            seed: prompt.seed.or(all.seed),
            ..SamplingOptions::default()
        };
        let sampler = Sampler::new(sampling.config(&self.recommended), self.n_vocab)?;
        let constraint = match &prompt.grammar {
            Some(grammar) => Some(self.constraints.of(grammar)?),
            None => self.constraint.clone(),
        };
        let stop_strings = [&self.stop_strings[..], &prompt.stop].concat();
        Ok(Request {
            max_tokens: prompt.max_tokens.unwrap_or(self.max_tokens),
            stop_ids: self.stop_ids.clone(),
            speculate: self.speculate,
            constraint,
            text: Some(TextOptions {
                tokenizer: self.tokenizer.clone(),
                stop_strings,
            }),
            ..Request::new(self.ids(prompt)?, sampler)
        })
    }

    /// The tokens of `prompt`.
    fn ids(&self, prompt: Prompt) -> Result<Vec<u32>> {
        let Some(template) = &self.template else {
            let text = prompt.text.ok_or_else(|| {
                anyhow!("`messages`: expected `prompt`, as there is no chat template")
            })?;
            return Ok(self.tokenizer.encode(&text, Encode::RAW)?);
        };
        let mut messages = match (prompt.messages, prompt.text) {
            (Some(messages), _) => messages,
            (None, text) => {
                let text = text.unwrap_or_default();
                if text.trim().is_empty() {
                    bail!(EMPTY_PROMPT);
                }
                vec![json!({ "role": "user", "content": text })]
            }
        };
        if let Some(system) = &self.system
            && messages
                .first()
                .is_none_or(|first| first["role"] != "system")
        {
            messages.insert(0, json!({ "role": "system", "content": system }));
        }
        let input = ChatInput {
            messages,
            add_generation_prompt: true,
            now: Some(now()),
            ..ChatInput::default()
        };
        let prompt = template.prompt(&input, &self.tokenizer)?;
        Ok(self.tokenizer.encode_prompt(&prompt)?)
    }
}

fn failure(error: &anyhow::Error) -> Outcome {
    let error = format!("{error:#}");
    Outcome::Failure {
        error: output::shortened(&error).into_owned(),
    }
}

/// Prints results in the order of their prompts.
#[derive(Default)]
struct Printer {
    /// Those that wait for earlier ones.
    waiting: BTreeMap<usize, Report>,
    n_printed: usize,
    n_failed: usize,
}

impl Printer {
    fn add(&mut self, report: Report) {
        self.n_failed += usize::from(matches!(report.outcome, Outcome::Failure { .. }));
        self.waiting.insert(report.index, report);
    }

    /// Prints what waits for nothing; returns how many results that were.
    fn print(&mut self) -> Result<u64> {
        let before = self.n_printed;
        while let Some(report) = self.waiting.remove(&self.n_printed) {
            output::json(&report)?;
            self.n_printed += 1;
        }
        Ok((self.n_printed - before) as u64)
    }

    /// Prints what there is, as `error` ends the batch: those before it never come.
    fn leave<T>(&mut self, error: anyhow::Error) -> Result<T> {
        for report in std::mem::take(&mut self.waiting).into_values() {
            output::json(&report)?;
        }
        Err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_printed_before_leaving() {
        let mut printer = Printer::default();
        printer.add(Report {
            index: 1,
            id: None,
            outcome: failure(&anyhow!("too long")),
        });
        assert_eq!(printer.print().unwrap(), 0);
        let error = printer.leave::<()>(anyhow!("no device")).unwrap_err();
        assert_eq!(error.to_string(), "no device");
        assert!(printer.waiting.is_empty());
    }

    #[test]
    fn lines_are_prompts_or_all_json() {
        let prompts = |text| -> Vec<String> {
            let lines = parse("f", text).unwrap().into_iter();
            lines
                .map(|line| line.prompt.unwrap().text.unwrap())
                .collect()
        };
        assert_eq!(prompts("one\n\n two {\n"), ["one", " two {"]);
        assert_eq!(prompts("{\"prompt\": \"one\"}\r\n\n"), ["one"]);
        let error = parse("f", "\n \n").err().unwrap().to_string();
        assert_eq!(error, "f: expected a prompt on each line, found none");
    }

    #[test]
    fn a_line_that_is_no_prompt_is_refused_alone() {
        for (line, message) in [
            ("{}", "expected `prompt` or `messages`, found neither"),
            (
                r#"{"prompt": "a", "messages": []}"#,
                "expected `prompt` or `messages`, found both",
            ),
            (
                "b",
                "expected a JSON object, found text that is no JSON at column 1",
            ),
            ("[]", "expected a JSON object, found an array"),
            (
                r#"{"prompt": 1}"#,
                "`prompt`: expected text, found the number 1",
            ),
            (
                r#"{"prompt": "a", "top_k": -1}"#,
                "`top_k`: expected a whole number of at least 0, found the number -1",
            ),
            (
                r#"{"prompt": "a", "stop": ["b", ""]}"#,
                "`stop`: expected text that ends the answer, found none",
            ),
            (
                r#"{"prompt": "a", "stop": 2}"#,
                "`stop`: expected a text or an array of texts, found the number 2",
            ),
            (
                r#"{"prompt": "a", "top_n": 1}"#,
                "expected `prompt` or `messages`, settings and `id`, found `top_n`",
            ),
            (
                r#"{"prompt": "a", "regex": "b", "json_object": true}"#,
                "expected one of `json_schema`, `json_object`, `regex` and `grammar`, found several",
            ),
        ] {
            let text = format!("{{\"prompt\": \"a\"}}\n\n{line}\n");
            let mut lines = parse("f", &text).unwrap();
            let error = lines.pop().unwrap().prompt.unwrap_err();
            assert_eq!(format!("{error:#}"), format!("line 3: {message}"));
            assert!(lines.pop().unwrap().prompt.is_ok());
        }
        let line = parse_json(r#"{"id": 7, "prompt": null}"#);
        assert!(line.id == Some(json!(7)) && line.prompt.is_err());
    }
}
