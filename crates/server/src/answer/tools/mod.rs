//! Calls of tools: how each family of models writes them, as a grammar and as a parser of text that streams.

mod deepseek;
mod json;
mod named;
mod parameters;
mod python;
mod style;
mod tool;
mod values;

use std::sync::Arc;

use serde_json::{Map, Value};
use sterna_text::Tokenizer;

use super::channels;
use deepseek::{CALL, CALL_END, CALLS, CALLS_END, DeepSeekReader, SEPARATOR};
use json::{Frame, JsonReader};
use named::NamedReader;
use parameters::ParameterReader;
use python::PythonReader;
pub(crate) use style::CallStyle;
use style::PROBE;
pub(crate) use tool::Tool;
pub(super) use tool::{json_rule, quoted};

/// How a model writes calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen, and whoever has no form of its own.
    #[default]
    Tagged,
    /// `<tool_call><function=…><parameter=…>…</parameter></function></tool_call>`: Qwen3.5, Qwen3-Coder.
    Parameters,
    /// The answer is `{"name": …, "parameters": {…}}`: Llama 3.
    Bare,
    /// `[TOOL_CALLS][{"name": …, "arguments": {…}}]`: Mistral.
    List,
    /// `[TOOL_CALLS]…[ARGS]{…}`: newer Mistrals.
    Named,
    /// `<tool_calls>[{"name": …, "arguments": {…}}]</tool_calls>`: Jamba.
    TaggedList,
    /// Between control tokens, with JSON in a block of code: DeepSeek V3 and R1.
    DeepSeek,
    /// The same without the block: DeepSeek V3.1.
    DeepSeekPlain,
    /// `<|tool_call_start|>[…(…=…), …]<|tool_call_end|>`: LFM2.
    Python,
    /// Messages on a channel: gpt-oss. All that such a model writes is [read](super::channels) as messages.
    Channels,
}

const TAG: &str = "<tool_call>";
const TAG_END: &str = "</tool_call>";
const LIST: &str = "[TOOL_CALLS]";
const ARRAY: &str = "<tool_calls>";
const ARRAY_END: &str = "</tool_calls>";
const PYTHON: &str = "<|python_tag|>";

/// Bytes of the rules of a call: with more, the grammar is refused.
const MAX_RULES: usize = 1 << 20;

/// What is before the arguments of a call in bytes at most: more is no call.
const MAX_HEAD: usize = 512;

/// Calls in an answer at most, where a grammar says what may come.
const MAX_CALLS: usize = 8;

impl ToolFormat {
    /// The format of the call of `probe_call` that `text` has, if it is one of these.
    fn of(text: &str) -> Option<ToolFormat> {
        let at = text.find(PROBE)?;
        let (before, after) = text.split_at(at);
        // The newest mark before the call: instructions may name several.
        let marks = [TAG, LIST, ARRAY, CALL, python::CALLS].into_iter();
        let newest = marks
            .filter_map(|mark| Some((before.rfind(mark)? + mark.len(), mark)))
            .max();
        let Some((end, mark)) = newest else {
            return (after.contains("\"parameters\"")).then_some(ToolFormat::Bare);
        };
        match (mark, before[end..].trim_start()) {
            (TAG, "<function=") => Some(ToolFormat::Parameters),
            (_, between) if between.contains(TAG_END) => None,
            (TAG, between) if between.starts_with('{') => Some(ToolFormat::Tagged),
            (LIST, between) if between.starts_with('[') => Some(ToolFormat::List),
            (LIST, "") => Some(ToolFormat::Named),
            (ARRAY, between) if between.starts_with('[') => Some(ToolFormat::TaggedList),
            (CALL, between) if between.ends_with(SEPARATOR) => Some(ToolFormat::DeepSeek),
            (CALL, "") => Some(ToolFormat::DeepSeekPlain),
            // Some templates write JSON, which models weren't trained on.
            (python::CALLS, between) if between.starts_with('[') => Some(ToolFormat::Python),
            _ => None,
        }
    }

