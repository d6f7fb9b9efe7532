//! Calls in Python: LFM2's list `[NAME(KEY=VALUE, …), …]`, and MiniCPM3's lines of them in a block of code.

use serde_json::{Value, json};

use super::tool::in_order;
use super::{CallEvent, MAX_NAME, MAX_RULES, Tool, is_name, json_rule, quoted};

pub(super) const CALLS: &str = "<|tool_call_start|>";
pub(super) const CALLS_END: &str = "<|tool_call_end|>";

/// What is around a block of code.
pub(super) const BLOCK: &str = "\n```python\n";
pub(super) const BLOCK_END: &str = "\n```\n";

/// The rules of a Lark grammar for a call of `tool`, the first of which is `rule`. Parameters come in the order of the
/// schema, as in JSON; strings are those of JSON, which Python has too, and so are all values unless there are `words`
/// of Python in their place.
pub(super) fn rules(rule: &str, tool: &Tool, words: bool) -> String {
    let begin = quoted(&format!("{}(", tool.name));
    let Some(properties) = tool.properties() else {
        return format!("{rule}: {begin} (any_parameter (comma any_parameter){{0,15}})? \")\"\n");
    };
    let mut rules = format!("{rule}: {begin} {rule}_members \")\"\n");
    let mut members = Vec::with_capacity(properties.len());
    let required = tool.required();
    for (index, (name, schema)) in properties.iter().enumerate() {
        if rules.len() > MAX_RULES {
            break;
        }
        let this = format!("{rule}_{index}");
        members.push((this.clone(), required.contains(&name[..])));
        let begin = quoted(&format!("{name}="));
        rules += &match tool.python_words(name).filter(|_| words) {
            Some(words) => format!("{this}: {begin} ({})\n", words.join(" | ")),
            None => {
                let schema = match schema {
                    Value::Object(_) => tool.with_definitions(schema.clone()),
                    _ => json!({}),
                };
                let value = json_rule(&format!("{this}_value"), schema);
                format!("{this}: {begin} {this}_value\n{value}")
            }
        };
    }
    rules + &in_order(&format!("{rule}_members"), &members, "comma")
}

/// Rules that those of all tools share.
pub(super) fn shared_rules() -> String {
    let value = json_rule("any_value", json!({}));
    format!(
        "comma: \",\" \" \"?\nany_parameter: /[A-Za-z_][A-Za-z0-9_]{{0,63}}=/ any_value\n{value}"
    )
}

impl Tool {
    /// The literals of what the parameter `name` may be, if Python has words for all of it.
    fn python_words(&self, name: &str) -> Option<Vec<String>> {
        let words: &[&str] = match self.kinds(name).words()? {
            (true, true) => &["True", "False", "None"],
            (true, false) => &["True", "False"],
            (false, true) => &["None"],
            (false, false) => return None,
        };
        Some(words.iter().map(|word| quoted(word)).collect())
    }
}

/// Reads calls, piece by piece, from what is between the marks.
#[derive(Debug, Default, Clone)]
pub(super) struct PythonReader {
    state: State,
    /// All so far, in case it is no call.
    raw: String,
    /// The name, word or escape that is being read.
    word: String,
    /// Brackets that are open inside the value.
    open: Vec<char>,
    n_parameters: usize,
    /// Something of the value was said.
    has_value: bool,
    has_calls: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before a call, or in its name.
    #[default]
    Name,
    /// Before a parameter, or in its name.
    Key,
    Value,
    /// In a string with these quotes.
    Text(char),
    /// After what may be its end: what follows decides.
    TextEnd(char),
    /// After a backslash in it.
    Escape(char),
    /// After the list; the rest of the mark that ends it is awaited.
    After,
    Over,
}

