//! Calls of tools: how each family of models writes them, as a grammar and as a parser of text that streams.

mod gemma;
mod json;
mod marked;
mod named;
mod parameters;
mod python;
mod style;
mod tool;
mod values;

use std::sync::Arc;

use serde_json::{Map, Value};
use sterna_text::Tokenizer;

use super::split::Messages;
use super::{channels, recipients};
use gemma::{FUNCTION_GEMMA, GEMMA4, GemmaReader};
use json::{Frame, JsonReader};
use marked::{DEEPSEEK, KIMI, MarkedReader};
use named::{FUNCTIONARY, MISTRAL, NamedReader};
use parameters::{Form, ParameterReader};
use python::PythonReader;
pub(crate) use style::CallStyle;
use style::PROBE;
pub(crate) use tool::Tool;
pub(crate) use tool::quoted;
pub(super) use tool::{control_id, control_ids, in_grammar, json_rule};

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
    /// `<|tool_call_start|>` and lines `…(…=…)` in a block of code: MiniCPM3.
    PythonBlock,
    /// `<tool_call>…<arg_key>…</arg_key><arg_value>…</arg_value></tool_call>`: GLM-4.5 and what came after it.
    Pairs,
    /// Between control tokens, with names in ids: Kimi K2.
    Kimi,
    /// `<|START_ACTION|>[{"tool_call_id": …, "tool_name": …, "parameters": {…}}]<|END_ACTION|>`: Command R7B and
    /// Command A.
    Actions,
    /// `<function=…>{…}</function>`: Functionary v3.1.
    Functions,
    /// `<|tool_call>call:…{…:…}<tool_call|>`: Gemma 4.
    Gemma,
    /// `<start_function_call>call:…{…:…}<end_function_call>`: FunctionGemma.
    FunctionGemma,
    /// Messages on a channel: gpt-oss. All that such a model writes is [read](super::channels) as messages.
    Channels,
    /// `>>>…` and an object on the next line: Functionary v3.2. All that such a model writes is
    /// [read](super::recipients) as messages.
    Recipients,
}

const TAG: &str = "<tool_call>";
const TAG_END: &str = "</tool_call>";
const LIST: &str = "[TOOL_CALLS]";
const ARRAY: &str = "<tool_calls>";
const ARRAY_END: &str = "</tool_calls>";
const PYTHON: &str = "<|python_tag|>";
const ACTIONS: &str = "<|START_ACTION|>";
const ACTIONS_END: &str = "<|END_ACTION|>";

/// Bytes of the rules of all calls: with more, the grammar is refused.
const MAX_RULES: usize = 1 << 20;

/// What is before the arguments of a call in bytes at most: more is no call.
pub(super) const MAX_HEAD: usize = 512;

/// Names of functions and parameters in bytes at most, where they aren't in quotes: what is longer is none.
pub(super) const MAX_NAME: usize = 256;

/// More of a call's arguments, if `text` isn't empty.
fn say(text: impl Into<String>, events: &mut Vec<CallEvent>) {
    let text = text.into();
    if !text.is_empty() {
        events.push(CallEvent::Arguments(text));
    }
}

/// Letters of names that aren't in quotes.
pub(super) fn is_name(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '.' | '-')
}

/// Calls in an answer at most, where a grammar says what may come.
const MAX_CALLS: usize = 8;

