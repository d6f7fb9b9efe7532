//! Answers that are messages to recipients: the form of Functionary v3.2.
//!
//! ```text
//! >>>all
//! …>>>NAME
//! {…}
//! ```
//!
//! The prompt ends with the first `>>>`. What is for `all` is said; another recipient is a function, with its arguments.
//! Python comes as it is, and is the argument `code`.

use std::sync::Arc;

use super::scan::{ObjectScanner, n_beginning};
use super::split::Part;
use super::tools::{MAX_NAME, Tool, is_name};

/// Before a recipient.
pub(super) const MARK: &str = ">>>";
/// The header of what is said, after its mark.
pub(crate) const SAY: &str = "all\n";

const ALL: &str = "all";
const PYTHON: &str = "python";

/// A Lark grammar's rule `recipient_all`: the header of what is said.
pub(super) fn rules() -> String {
    "recipient_all: \"all\\n\"\n".to_owned()
}

/// A Lark grammar of a whole answer with the rule `call`, of which `rules` are; `is_begun` says that it goes on with what
/// was said. The mark of a recipient is never said in it.
pub(super) fn strict_grammar(rules: &str, is_begun: bool) -> String {
    let start = match is_begun {
        true => "said | said_on message* last",
        false => "message* last",
    };
    // Whatever has no mark, and the same with the next one.
    let said = "([^>]|>[^>]|>>[^>])*";
    format!(
        "start: {start}\n\
         message: recipient_all said_on | call \"{MARK}\"\n\
         last: recipient_all said | call\n\
         said: /{said}>{{0,2}}/\n\
         said_on: /{said}{MARK}/\n\
         {}{rules}",
        self::rules()
    )
}

/// Tells the parts of an answer apart, piece by piece.
#[derive(Debug, Clone)]
pub(super) struct RecipientReader {
    state: State,
    /// Text that isn't read yet.
    held: String,
    tools: Arc<[Tool]>,
    /// There may be calls.
    has_tools: bool,
    n_calls: usize,
    /// Something was said, in this message or before.
    is_told: bool,
    /// What is said next begins a message.
    is_new: bool,
}

#[derive(Debug, Clone)]
enum State {
    /// In a header, or in what may be one: otherwise what is around it goes on.
    Header(Around),
    Body(Body),
    Arguments(ObjectScanner),
    /// After the arguments of a call.
    After,
}

/// What is around a header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Around {
    /// The beginning, or the end of a call: a message has to have one.
    Nothing,
    Body(Body),
}

/// What ends with the next header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Body {
    Text,
    Code,
}

/// What a text is that may begin with a header.
enum Header {
    /// For everybody, or the call of a function; what it has follows from here.
    Say(usize),
    Call {
        name: String,
        at: usize,
    },
    /// More text tells.
    Unsure,
    None,
}

impl RecipientReader {
    /// Of an answer with calls of `tools`, if it may have any, that goes on with what was said if `is_begun`.
    pub(super) fn new(is_begun: bool, tools: Option<&Arc<[Tool]>>) -> RecipientReader {
        RecipientReader {
            state: match is_begun {
                true => State::Body(Body::Text),
                false => State::Header(Around::Nothing),
            },
            held: String::new(),
            tools: tools.cloned().unwrap_or_default(),
            has_tools: tools.is_some(),
            n_calls: 0,
            is_told: false,
            is_new: false,
        }
    }

    pub(super) fn n_calls(&self) -> usize {
        self.n_calls
    }

    /// The parts that `text` completes.
    pub(super) fn push(&mut self, text: &str, parts: &mut Vec<Part>) {
        self.held += text;
        while self.advance(parts, false) {}
    }

    /// What was held back, at the end of the answer.
    pub(super) fn finish(&mut self, parts: &mut Vec<Part>) {
        while self.advance(parts, true) {}
        match self.state {
            State::Body(Body::Code) => self.end_code(parts),
            State::Arguments(_) => self.end(parts),
            State::Body(Body::Text) | State::Header(_) | State::After => {}
        }
    }