    /// What the model writes before a call; without one, a call begins the answer.
    pub(crate) fn mark(self) -> Option<&'static str> {
        match self {
            ToolFormat::Tagged | ToolFormat::Parameters => Some(TAG),
            ToolFormat::Bare | ToolFormat::Channels => None,
            ToolFormat::List | ToolFormat::Named => Some(LIST),
            ToolFormat::TaggedList => Some(ARRAY),
            ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => Some(CALLS),
            ToolFormat::Python => Some(python::CALLS),
        }
    }

    /// How a call is written, for models whose templates don't say.
    pub(crate) fn example(self) -> String {
        let object = |arguments: &str| format!("{{\"name\": NAME, \"{arguments}\": OBJECT}}");
        match self {
            ToolFormat::Tagged => format!("{TAG}\n{}\n{TAG_END}", object("arguments")),
            ToolFormat::Parameters => parameters::EXAMPLE.to_owned(),
            ToolFormat::Bare => object("parameters"),
            ToolFormat::List => format!("{LIST}[{}]", object("arguments")),
            ToolFormat::Named => format!("{LIST}NAME{}OBJECT", named::ARGUMENTS),
            ToolFormat::TaggedList => format!("{ARRAY}[{}]{ARRAY_END}", object("arguments")),
            ToolFormat::DeepSeek => format!(
                "{CALLS}{CALL}function{SEPARATOR}NAME\n```json\nOBJECT\n```{CALL_END}{CALLS_END}"
            ),
            ToolFormat::DeepSeekPlain => {
                format!("{CALLS}{CALL}NAME{SEPARATOR}OBJECT{CALL_END}{CALLS_END}")
            }
            ToolFormat::Python => {
                format!("{}[NAME(KEY=VALUE, …)]{}", python::CALLS, python::CALLS_END)
            }
            ToolFormat::Channels => {
                "OBJECT on the channel commentary, to=functions.NAME".to_owned()
            }
        }
    }

    /// What is around calls that are objects of JSON.
    fn frame(self) -> Frame {
        let mark = self.mark().unwrap_or_default();
        let is_list = matches!(
            self,
            ToolFormat::List | ToolFormat::TaggedList | ToolFormat::Python
        );
        let end = match self {
            ToolFormat::Tagged => Some(TAG_END),
            ToolFormat::TaggedList => Some(ARRAY_END),
            ToolFormat::Python => Some(python::CALLS_END),
            _ => None,
        };
        Frame { mark, is_list, end }
    }

    /// Control tokens that stand for marks, with what they mean: they are in no text.
    pub(crate) fn tokens(self, tokenizer: &Tokenizer) -> Vec<(u32, &'static str)> {
        let marks = [
            TAG,
            TAG_END,
            LIST,
            named::ARGUMENTS,
            named::ID,
            ARRAY,
            ARRAY_END,
            PYTHON,
            CALLS,
            CALLS_END,
            CALL,
            CALL_END,
            SEPARATOR,
            python::CALLS,
            python::CALLS_END,
        ];
        let marks = match self {
            ToolFormat::Channels => &channels::MARKS[..],
            _ => &marks[..],
        };
        let marks = marks.iter().copied();
        marks
            .filter_map(|mark| Some((tokenizer.token_id(mark)?, mark)))
            .filter(|(id, _)| tokenizer.is_special(*id))
            .collect()
    }

    /// The rule `calls` of a Lark grammar: calls of `tools`, one alone unless `parallel`; and, where there is a mark,
    /// `after_mark`: what follows the first.
    pub(crate) fn grammar(self, tools: &[Tool], parallel: bool, tokenizer: &Tokenizer) -> String {
        let mark = |mark: &str| match tokenizer.token_id(mark) {
            Some(id) if tokenizer.is_special(id) => format!("<[{id}]>"),
            _ => quoted(mark),
        };
        // Calls after the first, with what separates them.
        let more = |separated: &str| match parallel {
            true => format!(" ({separated}){{0,{}}}", MAX_CALLS - 1),
            false => String::new(),
        };
        let calls = match self {
            ToolFormat::Tagged | ToolFormat::Parameters => format!(
                "calls: tagged{}\ntagged: {} after_mark\nafter_mark: \"\\n\" call \"\\n\" {}\n",
                more("\"\\n\" tagged"),
                mark(TAG),
                mark(TAG_END)
            ),
            // There is only one: it is the answer, or ends the message that ends it.
            ToolFormat::Bare | ToolFormat::Channels => "calls: call\n".to_owned(),
            ToolFormat::List => format!(
                "calls: {} after_mark\nafter_mark: \"[\" call{} \"]\"\n",
                mark(LIST),
                more("\", \" call")
            ),
            ToolFormat::Named => format!(
                "calls: marked{}\nmarked: {} after_mark\nafter_mark: call\n",
                more("marked"),
                mark(LIST)
            ),
            ToolFormat::TaggedList => format!(
                "calls: {} after_mark\nafter_mark: \"[\\n    \" call{} \"\\n]\" {}\n",
                mark(ARRAY),
                more("\",\\n    \" call"),
                mark(ARRAY_END)
            ),
            ToolFormat::DeepSeek => format!(
                "calls: {} after_mark\nafter_mark: marked{} {}\nmarked: {} \"function\" {} call {}\n",
                mark(CALLS),
                more("\"\\n\" marked"),
                mark(CALLS_END),
                mark(CALL),
                mark(SEPARATOR),
                mark(CALL_END)
            ),
            ToolFormat::Python => format!(
                "calls: {} after_mark\nafter_mark: \"[\" call{} \"]\" {}\n",
                mark(python::CALLS),
                more("\", \" call"),
                mark(python::CALLS_END)
            ),
            ToolFormat::DeepSeekPlain => format!(
                "calls: {} after_mark\nafter_mark: marked{} {}\nmarked: {} call {}\n",
                mark(CALLS),
                more("marked"),
                mark(CALLS_END),
                mark(CALL),
                mark(CALL_END)
            ),
        };
        let names: Vec<String> = (0..tools.len())
            .map(|index| format!("call_{index}"))
            .collect();
        // Definitions of several tools may have the same names, so each is a rule of its own.
        let rules = names.iter().zip(tools).map(|(name, tool)| match self {
            ToolFormat::Parameters => parameters::rules(name, tool),
            ToolFormat::Python => python::rules(name, tool),
            ToolFormat::Bare => json_rule(name, tool.call("parameters")),
            ToolFormat::Channels => channels::call_rules(name, tool, tokenizer),
            ToolFormat::Tagged | ToolFormat::List | ToolFormat::TaggedList => {
                json_rule(name, tool.call("arguments"))
            }
            ToolFormat::DeepSeek => {
                let head = quoted(&format!("{}\n```json\n", tool.name));
                let arguments = json_rule(&format!("{name}_arguments"), tool.parameters.clone());
                format!("{name}: {head} {name}_arguments \"\\n```\"\n{arguments}")
            }
            ToolFormat::DeepSeekPlain | ToolFormat::Named => {
                let separator = match self {
                    ToolFormat::Named => mark(named::ARGUMENTS),
                    _ => mark(SEPARATOR),
                };
                let head = quoted(&tool.name);
                let arguments = json_rule(&format!("{name}_arguments"), tool.parameters.clone());
                format!("{name}: {head} {separator} {name}_arguments\n{arguments}")
            }
        });
        let rules: String = rules.collect();
        let shared = match self {
            ToolFormat::Parameters => parameters::SHARED_RULES.to_owned(),
            ToolFormat::Python => python::shared_rules(),
            _ => String::new(),
        };
        format!("{calls}call: {}\n{rules}{shared}", names.join(" | "))
    }
}

