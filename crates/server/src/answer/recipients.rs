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
use super::tools::{MAX_HEAD, MAX_NAME, Tool, is_name, quoted};

/// Before a recipient.
pub(super) const MARK: &str = ">>>";
/// The header of what is said, after its mark.
pub(crate) const SAY: &str = "all\n";

const ALL: &str = "all";
const PYTHON: &str = "python";
/// The argument that Python is.
const CODE: &str = "\"code\"";

/// White space that is held back at most, as a header may follow.
const MAX_BLANK: usize = 256;

/// Rules of a Lark grammar: `recipient_all` is the header of what is said, and `recipient_mark` what is before another.
pub(super) fn rules() -> String {
    let (say, mark) = (quoted(SAY), quoted(MARK));
    format!("recipient_all: {say}\nrecipient_mark: {mark}\n")
}

/// A Lark grammar of a whole answer with the rule `call`, of which `rules` are, for `tools`; `is_begun` says that it goes on
/// with what was said. The mark of a recipient is never said in it.
pub(super) fn strict_grammar(rules: &str, tools: &[Tool], is_begun: bool) -> String {
    let start = match is_begun {
        true => "said | said_on message* last",
        false => "message* last",
    };
    // Whatever has no mark, and the same with the next one.
    let said = "([^>]|>[^>]|>>[^>])*";
    // Code may come as it is.
    let is_code = |tool: &Tool| tool.name == PYTHON && !tool.strict;
    let code = match tools.iter().any(is_code) {
        true => format!(" | {}", quoted(&format!("{PYTHON}\n"))),
        false => String::new(),
    };
    format!(
        "start: {start}\n\
         message: recipient_text said_on | call recipient_mark\n\
         last: recipient_text said | call\n\
         recipient_text: recipient_all{code}\n\
         said: /{said}>{{0,2}}/\n\
         said_on: /{said}>{{3,}}/\n\
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

/// What a text is that may begin with a header, behind which is what follows `at`.
enum Header {
    /// For everybody.
    Say {
        at: usize,
    },
    /// The call of a function.
    Call {
        name: String,
        at: usize,
        /// Its arguments are Python.
        is_code: bool,
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
            is_told: is_begun,
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
                    Header::Say { at } => {
                        self.close(around, parts);
                        self.held.drain(..at);
                        self.is_new = self.is_told;
                        self.state = State::Body(Body::Text);
                    }
                    Header::Call { name, at, is_code } => {
                        self.close(around, parts);
                        self.held.drain(..at);
                        self.begin(name, is_code, parts);
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
                let (end, is_found) = self.body_end(is_end);
                let rest = self.held.split_off(end);
                let text = std::mem::replace(&mut self.held, rest);
                self.say(body, &text, parts);
                if is_found {
                    self.state = State::Header(Around::Body(body));
                }
                is_found
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
                self.held = self.held.trim_start().to_owned();
                let word = &*self.held;
                let is_header = word.starts_with(MARK);
                if !is_header && MARK.starts_with(word) && (!is_end || word.is_empty()) {
                    return false;
                }
                self.state = match is_header {
                    true => State::Header(Around::Nothing),
                    false => State::Body(Body::Text),
                };
                self.is_new = self.is_told;
                true
            }
        }
    }

    /// How much of what is held belongs to a text or to code for certain, and whether a mark follows, behind white space that
    /// belongs to it.
    fn body_end(&self, is_end: bool) -> (usize, bool) {
        let held = &*self.held;
        let Some(at) = held.find(MARK) else {
            return match is_end {
                true => (held.len(), false),
                false => (blank_end(held, held.len() - n_beginning(held, MARK)), false),
            };
        };
        // Of many in a row the last are the mark: more may come.
        let rest = held[at..].trim_start_matches('>');
        match rest.is_empty() && !is_end {
            true => (blank_end(held, at), false),
            false => (blank_end(held, held.len() - rest.len() - MARK.len()), true),
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
        let known = || self.tools.iter().map(|tool| &*tool.name);
        let is_name = |name: &str| !name.is_empty() && name.chars().all(is_name);
        let Some((line, body)) = name.split_once('\n') else {
            let name = name.trim_end();
            let begins = ALL.starts_with(name) || known().any(|known| known.starts_with(name));
            let may_be = match (is_end, is_first) {
                // A header that was cut off says nothing.
                (true, true) => ALL.starts_with(name),
                (true, false) => begins && !name.is_empty(),
                (false, _) => begins || name.len() <= MAX_NAME && is_name(name),
            };
            return if may_be { Header::Unsure } else { Header::None };
        };
        let (at, name) = (at + line.len() + 1, line.trim_end());
        if name == ALL {
            return Header::Say { at };
        }
        let may_call = known().any(|known| known == name) || is_first && is_name(name);
        if !may_call || !self.has_tools {
            return Header::None;
        }
        let word = body.trim_start();
        let is_code = match word.strip_prefix('{').map(str::trim_start) {
            // A set or a mapping of Python isn't an object with this member.
            Some(member) if name == PYTHON => {
                if !is_end && member.len() < CODE.len() && CODE.starts_with(member) {
                    return Header::Unsure;
                }
                !member.starts_with(CODE)
            }
            Some(_) => false,
            None if word.is_empty() && !is_end && body.len() <= MAX_HEAD => return Header::Unsure,
            None if word.is_empty() => false,
            None if name == PYTHON => true,
            None => return Header::None,
        };
        let name = name.to_owned();
        Header::Call { name, at, is_code }
    }

    /// A call of the function `name` begins, with what is held.
    fn begin(&mut self, name: String, is_code: bool, parts: &mut Vec<Part>) {
        let index = self.n_calls;
        self.n_calls += 1;
        parts.push(Part::CallBegun { index, name });
        if is_code {
            self.argue(format!("{{{CODE}: \""), parts);
            self.state = State::Body(Body::Code);
        } else if self.held.trim_start().is_empty() {
            self.argue("{}".to_owned(), parts);
            self.end(parts);
        } else {
            self.state = State::Arguments(ObjectScanner::default());
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

/// Where the white space before `end` begins, or what of it may be held.
fn blank_end(text: &str, end: usize) -> usize {
    let blank = text[..end].trim_end().len();
    text.ceil_char_boundary(blank.max(end.saturating_sub(MAX_BLANK)))
}

#[cfg(test)]
mod tests {
    use super::super::split::joined;
    use super::*;

    /// The parts of `text` in pieces of `n` characters, neighbours joined.
    fn read(is_begun: bool, has_tools: bool, text: &str, n: usize) -> Vec<Part> {
        let tools = ["a", "a/b", "find", "python"].map(|name| Tool::new(name, None));
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
        super::super::split::call(index, name, arguments).to_vec()
    }

    #[test]
    fn messages_are_told_apart_however_they_are_cut() {
        for (input, parts) in [
            ("all\nFour.", text("Four.")),
            (">>>all\nFour.", text("Four.")),
            ("all\n", vec![]),
            ("al", vec![]),
            ("fin", text("fin")),
            ("all \nFour.", text("Four.")),
            ("all\nFour.>>>fin", text("Four.")),
            ("all\nFour. >>>", text("Four. >>>")),
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
                "python\n{ \"code\": \"1\"}",
                call(0, "python", "{ \"code\": \"1\"}"),
            ),
            (
                "python\n{1, 2}",
                call(0, "python", "{\"code\": \"{1, 2}\"}"),
            ),
            // Of many marks in a row the last counts, and names of tools may be any.
            (
                "all\n<b>x</b>>>>>a/b\n{}",
                [text("<b>x</b>>"), call(0, "a/b", "{}")].concat(),
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
    fn white_space_is_not_held_for_long() {
        let blank = "\n".repeat(100_000);
        for (before, after) in [
            ("all\n.", ""),
            ("a\n{}", "."),
            ("a\n", ""),
            ("find\n", "{}"),
        ] {
            let parts = read(false, true, &format!("{before}{blank}{after}"), 1);
            let said = parts.iter().map(|part| match part {
                Part::Text(text) => text.len(),
                _ => 0,
            });
            assert!(said.sum::<usize>() < 100_010, "{before}");
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