    /// Reads as much as is certain, or all of it at the end; true if there may be more.
    fn advance(&mut self, parts: &mut Vec<Part>, is_end: bool) -> bool {
        match &mut self.state {
            State::Header(around) => {
                let around = *around;
                match self.header(around, is_end) {
                    Header::Say(at) => {
                        self.close(around, parts);
                        self.held.drain(..at);
                        self.is_new = self.is_told;
                        self.state = State::Body(Body::Text);
                    }
                    Header::Call { name, at } => {
                        self.close(around, parts);
                        self.held.drain(..at);
                        self.begin(name, parts);
                    }
                    Header::Unsure => return false,
                    Header::None => {
                        // A mark that isn't one is text.
                        let mark = self.held.find(MARK);
                        let n = mark.filter(|_| around != Around::Nothing);
                        let rest = self.held.split_off(n.map_or(0, |at| at + MARK.len()));
                        let text = std::mem::replace(&mut self.held, rest);
                        let body = match around {
                            Around::Nothing => Body::Text,
                            Around::Body(body) => body,
                        };
                        self.state = State::Body(body);
                        self.say(body, &text, parts);
                    }
                }
                true
            }
            State::Body(body) => {
                let body = *body;
                let found = self.held.find(MARK);
                let end = found.unwrap_or_else(|| {
                    self.held.len()
                        - if is_end {
                            0
                        } else {
                            n_beginning(&self.held, MARK)
                        }
                });
                // White space before a header belongs to it.
                let end = match is_end && found.is_none() {
                    true => end,
                    false => self.held[..end].trim_end().len(),
                };
                let rest = self.held.split_off(end);
                let text = std::mem::replace(&mut self.held, rest);
                self.say(body, &text, parts);
                if found.is_some() {
                    self.state = State::Header(Around::Body(body));
                }
                found.is_some()
            }
            State::Arguments(scanner) => {
                let text = scanner.take(&mut self.held);
                let is_over = scanner.is_over();
                if !text.is_empty() {
                    self.argue(text, parts);
                }
                if is_over {
                    self.end(parts);
                }
                is_over
            }
            State::After => {
                let word = self.held.trim_start();
                let is_header = word.starts_with(MARK);
                if !is_header && MARK.starts_with(word) && (!is_end || word.is_empty()) {
                    return false;
                }
                self.held = word.to_owned();
                self.state = match is_header {
                    true => State::Header(Around::Nothing),
                    false => State::Body(Body::Text),
                };
                self.is_new = self.is_told;
                true
            }
        }
    }

    /// The header that what is held begins with, `around` which is something.
    fn header(&self, around: Around, is_end: bool) -> Header {
        let word = self.held.trim_start();
        let is_first = around == Around::Nothing;
        if !is_end && is_first && MARK.starts_with(word) {
            return Header::Unsure;
        }
        let name = match word.strip_prefix(MARK) {
            Some(name) => name,
            None if is_first => word,
            None => return Header::None,
        };
        let at = self.held.len() - name.len();
        let Some((name, body)) = name.split_once('\n') else {
            let begins = |known: &str| known.starts_with(name);
            let may_be = match is_end {
                // A header that was cut off says nothing.
                true => begins(ALL) || self.tools.iter().any(|tool| begins(&tool.name)),
                false => name.len() <= MAX_NAME && name.trim_end_matches('\r').chars().all(is_name),
            };
            return if may_be { Header::Unsure } else { Header::None };
        };
        let at = at + name.len() + 1;
        let name = name.trim_end();
        if name == ALL {
            return Header::Say(at);
        }
        let is_known = self.tools.iter().any(|tool| tool.name == name);
        let may_call = self.has_tools && !name.is_empty() && name.chars().all(is_name);
        if !may_call || !(is_known || is_first) {
            return Header::None;
        }
        match body.trim_start().chars().next() {
            None if !is_end => Header::Unsure,
            Some(c) if c != '{' && name != PYTHON => Header::None,
            _ => Header::Call {
                name: name.to_owned(),
                at,
            },
        }
    }

    /// A call of the function `name` begins, with what is held.
    fn begin(&mut self, name: String, parts: &mut Vec<Part>) {
        let index = self.n_calls;
        self.n_calls += 1;
        let is_object = self.held.trim_start().starts_with('{');
        let is_empty = self.held.trim_start().is_empty();
        parts.push(Part::CallBegun { index, name });
        match (is_object, is_empty) {
            (_, true) => {
                self.argue("{}".to_owned(), parts);
                self.end(parts);
            }
            (true, _) => self.state = State::Arguments(ObjectScanner::default()),
            (false, _) => {
                self.argue("{\"code\": \"".to_owned(), parts);
                self.state = State::Body(Body::Code);
            }
        }
    }

    /// What was `around` a header ends with it.
    fn close(&mut self, around: Around, parts: &mut Vec<Part>) {
        if around == Around::Body(Body::Code) {
            self.end_code(parts);
        }
    }

    fn end_code(&mut self, parts: &mut Vec<Part>) {
        self.argue("\"}".to_owned(), parts);
        self.end(parts);
    }

    /// A call is complete.
    fn end(&mut self, parts: &mut Vec<Part>) {
        let index = self.n_calls.saturating_sub(1);
        parts.push(Part::CallEnded { index });
        self.state = State::After;
    }

