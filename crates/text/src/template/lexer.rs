//! Template source to tokens, white space trimmed as Transformers has it (`trim_blocks`, `lstrip_blocks`).

use super::error::TemplateError;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Token<'s> {
    /// Text outside of tags.
    Text(&'s str),
    /// `{{`
    EmitStart,
    /// `}}`
    EmitEnd,
    /// `{%`
    TagStart,
    /// `%}`
    TagEnd,
    Name(&'s str),
    Str(String),
    Int(i128),
    Float(f64),
    /// An operator or bracket.
    Op(&'static str),
    End,
}

impl Token<'_> {
    pub(super) fn describe(&self) -> String {
        match self {
            Token::Text(_) => "text".into(),
            Token::EmitStart => "`{{`".into(),
            Token::EmitEnd => "`}}`".into(),
            Token::TagStart => "`{%`".into(),
            Token::TagEnd => "`%}`".into(),
            Token::Name(name) => format!("`{}`", super::error::cut(name)),
            Token::Str(_) => "a string".into(),
            Token::Int(_) | Token::Float(_) => "a number".into(),
            Token::Op(op) => format!("`{op}`"),
            Token::End => "the end of the template".into(),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mode {
    Text,
    Emit,
    Tag,
}

/// How a tag treats the white space beside it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trim {
    Default,
    All,
    Nothing,
}

impl Trim {
    fn of(mark: Option<u8>) -> Self {
        match mark {
            Some(b'-') => Self::All,
            Some(b'+') => Self::Nothing,
            _ => Self::Default,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Mark {
    Emit,
    Tag,
    Comment,
}

/// Operators, the longer ones before those that they begin with.
const OPS: [&str; 27] = [
    "**", "//", "==", "!=", "<=", ">=", "+", "-", "*", "/", "%", "~", "<", ">", "=", "|", ".", ",",
    ":", "(", ")", "[", "]", "{", "}", ";", "!",
];

pub(super) struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    mode: Mode,
    /// White space up to the next text is to be skipped.
    trim: bool,
    /// A tag begins here: its kind, and the bytes of its mark.
    pending: Option<(Mark, usize)>,
    /// Open brackets of the tag.
    brackets: usize,
}

impl<'s> Lexer<'s> {
    pub(super) fn new(source: &'s str) -> Self {
        let source = source.strip_suffix('\n').unwrap_or(source);
        let source = source.strip_suffix('\r').unwrap_or(source);
        Self {
            source,
            at: 0,
            line: 1,
            mode: Mode::Text,
            trim: false,
            pending: None,
            brackets: 0,
        }
    }

    /// The line of what was read last.
    pub(super) fn line(&self) -> u32 {
        self.line
    }

    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn error(&self, problem: impl Into<String>) -> TemplateError {
        TemplateError::Syntax {
            line: self.line as usize,
            problem: problem.into(),
        }
    }

    fn advance(&mut self, bytes: usize) -> &'s str {
        let taken = &self.rest()[..bytes];
        let lines = taken.bytes().filter(|byte| *byte == b'\n').count();
        self.line = self.line.saturating_add(lines as u32);
        self.at += bytes;
        taken
    }

    pub(super) fn next(&mut self) -> Result<Token<'s>, TemplateError> {
        loop {
            let token = match self.mode {
                Mode::Text => self.text()?,
                Mode::Emit | Mode::Tag => Some(self.code()?),
            };
            if let Some(token) = token {
                return Ok(token);
            }
        }
    }

    /// Text up to the next tag, or the beginning of that tag; nothing where a comment or an empty text was.
    fn text(&mut self) -> Result<Option<Token<'s>>, TemplateError> {
        if let Some((mark, len)) = self.pending.take() {
            return self.begin(mark, len);
        }
        if self.trim {
            self.trim = false;
            let rest = self.rest();
            self.advance(rest.len() - rest.trim_start().len());
        }
        let rest = self.rest();
        if rest.is_empty() {
            return Ok(Some(Token::End));
        }
        let Some((start, mark)) = find_mark(rest) else {
            return Ok(Some(Token::Text(self.advance(rest.len()))));
        };
        let trim = Trim::of(rest.as_bytes().get(start + 2).copied());
        self.pending = Some((mark, if trim == Trim::Default { 2 } else { 3 }));
        let before = &rest[..start];
        let kept = match trim {
            Trim::All => before.trim_end(),
            Trim::Default if mark != Mark::Emit => self.without_indentation(before),
            Trim::Default | Trim::Nothing => before,
        };
        self.advance(start);
        Ok((!kept.is_empty()).then_some(Token::Text(kept)))
    }

    /// `before` without the white space that begins its last line, if the tag behind it is first in its line.
    fn without_indentation(&self, before: &'s str) -> &'s str {
        let trimmed = indentation(before);
        let starts_line = match trimmed.chars().next_back() {
            Some(c) => c == '\n' || c == '\r',
            // The line may have begun before: behind a tag, or at the start of the template.
            None => {
                let earlier = self.source[..self.at].trim_end_matches(is_blank);
                earlier.is_empty() || earlier.ends_with(['\n', '\r'])
            }
        };
        if starts_line { trimmed } else { before }
    }

    fn begin(&mut self, mark: Mark, len: usize) -> Result<Option<Token<'s>>, TemplateError> {
        match mark {
            Mark::Comment => {
                // The mark is part of what the comment's end is looked for in: `{#-#}` is one.
                let Some(end) = self.rest()[2..].find("#}") else {
                    return Err(self.error("a comment has no end"));
                };
                let last = self.rest().as_bytes()[2..][..end].last().copied();
                self.advance(end + 4);
                self.after_tag(Trim::of(last));
                Ok(None)
            }
            Mark::Emit => {
                self.advance(len);
                self.mode = Mode::Emit;
                self.brackets = 0;
                Ok(Some(Token::EmitStart))
            }
            Mark::Tag => {
                if let Some((tag, trim)) = simple_tag(&self.rest()[len..], "raw") {
                    self.advance(len + tag);
                    return self.raw(trim);
                }
                self.advance(len);
                self.mode = Mode::Tag;
                self.brackets = 0;
                Ok(Some(Token::TagStart))
            }
        }
    }

    fn after_tag(&mut self, trim: Trim) {
        match trim {
            Trim::All => self.trim = true,
            Trim::Nothing => {}
            Trim::Default => {
                let rest = self.rest();
                let line_end = rest.strip_prefix('\r').unwrap_or(rest);
                let line_end = line_end.strip_prefix('\n').unwrap_or(line_end);
                self.advance(rest.len() - line_end.len());
            }
        }
    }

    /// What stands between `raw` and `endraw`.
    fn raw(&mut self, start: Trim) -> Result<Option<Token<'s>>, TemplateError> {
        let rest = self.rest();
        let mut from = 0;
        while let Some(found) = rest[from..].find("{%") {
            let tag = from + found;
            from = tag + 2;
            let before_end = Trim::of(rest.as_bytes().get(from).copied());
            let marked = usize::from(before_end != Trim::Default);
            let Some((len, after)) = simple_tag(&rest[from + marked..], "endraw") else {
                continue;
            };
            let mut text = &rest[..tag];
            text = match start {
                Trim::All => text.trim_start(),
                Trim::Nothing => text,
                Trim::Default => {
                    let text = text.strip_prefix('\r').unwrap_or(text);
                    text.strip_prefix('\n').unwrap_or(text)
                }
            };
            text = match before_end {
                Trim::All => text.trim_end(),
                Trim::Nothing => text,
                Trim::Default => {
                    let trimmed = indentation(text);
                    let starts_line = trimmed.is_empty() || trimmed.ends_with('\n');
                    if starts_line { trimmed } else { text }
                }
            };
            self.advance(from + marked + len);
            self.after_tag(after);
            return Ok((!text.is_empty()).then_some(Token::Text(text)));
        }
        Err(self.error("`raw` has no `endraw`"))
    }

    fn code(&mut self) -> Result<Token<'s>, TemplateError> {
        let rest = self.rest();
        let rest = {
            self.advance(rest.len() - rest.trim_start().len());
            self.rest()
        };
        let (end, token) = match self.mode {
            Mode::Tag => ("%}", Token::TagEnd),
            _ => ("}}", Token::EmitEnd),
        };
        if self.brackets == 0 {
            let marked = rest.strip_prefix(['-', '+']);
            if marked.is_some_and(|rest| rest.starts_with(end)) {
                let trim = Trim::of(rest.bytes().next());
                self.advance(3);
                self.mode = Mode::Text;
                match (end, trim) {
                    ("}}", Trim::Nothing) => {}
                    _ => self.after_tag(trim),
                }
                return Ok(token);
            }
            if rest.starts_with(end) {
                self.advance(2);
                self.mode = Mode::Text;
                if end == "%}" {
                    self.after_tag(Trim::Default);
                }
                return Ok(token);
            }
        }
        let Some(first) = rest.chars().next() else {
            return Err(self.error(format!("expected `{end}`, found the end of the template")));
        };
        if first == '\'' || first == '"' {
            return self.string(first);
        }
        if first.is_ascii_digit() {
            return self.number();
        }
        if first == '_' || first.is_alphabetic() {
            let len = rest
                .find(|c: char| c != '_' && !c.is_alphanumeric())
                .unwrap_or(rest.len());
            return Ok(Token::Name(self.advance(len)));
        }
        let Some(op) = OPS.into_iter().find(|op| rest.starts_with(op)) else {
            let problem = format!("unexpected character {first:?}");
            return Err(self.error(problem));
        };
        match op {
            "(" | "[" | "{" => self.brackets += 1,
            ")" | "]" | "}" => self.brackets = self.brackets.saturating_sub(1),
            _ => {}
        }
        self.advance(op.len());
        Ok(Token::Op(op))
    }

    fn string(&mut self, quote: char) -> Result<Token<'s>, TemplateError> {
        let rest = &self.rest()[1..];
        let mut escaped = false;
        let end = rest.bytes().position(|byte| {
            if escaped {
                escaped = false;
                return false;
            }
            escaped = byte == b'\\';
            byte == quote as u8
        });
        let Some(end) = end else {
            return Err(self.error("a string has no end"));
        };
        let text = unescape(&rest[..end])
            .ok_or_else(|| self.error("a string has an escape that means nothing"))?;
        self.advance(end + 2);
        Ok(Token::Str(text))
    }

    fn number(&mut self) -> Result<Token<'s>, TemplateError> {
        let rest = self.rest();
        let bytes = rest.as_bytes();
        let digits = |from: usize| {
            let run = bytes[from..].iter();
            run.take_while(|byte| byte.is_ascii_digit() || **byte == b'_')
                .count()
        };
        let radix = match bytes.get(..2) {
            Some(b"0x" | b"0X") => 16,
            Some(b"0o" | b"0O") => 8,
            Some(b"0b" | b"0B") => 2,
            _ => 10,
        };
        if radix != 10 {
            let len = rest[2..]
                .find(|c: char| !c.is_ascii_hexdigit() && c != '_')
                .unwrap_or(rest.len() - 2);
            let number = i128::from_str_radix(&rest[2..2 + len].replace('_', ""), radix);
            let number = number.map_err(|_| self.error("a number can't be read"))?;
            self.advance(2 + len);
            return Ok(Token::Int(number));
        }
        let mut len = digits(0);
        let mut float = false;
        // Behind a dot stands an index: `a.1.0` is `a[1][0]`.
        let index = self.source[..self.at].ends_with('.');
        if !index
            && bytes.get(len) == Some(&b'.')
            && bytes.get(len + 1).is_some_and(u8::is_ascii_digit)
        {
            float = true;
            len += 1 + digits(len + 1);
        }
        if !index && matches!(bytes.get(len), Some(b'e' | b'E')) {
            let sign = usize::from(matches!(bytes.get(len + 1), Some(b'+' | b'-')));
            if bytes.get(len + 1 + sign).is_some_and(u8::is_ascii_digit) {
                float = true;
                len += 1 + sign;
                len += digits(len);
            }
        }
        let text = rest[..len].replace('_', "");
        let token = if float {
            text.parse().ok().map(Token::Float)
        } else {
            text.parse().ok().map(Token::Int)
        };
        let token = token.ok_or_else(|| self.error("a number is too large"))?;
        self.advance(len);
        Ok(token)
    }
}

