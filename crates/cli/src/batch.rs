//! The prompts of a file, answered together: several sequences in shared steps.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, IsTerminal};

use anyhow::{Context, Result, anyhow, bail};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sterna::generate::{Event, Request, TextOptions};
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

/// A prompt of the file, and what differs for it from the flags.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Line {
    /// Returned with the answer.
    id: Option<Value>,
    prompt: Option<String>,
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
    stop: Option<Stop>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// The prompts in `text`, the content of the file called `name`: one on each line that isn't blank. If the
/// first begins with `{`, all are JSON.
pub(crate) fn parse(name: &str, text: &str) -> Result<Vec<Line>> {
    let lines = text.lines().enumerate();
    let lines: Vec<(usize, &str)> = lines.filter(|(_, line)| !line.trim().is_empty()).collect();
    let Some((_, first)) = lines.first() else {
        bail!("{name}: expected a prompt on each line, found none");
    };
    let is_json = first.trim_start().starts_with('{');
    let lines = lines.into_iter().map(|(index, line)| match is_json {
        true => parse_json(line).with_context(|| format!("{name}: line {}", index + 1)),
        false => Ok(Line {
            prompt: Some(line.to_owned()),
            ..Line::default()
        }),
    });
    lines.collect()
}

fn parse_json(line: &str) -> Result<Line> {
    let line: Line = serde_json::from_str(line)?;
    match (&line.prompt, &line.messages) {
        (Some(_), None) | (None, Some(_)) => {}
        (None, None) => bail!("expected `prompt` or `messages`, found neither"),
        (Some(_), Some(_)) => bail!("expected `prompt` or `messages`, found both"),
    }
    if line.stops().iter().any(String::is_empty) {
        bail!("`stop`: expected text that ends the answer, found none");
    }
    Ok(line)
}

impl Line {
    fn stops(&self) -> &[String] {
        match &self.stop {
            None => &[],
            Some(Stop::One(text)) => std::slice::from_ref(text),
            Some(Stop::Several(texts)) => texts,
        }
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
        mut line: Line,
    ) -> Result<Running, Box<Report>> {
        let id = line.id.take();
        let started = self.request(line).and_then(|request| {
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

    fn request(&self, line: Line) -> Result<Request> {
        let all = &self.sampling;
        let sampling = SamplingOptions {
            temperature: line.temperature.or(all.temperature),
            top_k: line.top_k.or(all.top_k),
            top_p: line.top_p.or(all.top_p),
            min_p: line.min_p.or(all.min_p),
            repeat_penalty: line.repeat_penalty.or(all.repeat_penalty),
            repeat_last_n: line.repeat_last_n.or(all.repeat_last_n),
            frequency_penalty: line.frequency_penalty.or(all.frequency_penalty),
            presence_penalty: line.presence_penalty.or(all.presence_penalty),
            seed: line.seed.or(all.seed),
            ..SamplingOptions::default()
        };
        let sampler = Sampler::new(sampling.config(&self.recommended), self.n_vocab)?;
        let stop_strings = [&self.stop_strings, line.stops()].concat();
        Ok(Request {
            max_tokens: line.max_tokens.unwrap_or(self.max_tokens),
            stop_ids: self.stop_ids.clone(),
            speculate: self.speculate,
            text: Some(TextOptions {
                tokenizer: self.tokenizer.clone(),
                stop_strings,
            }),
            ..Request::new(self.ids(line)?, sampler)
        })
    }

    /// The tokens of the prompt of `line`.
    fn ids(&self, line: Line) -> Result<Vec<u32>> {
        let Some(template) = &self.template else {
            let prompt = line.prompt.ok_or_else(|| {
                anyhow!("`messages`: expected `prompt`, as there is no chat template")
            })?;
            return Ok(self.tokenizer.encode(&prompt, Encode::RAW)?);
        };
        let mut messages = match (line.messages, line.prompt) {
            (Some(messages), _) => messages,
            (None, prompt) => {
                let prompt = prompt.unwrap_or_default();
                if prompt.trim().is_empty() {
                    bail!(EMPTY_PROMPT);
                }
                vec![json!({ "role": "user", "content": prompt })]
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
            lines.map(|line| line.prompt.unwrap()).collect()
        };
        assert_eq!(prompts("one\n\n two {\n"), ["one", " two {"]);
        assert_eq!(prompts("{\"prompt\": \"one\"}\r\n\n"), ["one"]);
        for (text, message) in [
            ("\n \n", "f: expected a prompt on each line, found none"),
            (
                "{}",
                "f: line 1: expected `prompt` or `messages`, found neither",
            ),
            (
                "{\"prompt\": \"a\"}\n\nb",
                "f: line 3: expected value at line 1 column 1",
            ),
            (
                r#"{"prompt": "a", "messages": []}"#,
                "f: line 1: expected `prompt` or `messages`, found both",
            ),
            (
                r#"{"prompt": "a", "stop": ["b", ""]}"#,
                "f: line 1: `stop`: expected text that ends the answer, found none",
            ),
            (r#"{"prompt": "a", "top_n": 1}"#, "unknown field `top_n`"),
        ] {
            let error = format!("{:#}", parse("f", text).unwrap_err());
            assert!(error.contains(message), "{error}");
        }
    }
}