    /// More of the arguments of the newest call.
    fn argue(&self, text: String, parts: &mut Vec<Part>) {
        let index = self.n_calls.saturating_sub(1);
        parts.push(Part::CallArguments { index, text });
    }

    fn say(&mut self, body: Body, text: &str, parts: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        if body == Body::Code {
            let quoted = serde_json::Value::from(text).to_string();
            return self.argue(quoted[1..quoted.len() - 1].to_owned(), parts);
        }
        // Several messages are paragraphs.
        let between = match std::mem::take(&mut self.is_new) {
            true => "\n\n",
            false => "",
        };
        self.is_told = true;
        parts.push(Part::Text(format!("{between}{text}")));
    }
}

#[cfg(test)]
mod tests {
    use super::super::split::joined;
    use super::*;

    /// The parts of `text` in pieces of `n` characters, neighbours joined.
    fn read(is_begun: bool, has_tools: bool, text: &str, n: usize) -> Vec<Part> {
        let tools = ["a", "find", "python"].map(|name| Tool::new(name, None));
        let tools: Arc<[Tool]> = tools.into();
        let mut reader = RecipientReader::new(is_begun, has_tools.then_some(&tools));
        let mut parts = Vec::new();
        let chars: Vec<char> = text.chars().collect();
        for piece in chars.chunks(n) {
            reader.push(&piece.iter().collect::<String>(), &mut parts);
        }
        reader.finish(&mut parts);
        joined(parts)
    }

    fn text(text: &str) -> Vec<Part> {
        vec![Part::Text(text.to_owned())]
    }

    fn call(index: usize, name: &str, arguments: &str) -> Vec<Part> {
        let (name, text) = (name.to_owned(), arguments.to_owned());
        vec![
            Part::CallBegun { index, name },
            Part::CallArguments { index, text },
            Part::CallEnded { index },
        ]
    }

    #[test]
    fn messages_are_told_apart_however_they_are_cut() {
        for (input, parts) in [
            ("all\nFour.", text("Four.")),
            (">>>all\nFour.", text("Four.")),
            ("all\n", vec![]),
            ("al", vec![]),
            ("fin", vec![]),
            (
                "a\n{\"x\": [1, \"}>>>\"]}",
                call(0, "a", "{\"x\": [1, \"}>>>\"]}"),
            ),
            ("a\n", call(0, "a", "{}")),
            (
                "all\nI look. \n>>>find\n{\"x\": 1}>>>a\n{}\n",
                [
                    text("I look."),
                    call(0, "find", "{\"x\": 1}"),
                    call(1, "a", "{}"),
                ]
                .concat(),
            ),
            (
                "find\n{\"x\": 1}\n>>>all\nSo it is.>>>all\nGood.",
                [call(0, "find", "{\"x\": 1}"), text("So it is.\n\nGood.")].concat(),
            ),
            // Neither what looks like a header within a text, nor an answer without one.
            (
                "all\nType\n>>> find\n>>>other\n{}\n>>>find\nx >> 2 >>>\n",
                text("Type\n>>> find\n>>>other\n{}\n>>>find\nx >> 2 >>>\n"),
            ),
            ("Four is it.", text("Four is it.")),
            ("Four", text("Four")),
            ("a\nnot so", text("a\nnot so")),
            // A function that isn't known is called if a message can't be anything else.
            ("other\n{}", call(0, "other", "{}")),
            // Code, with what isn't its end.
            (
                "python\nprint(\"é\\n\")\n>>>x\n>>>a\n{\"x\": ",
                [
                    call(0, "python", "{\"code\": \"print(\\\"é\\\\n\\\")\\n>>>x\"}"),
                    call(1, "a", "{\"x\": "),
                ]
                .concat(),
            ),
            (
                "python\n{\"code\": \"1\"}",
                call(0, "python", "{\"code\": \"1\"}"),
            ),
        ] {
            for n in 1..=input.chars().count() {
                assert_eq!(read(false, true, input, n), parts, "{input} by {n}");
            }
        }
    }

    #[test]
    fn without_tools_or_begun_there_is_text() {
        for n in 1..10 {
            assert_eq!(read(false, false, "all\nYes", n), text("Yes"));
            let other = "find\n{}";
            assert_eq!(read(false, false, other, n), text(other));
            let parts = [text(" and so on"), call(0, "a", "{}")].concat();
            assert_eq!(read(true, true, " and so on>>>a\n{}", n), parts);
        }
    }

    #[test]
    fn headers_without_an_end_are_text() {
        let long = "x".repeat(2 * MAX_NAME);
        for n in [1, 7, 4 * MAX_NAME] {
            assert_eq!(read(false, true, &long, n), text(&long), "by {n}");
        }
    }
}