fn is_blank(c: char) -> bool {
    c.is_whitespace() && c != '\n' && c != '\r'
}

fn indentation(text: &str) -> &str {
    text.trim_end_matches(is_blank)
}

/// The next `{{`, `{%` or `{#`.
fn find_mark(text: &str) -> Option<(usize, Mark)> {
    let mut from = 0;
    while let Some(found) = text[from..].find('{') {
        let at = from + found;
        let mark = match text.as_bytes().get(at + 1) {
            Some(b'{') => Some(Mark::Emit),
            Some(b'%') => Some(Mark::Tag),
            Some(b'#') => Some(Mark::Comment),
            _ => None,
        };
        if let Some(mark) = mark {
            return Some((at, mark));
        }
        from = at + 1;
    }
    None
}

/// The length of what is left of a tag that says `name` alone, and its mark at the end.
fn simple_tag(text: &str, name: &str) -> Option<(usize, Trim)> {
    let rest = text.trim_start().strip_prefix(name)?.trim_start();
    let trim = Trim::of(rest.bytes().next());
    let rest = &rest[usize::from(trim != Trim::Default)..];
    let rest = rest.strip_prefix("%}")?;
    Some((text.len() - rest.len(), trim))
}

fn unescape(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let mut chars = rest[at + 1..].chars();
        let c = chars.next()?;
        rest = chars.as_str();
        let mut digits = |n: usize, radix: u32| {
            let end = rest.char_indices().nth(n).map_or(rest.len(), |(at, _)| at);
            let value = u32::from_str_radix(&rest[..end], radix);
            rest = &rest[end..];
            value.ok()
        };
        match c {
            '"' | '\\' | '/' | '\'' => out.push(c),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'x' => out.push(char::from_u32(digits(2, 16)?)?),
            'u' => {
                let first = digits(4, 16)?;
                let code = match first {
                    0xd800..0xdc00 => {
                        rest = rest.strip_prefix("\\u")?;
                        let end = rest.char_indices().nth(4).map_or(rest.len(), |(at, _)| at);
                        let low = u32::from_str_radix(&rest[..end], 16).ok()?;
                        rest = &rest[end..];
                        0x10000 + ((first - 0xd800) << 10) + low.checked_sub(0xdc00)?
                    }
                    code => code,
                };
                out.push(char::from_u32(code)?);
            }
            'U' => out.push(char::from_u32(digits(8, 16)?)?),
            '0'..='7' => {
                let more = rest
                    .bytes()
                    .take(2)
                    .take_while(|b| (b'0'..=b'7').contains(b));
                let n = more.count();
                let mut code = c.to_digit(8)?;
                for digit in rest[..n].chars() {
                    code = code * 8 + digit.to_digit(8)?;
                }
                rest = &rest[n..];
                out.push(char::from_u32(code)?);
            }
            _ => out.extend(['\\', c]),
        }
    }
    out.push_str(rest);
    Some(out)
}