/// What is said of calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CallEvent {
    /// One begins.
    Begun { name: String },
    /// More of its arguments, as JSON text.
    Arguments(String),
    /// It is complete.
    Ended,
    /// It is no call, but this text.
    Text(String),
}

/// Reads calls from text that follows a mark, piece by piece.
#[derive(Debug, Clone)]
pub(crate) struct CallReader {
    format: ToolFormat,
    tools: Arc<[Tool]>,
    kind: Kind,
}

#[derive(Debug, Clone)]
enum Kind {
    /// After a mark and this text: the first characters say how calls are written, for not every model keeps to its
    /// template.
    Unsure(String),
    Json(JsonReader),
    Named(NamedReader),
    Parameters(ParameterReader),
    DeepSeek(DeepSeekReader),
    Python(PythonReader),
}

impl CallReader {
    /// Of calls of `tools` in `format`.
    pub(crate) fn new(format: ToolFormat, tools: &Arc<[Tool]>) -> CallReader {
        CallReader {
            format,
            tools: tools.clone(),
            kind: match format {
                ToolFormat::Tagged
                | ToolFormat::Parameters
                | ToolFormat::Named
                | ToolFormat::Python => Kind::Unsure(String::new()),
                ToolFormat::Bare
                | ToolFormat::List
                | ToolFormat::TaggedList
                | ToolFormat::Channels => Kind::Json(JsonReader::new(format.frame())),
                ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => {
                    Kind::DeepSeek(DeepSeekReader::default())
                }
            },
        }
    }