impl PythonReader {
    /// Reads `text`; returns what of it doesn't belong to calls any more, if they are over.
    pub(super) fn push(&mut self, text: &str, events: &mut Vec<CallEvent>) -> Option<String> {
        for (at, c) in text.char_indices() {
            if self.state == State::Over {
                return Some(text[at..].to_owned());
            }
            if self.state == State::After {
                self.raw.push(c);
                let rest = self.raw.trim_start();
                if rest == CALLS_END {
                    self.state = State::Over;
                } else if !CALLS_END.starts_with(rest) {
                    self.state = State::Over;
                    return Some(std::mem::take(&mut self.raw) + &text[at + c.len_utf8()..]);
                }
                continue;
            }
            if !self.has_calls {
                self.raw.push(c);
            }
            self.char(c, events);
        }
        (self.state == State::Over).then(String::new)
    }

    /// The end of the answer. Arguments that were cut off stay so.
    pub(super) fn finish(&mut self, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Name => self.give_up(events),
            State::Value => {
                self.end_word(events);
                events.push(CallEvent::Ended);
            }
            State::TextEnd(_) => {
                say("\"", events);
                events.push(CallEvent::Ended);
            }
            State::Key | State::Text(_) | State::Escape(_) => events.push(CallEvent::Ended),
            State::After | State::Over => {}
        }
        self.state = State::Over;
    }

    /// What looked like calls is text.
    fn give_up(&mut self, events: &mut Vec<CallEvent>) {
        if !self.has_calls {
            let text = std::mem::take(&mut self.raw);
            events.push(CallEvent::Text(format!("{CALLS}{text}")));
        }
        self.state = State::Over;
    }

    fn char(&mut self, c: char, events: &mut Vec<CallEvent>) {
        match self.state {
            State::Name => self.name(c, events),
            State::Key => self.key(c, events),
            State::Value => self.value(c, events),
            State::Text(quote) => match c {
                '\\' => {
                    self.word.clear();
                    self.state = State::Escape(quote);
                }
                c if c == quote => {
                    self.word.clear();
                    self.state = State::TextEnd(quote);
                }
                c => self.say_text(c, events),
            },
            // Templates write quotes in strings as they are, and so do models.
            State::TextEnd(_) if matches!(c, ',' | ')' | ']' | '}' | ':') => {
                say("\"", events);
                self.word.clear();
                self.state = State::Value;
                self.value(c, events);
            }
            State::TextEnd(_) if c.is_whitespace() => self.word.push(c),
            State::TextEnd(quote) => {
                self.say_text(quote, events);
                let blank = std::mem::take(&mut self.word);
                blank.chars().for_each(|c| self.say_text(c, events));
                self.state = State::Text(quote);
                self.char(c, events);
            }
            State::Escape(quote) => self.escape(c, quote, events),
            State::After | State::Over => {}
        }
    }

    fn name(&mut self, c: char, events: &mut Vec<CallEvent>) {
        match c {
            '(' if !self.word.trim().is_empty() => {
                // Before the first may be the language of a block of code.
                let word = std::mem::take(&mut self.word);
                let name = word.split_whitespace().last().unwrap_or_default();
                let name = name.to_owned();
                events.push(CallEvent::Begun { name });
                say("{", events);
                self.has_calls = true;
                self.n_parameters = 0;
                self.state = State::Key;
            }
            '[' | ',' | ';' | '`' if self.word.trim().is_empty() => self.word.clear(),
            ']' if self.word.trim().is_empty() && self.has_calls => {
                self.raw.clear();
                self.state = State::After;
            }
            // The mark that ends calls, without the list's end.
            '<' if self.word.trim().is_empty() && self.has_calls => {
                self.raw = c.to_string();
                self.state = State::After;
            }
            c if self.word.len() < MAX_NAME && (is_name(c) || c.is_whitespace()) => {
                self.word.push(c);
            }
            _ => self.give_up(events),
        }
    }

    fn key(&mut self, c: char, events: &mut Vec<CallEvent>) {
        match c {
            ')' => {
                self.word.clear();
                self.end_call(events);
            }
            '=' => {
                let name = std::mem::take(&mut self.word);
                let separator = if self.n_parameters > 0 { ", " } else { "" };
                say(
                    &format!("{separator}{}: ", Value::from(name.trim())),
                    events,
                );
                self.n_parameters += 1;
                self.open.clear();
                self.has_value = false;
                self.state = State::Value;
            }
            ',' => self.word.clear(),
            c if self.word.len() < MAX_NAME => self.word.push(c),
            _ => {}
        }
    }

    fn value(&mut self, c: char, events: &mut Vec<CallEvent>) {
        match c {
            '"' | '\'' if self.word.is_empty() => {
                say("\"", events);
                self.has_value = true;
                self.state = State::Text(c);
                return;
            }
            c if is_name(c) || c == '+' => return self.word.push(c),
            // Text that somebody forgot to quote has all kinds of characters.
            c if !self.word.is_empty() && self.open.is_empty() && !matches!(c, ',' | ')' | ']') => {
                return self.word.push(c);
            }
            _ => self.end_word(events),
        }
        if !self.has_value && self.open.is_empty() && matches!(c, ',' | ')') {
            say("null", events);
        }
        match c {
            '(' | '[' | '{' => {
                self.open.push(c);
                self.has_value = true;
                say(if c == '{' { "{" } else { "[" }, events);
            }
            ')' | ']' | '}' => match self.open.pop() {
                Some(open) => say(if open == '{' { "}" } else { "]" }, events),
                None => self.end_call(events),
            },
            ',' if self.open.is_empty() => self.state = State::Key,
            ',' => say(", ", events),
            ':' => say(": ", events),
            _ => {}
        }
    }

    /// The word of a value is complete: a number, a name for a value, or a string that somebody forgot to quote.
    fn end_word(&mut self, events: &mut Vec<CallEvent>) {
        let word = std::mem::take(&mut self.word);
        self.has_value |= !word.is_empty();
        match word.trim_end() {
            "" => {}
            "True" => say("true", events),
            "False" => say("false", events),
            "None" => say("null", events),
            word if serde_json::from_str::<Value>(word).is_ok() => say(word, events),
            word => say(&Value::from(word).to_string(), events),
        }
    }

    fn escape(&mut self, c: char, quote: char, events: &mut Vec<CallEvent>) {
        self.word.push(c);
        let digits = match self.word.chars().next() {
            Some('x') => 2,
            Some('u') => 4,
            Some('U') => 8,
            _ => 0,
        };
        if self.word.chars().count() <= digits
            && self.word[1..].chars().all(|c| c.is_ascii_hexdigit())
        {
            return;
        }
        let word = std::mem::take(&mut self.word);
        self.state = State::Text(quote);
        let known = match word.as_str() {
            "n" => Some('\n'),
            "t" => Some('\t'),
            "r" => Some('\r'),
            "b" => Some('\u{8}'),
            "f" => Some('\u{c}'),
            "\\" | "'" | "\"" | "/" => word.chars().next(),
            _ if digits > 0 => u32::from_str_radix(&word[1..], 16)
                .ok()
                .and_then(char::from_u32),
            _ => None,
        };
        match known {
            Some(c) => self.say_text(c, events),
            // Halves of characters are put together where the JSON is read.
            None if digits == 4 && word.len() == 5 => say(&format!("\\{word}"), events),
            None => {
                self.say_text('\\', events);
                word.chars().for_each(|c| self.char(c, events));
            }
        }
    }

    fn end_call(&mut self, events: &mut Vec<CallEvent>) {
        say("}", events);
        events.push(CallEvent::Ended);
        self.state = State::Name;
    }

    /// A character of a string.
    fn say_text(&mut self, c: char, events: &mut Vec<CallEvent>) {
        let quoted = Value::from(c.to_string()).to_string();
        say(&quoted[1..quoted.len() - 1], events);
    }
}

fn say(text: &str, events: &mut Vec<CallEvent>) {
    match events.last_mut() {
        Some(CallEvent::Arguments(said)) => said.push_str(text),
        _ => events.push(CallEvent::Arguments(text.to_owned())),
    }
}