impl ToolFormat {
    /// The format of the call of `probe_call` that `text` has, if it is one of these.
    fn of(text: &str) -> Option<ToolFormat> {
        let at = text.find(PROBE)?;
        let (before, after) = text.split_at(at);
        let after = after.trim_start_matches(PROBE);
        // The newest mark before the call: instructions may name several.
        let marks = [
            TAG,
            LIST,
            ARRAY,
            DEEPSEEK.call,
            KIMI.call,
            python::CALLS,
            ACTIONS,
            named::FUNCTION,
            GEMMA4.call,
            FUNCTION_GEMMA.call,
            recipients::MARK,
        ];
        let newest = marks
            .into_iter()
            .filter_map(|mark| Some((before.rfind(mark)? + mark.len(), mark)))
            .max();
        let Some((end, mark)) = newest else {
            return (after.contains("\"parameters\"")).then_some(ToolFormat::Bare);
        };
        let is_tagged = before[..end - mark.len()].trim_end().ends_with(TAG);
        match (mark, before[end..].trim_start()) {
            (named::FUNCTION, "") if is_tagged => Some(ToolFormat::Parameters),
            (named::FUNCTION, "") if after.starts_with(">{") => Some(ToolFormat::Functions),
            (recipients::MARK, "") if after.starts_with("\n{") => Some(ToolFormat::Recipients),
            (_, between) if between.contains(TAG_END) => None,
            (TAG, "") if after.trim_start().starts_with("<arg_key>") => Some(ToolFormat::Pairs),
            (TAG, between) if between.starts_with('{') => Some(ToolFormat::Tagged),
            (LIST, between) if between.starts_with('[') => Some(ToolFormat::List),
            (LIST, "") => Some(ToolFormat::Named),
            (ARRAY, between) if between.starts_with('[') => Some(ToolFormat::TaggedList),
            (ACTIONS, between) if between.starts_with('[') => Some(ToolFormat::Actions),
            (mark, between) if mark == DEEPSEEK.call => match between {
                "" => Some(ToolFormat::DeepSeekPlain),
                _ => between
                    .ends_with(DEEPSEEK.separator)
                    .then_some(ToolFormat::DeepSeek),
            },
            (mark, marked::ID_BEGIN) if mark == KIMI.call => Some(ToolFormat::Kimi),
            (mark, gemma::BEGIN) if mark == GEMMA4.call => Some(ToolFormat::Gemma),
            (mark, gemma::BEGIN) if mark == FUNCTION_GEMMA.call => Some(ToolFormat::FunctionGemma),
            // Some templates write JSON, which models weren't trained on.
            (python::CALLS, between) if between.starts_with('[') => Some(ToolFormat::Python),
            (python::CALLS, "```python\n") => Some(ToolFormat::PythonBlock),
            _ => None,
        }
    }

    /// What answers are, if they are messages.
    pub(super) fn messages(self) -> Option<Messages> {
        match self {
            ToolFormat::Channels => Some(Messages::Channels),
            ToolFormat::Recipients => Some(Messages::Recipients),
            _ => None,
        }
    }