    /// Reads `text`; returns what of it doesn't belong to calls any more, if they are over.
    pub(crate) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        match &mut self.kind {
            Kind::Unsure(held) => {
                let text = std::mem::take(held) + text;
                let Some(kind) = self.kind_of(&text) else {
                    self.kind = Kind::Unsure(text);
                    return None;
                };
                self.kind = kind;
                self.push(&text, events)
            }
            Kind::Json(reader) => reader.push(text, events),
            Kind::Named(reader) => reader.push(text, events),
            Kind::Parameters(reader) => reader.push(text, events),
            Kind::DeepSeek(reader) => reader.push(text, events),
            Kind::Python(reader) => reader.push(text, events),
        }
    }

    /// How calls are written that begin with `text`, once that is known.
    fn kind_of(&self, text: &str) -> Option<Kind> {
        let mut chars = text.chars().filter(|c| !c.is_whitespace());
        let frame = self.format.frame();
        let json = |frame: Frame| Kind::Json(JsonReader::new(frame));
        let is_python = self.format == ToolFormat::Python;
        let is_named = self.format == ToolFormat::Named;
        Some(match chars.next()? {
            '[' | '{' if is_named => json(ToolFormat::List.frame()),
            _ if is_named => Kind::Named(NamedReader::default()),
            '[' if is_python => match chars.next()? {
                '{' => json(frame),
                _ => Kind::Python(PythonReader::default()),
            },
            '{' if is_python => json(Frame {
                is_list: false,
                ..frame
            }),
            _ if is_python => Kind::Python(PythonReader::default()),
            '<' => Kind::Parameters(ParameterReader::new(self.tools.clone())),
            _ => json(ToolFormat::Tagged.frame()),
        })
    }

    /// The end of the answer.
    pub(crate) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match &mut self.kind {
            Kind::Unsure(text) if text.trim().is_empty() => {}
            Kind::Unsure(text) => {
                let mark = self.format.mark().unwrap_or_default();
                events.push(CallEvent::Text(format!("{mark}{text}")));
            }
            Kind::Json(reader) => reader.finish(events),
            Kind::Named(reader) => reader.finish(events),
            Kind::Parameters(reader) => reader.finish(events),
            Kind::DeepSeek(reader) => reader.finish(events),
            Kind::Python(reader) => reader.finish(events),
        }
    }
}

/// The arguments of a call as templates want them: a mapping, not its text.
pub(crate) fn as_mapping(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(value @ Value::Object(_)) => value,
        _ if arguments.trim().is_empty() => Value::Object(Map::new()),
        _ => Value::from(arguments),
    }
}

#[cfg(test)]
mod tests;