    /// What the model writes before a call; without one, a call begins the answer, or a message.
    pub(crate) fn mark(self) -> Option<&'static str> {
        match self {
            ToolFormat::Tagged | ToolFormat::Parameters | ToolFormat::Pairs => Some(TAG),
            ToolFormat::Bare | ToolFormat::Channels | ToolFormat::Recipients => None,
            ToolFormat::List | ToolFormat::Named => Some(LIST),
            ToolFormat::TaggedList => Some(ARRAY),
            ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => Some(DEEPSEEK.calls),
            ToolFormat::Kimi => Some(KIMI.calls),
            ToolFormat::Python | ToolFormat::PythonBlock => Some(python::CALLS),
            ToolFormat::Actions => Some(ACTIONS),
            ToolFormat::Functions => Some(named::FUNCTION),
            ToolFormat::Gemma => Some(GEMMA4.call),
            ToolFormat::FunctionGemma => Some(FUNCTION_GEMMA.call),
        }
    }

    /// How a call is written, for models whose templates don't say.
    pub(crate) fn example(self) -> String {
        let object = |arguments: &str| format!("{{\"name\": NAME, \"{arguments}\": OBJECT}}");
        let between = |marks: marked::Marks, call: &str| {
            let marked::Marks {
                calls,
                calls_end,
                call: begin,
                call_end,
                ..
            } = marks;
            format!("{calls}{begin}{call}{call_end}{calls_end}")
        };
        match self {
            ToolFormat::Tagged => format!("{TAG}\n{}\n{TAG_END}", object("arguments")),
            ToolFormat::Parameters => Form::Tags.example().to_owned(),
            ToolFormat::Pairs => Form::Pairs.example().to_owned(),
            ToolFormat::Bare => object("parameters"),
            ToolFormat::List => format!("{LIST}[{}]", object("arguments")),
            ToolFormat::Named => format!("{LIST}NAME{}OBJECT", named::ARGUMENTS),
            ToolFormat::TaggedList => format!("{ARRAY}[{}]{ARRAY_END}", object("arguments")),
            ToolFormat::DeepSeek => between(
                DEEPSEEK,
                &format!("function{}NAME\n```json\nOBJECT\n```", DEEPSEEK.separator),
            ),
            ToolFormat::DeepSeekPlain => {
                between(DEEPSEEK, &format!("NAME{}OBJECT", DEEPSEEK.separator))
            }
            ToolFormat::Kimi => between(
                KIMI,
                &format!("{}NAME:NUMBER{}OBJECT", marked::ID_BEGIN, KIMI.separator),
            ),
            ToolFormat::Actions => format!(
                "{ACTIONS}[{{\"tool_call_id\": NUMBER, \"tool_name\": NAME, \"parameters\": OBJECT}}]{ACTIONS_END}"
            ),
            ToolFormat::Functions => format!(
                "{}NAME{}OBJECT{}",
                named::FUNCTION,
                named::FUNCTION_NAMED,
                named::FUNCTION_END
            ),
            ToolFormat::Gemma => GEMMA4.example(),
            ToolFormat::FunctionGemma => FUNCTION_GEMMA.example(),
            ToolFormat::PythonBlock => format!(
                "{}{}NAME(KEY=VALUE, …){}{}",
                python::CALLS,
                python::BLOCK,
                python::BLOCK_END,
                python::CALLS_END
            ),
            ToolFormat::Python => {
                format!("{}[NAME(KEY=VALUE, …)]{}", python::CALLS, python::CALLS_END)
            }
            ToolFormat::Channels => {
                "OBJECT on the channel commentary, to=functions.NAME".to_owned()
            }
            ToolFormat::Recipients => format!("{}NAME\nOBJECT", recipients::MARK),
        }
    }

    /// What is around calls that are objects of JSON.
    fn frame(self) -> Frame {
        let mark = self.mark().unwrap_or_default();
        let is_list = matches!(
            self,
            ToolFormat::List | ToolFormat::TaggedList | ToolFormat::Actions | ToolFormat::Python
        );
        let end = match self {
            ToolFormat::Tagged => Some(TAG_END),
            ToolFormat::TaggedList => Some(ARRAY_END),
            ToolFormat::Actions => Some(ACTIONS_END),
            ToolFormat::Python => Some(python::CALLS_END),
            _ => None,
        };
        let name = match self {
            ToolFormat::Actions => "tool_name",
            _ => "name",
        };
        Frame {
            mark,
            name,
            is_list,
            end,
        }
    }

    /// Control tokens that stand for marks, with what they mean: they are in no text.
    pub(crate) fn tokens(self, tokenizer: &Tokenizer) -> Vec<(u32, &'static str)> {
        let own = [
            TAG,
            TAG_END,
            LIST,
            named::ARGUMENTS,
            named::ID,
            ARRAY,
            ARRAY_END,
            PYTHON,
            python::CALLS,
            python::CALLS_END,
            ACTIONS,
            ACTIONS_END,
        ];
        let marks: Vec<&'static str> = match self {
            ToolFormat::Channels => channels::MARKS.to_vec(),
            ToolFormat::Gemma => GEMMA4.all().to_vec(),
            ToolFormat::FunctionGemma => FUNCTION_GEMMA.all().to_vec(),
            _ => [&own[..], &DEEPSEEK.all(), &KIMI.all(), &parameters::MARKS].concat(),
        };
        control_ids(tokenizer, marks)
    }

    /// The rule `calls` of a Lark grammar: calls of `tools`, one alone unless `parallel`; and, where there is a mark,
    /// `after_mark`: what follows the first.
    pub(crate) fn grammar(self, tools: &[Tool], parallel: bool, tokenizer: &Tokenizer) -> String {
        let mark = |mark: &str| in_grammar(tokenizer, mark);
        let frame = self.frame();
        // Calls after the first, with what separates them.
        let more = |separated: &str| match parallel {
            true => format!(" ({separated}){{0,{}}}", MAX_CALLS - 1),
            false => String::new(),
        };
        let between = |marks: marked::Marks, one: &str, separated: &str| {
            format!(
                "calls: {} after_mark\nafter_mark: marked{} {}\nmarked: {} {one} {}\nseparator: {}\n",
                mark(marks.calls),
                more(separated),
                mark(marks.calls_end),
                mark(marks.call),
                mark(marks.call_end),
                mark(marks.separator)
            )
        };
        let in_gemma = |marks: gemma::Marks| {
            format!(
                "calls: marked{}\nmarked: {} after_mark\nafter_mark: {} call {}\n",
                more("marked"),
                mark(marks.call),
                quoted(gemma::BEGIN),
                mark(marks.call_end)
            )
        };
        let calls = match self {
            ToolFormat::Tagged | ToolFormat::Parameters => format!(
                "calls: tagged{}\ntagged: {} after_mark\nafter_mark: \"\\n\" call \"\\n\" {}\n",
                more("\"\\n\" tagged"),
                mark(TAG),
                mark(TAG_END)
            ),
            ToolFormat::Recipients => {
                let mark = quoted(recipients::MARK);
                format!("calls: call{}\n", more(&format!("{mark} call")))
            }
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
            ToolFormat::TaggedList | ToolFormat::Actions => format!(
                "calls: {} after_mark\nafter_mark: \"[\\n    \" call{} \"\\n]\" {}\n",
                mark(frame.mark),
                more("\",\\n    \" call"),
                mark(frame.end.unwrap_or_default())
            ),
            ToolFormat::Pairs => format!(
                "calls: tagged{}\ntagged: {} after_mark\nafter_mark: call {}\n",
                more("\"\\n\"? tagged"),
                mark(TAG),
                mark(TAG_END)
            ),
            ToolFormat::Functions => format!(
                "calls: marked{}\nmarked: {} after_mark\nafter_mark: call {}\n",
                more("marked"),
                mark(named::FUNCTION),
                mark(named::FUNCTION_END)
            ),
            ToolFormat::Gemma => in_gemma(GEMMA4),
            ToolFormat::FunctionGemma => in_gemma(FUNCTION_GEMMA),
            ToolFormat::PythonBlock => format!(
                "calls: {} after_mark\nafter_mark: {} call{} {} {}\n",
                mark(python::CALLS),
                quoted(python::BLOCK),
                more("\"\\n\" call"),
                quoted(python::BLOCK_END),
                mark(python::CALLS_END)
            ),
            ToolFormat::DeepSeek => {
                between(DEEPSEEK, "\"function\" separator call", "\"\\n\" marked")
            }
            ToolFormat::DeepSeekPlain => between(DEEPSEEK, "call", "marked"),
            ToolFormat::Kimi => between(KIMI, "call", "marked"),
            ToolFormat::Python => format!(
                "calls: {} after_mark\nafter_mark: \"[\" call{} \"]\" {}\n",
                mark(python::CALLS),
                more("\", \" call"),
                mark(python::CALLS_END)
            ),
        };
        // After its name, a call has its arguments as an object.
        let named = |rule: &str, tool: &Tool, head: &str, end: &str| {
            let arguments = json_rule(&format!("{rule}_arguments"), tool.parameters.clone());
            format!("{rule}: {head} {rule}_arguments {end}\n{arguments}")
        };
        let names: Vec<String> = (0..tools.len())
            .map(|index| format!("call_{index}"))
            .collect();
        // Definitions of several tools may have the same names, so each is a rule of its own.
        let rules = names.iter().zip(tools).map(|(name, tool)| match self {
            ToolFormat::Parameters => parameters::rules(name, tool, Form::Tags, &mark),
            ToolFormat::Pairs => parameters::rules(name, tool, Form::Pairs, &mark),
            ToolFormat::Gemma => gemma::rules(name, tool, GEMMA4, &mark),
            ToolFormat::FunctionGemma => gemma::rules(name, tool, FUNCTION_GEMMA, &mark),
            ToolFormat::Python => python::rules(name, tool, true),
            ToolFormat::PythonBlock => python::rules(name, tool, false),
            ToolFormat::Bare => json_rule(name, tool.call(None, "name", "parameters")),
            ToolFormat::Channels => channels::call_rules(name, tool, tokenizer),
            ToolFormat::Tagged | ToolFormat::List | ToolFormat::TaggedList => {
                json_rule(name, tool.call(None, "name", "arguments"))
            }
            ToolFormat::Actions => {
                let call = tool.call(Some("tool_call_id"), "tool_name", "parameters");
                json_rule(name, call)
            }
            ToolFormat::DeepSeek => {
                let head = quoted(&format!("{}\n```json\n", tool.name));
                named(name, tool, &head, "\"\\n```\"")
            }
            ToolFormat::DeepSeekPlain => {
                named(name, tool, &format!("{} separator", quoted(&tool.name)), "")
            }
            ToolFormat::Kimi => {
                let head = quoted(&format!("{}{}:", marked::ID_BEGIN, tool.name));
                named(name, tool, &format!("{head} /[0-9]{{1,3}}/ separator"), "")
            }
            ToolFormat::Named => {
                let head = format!("{} {}", quoted(&tool.name), mark(named::ARGUMENTS));
                named(name, tool, &head, "")
            }
            ToolFormat::Functions => {
                let head = quoted(&format!("{}{}", tool.name, named::FUNCTION_NAMED));
                named(name, tool, &head, "")
            }
            ToolFormat::Recipients => named(name, tool, &quoted(&format!("{}\n", tool.name)), ""),
        });
        let mut all = String::new();
        for rules in rules {
            // With so many the grammar is refused: no more are made.
            if all.len() > MAX_RULES {
                break;
            }
            all += &rules;
        }
        let shared = match self {
            ToolFormat::Parameters => Form::Tags.shared_rules(&mark),
            ToolFormat::Pairs => Form::Pairs.shared_rules(&mark),
            ToolFormat::Gemma => GEMMA4.shared_rules(&mark),
            ToolFormat::FunctionGemma => FUNCTION_GEMMA.shared_rules(&mark),
            ToolFormat::Python | ToolFormat::PythonBlock => python::shared_rules(),
            _ => String::new(),
        };
        format!("{calls}call: {}\n{all}{shared}", names.join(" | "))
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
    Marked(MarkedReader),
    Python(PythonReader),
    Gemma(GemmaReader),
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
                | ToolFormat::Pairs
                | ToolFormat::Named
                | ToolFormat::Python
                | ToolFormat::PythonBlock => Kind::Unsure(String::new()),
                ToolFormat::Bare
                | ToolFormat::List
                | ToolFormat::TaggedList
                | ToolFormat::Actions
                | ToolFormat::Channels
                | ToolFormat::Recipients => Kind::Json(JsonReader::new(format.frame())),
                ToolFormat::DeepSeek | ToolFormat::DeepSeekPlain => {
                    Kind::Marked(MarkedReader::new(DEEPSEEK))
                }
                ToolFormat::Kimi => Kind::Marked(MarkedReader::new(KIMI)),
                ToolFormat::Functions => Kind::Named(NamedReader::new(FUNCTIONARY)),
                ToolFormat::Gemma => Kind::Gemma(GemmaReader::new(GEMMA4)),
                ToolFormat::FunctionGemma => Kind::Gemma(GemmaReader::new(FUNCTION_GEMMA)),
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
            Kind::Marked(reader) => reader.push(text, events),
            Kind::Python(reader) => reader.push(text, events),
            Kind::Gemma(reader) => reader.push(text, events),
        }
    }

    /// How calls are written that begin with `text`, once that is known.
    fn kind_of(&self, text: &str) -> Option<Kind> {
        let mut chars = text.chars().filter(|c| !c.is_whitespace());
        let frame = self.format.frame();
        let json = |frame: Frame| Kind::Json(JsonReader::new(frame));
        let is_python = matches!(self.format, ToolFormat::Python | ToolFormat::PythonBlock);
        let parameters = |form| Kind::Parameters(ParameterReader::new(form, self.tools.clone()));
        let is_named = self.format == ToolFormat::Named;
        Some(match chars.next()? {
            '[' | '{' if is_named => json(ToolFormat::List.frame()),
            _ if is_named => Kind::Named(NamedReader::new(MISTRAL)),
            '[' if is_python => match chars.next()? {
                '{' => json(frame),
                _ => Kind::Python(PythonReader::default()),
            },
            '{' if is_python => json(Frame {
                is_list: false,
                ..frame
            }),
            _ if is_python => Kind::Python(PythonReader::default()),
            '<' => parameters(Form::Tags),
            '{' => json(ToolFormat::Tagged.frame()),
            _ if self.format == ToolFormat::Pairs => parameters(Form::Pairs),
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
            Kind::Marked(reader) => reader.finish(events),
            Kind::Python(reader) => reader.finish(events),
            Kind::Gemma(reader) => reader.finish(events),
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
pub(super) mod tests;
