//! The members of a JSON object, while its text arrives.

/// Reads the text of an object, and tells of its members.
#[derive(Debug, Default, Clone)]
pub(crate) struct ObjectScanner {
    state: State,
    key: String,
    /// The text of the current value, without white space around it.
    value: String,
    /// Brackets that are open inside the value.
    depth: usize,
    in_string: bool,
    escaped: bool,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Before the opening bracket.
    #[default]
    Before,
    /// Before a key, or the closing bracket.
    Key,
    InKey,
    /// Before the colon.
    Colon,
    InValue,
    Over,
}

/// What a character is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Member<'a> {
    /// Nothing of a value.
    None,
    /// Part of the value of this key.
    Piece(&'a str),
    /// What ends the value of this key, which is whole; the character isn't part of it, and may end the object.
    Value(&'a str, &'a str),
    /// The end of the object, after no value.
    End,
    /// This is no object.
    Malformed,
}

impl ObjectScanner {
    /// Takes from the beginning of `held` what belongs to the object.
    pub(super) fn take(&mut self, held: &mut String) -> String {
        let end = held.char_indices().find(|(_, c)| {
            self.push(*c);
            self.is_over()
        });
        let n = end.map_or(held.len(), |(at, c)| at + c.len_utf8());
        held.drain(..n).collect()
    }

    /// Takes the next character.
    pub(crate) fn push(&mut self, c: char) -> Member<'_> {
        match self.state {
            State::Before if c == '{' => self.state = State::Key,
            State::Before if c.is_whitespace() => {}
            State::Key if c == '"' => {
                self.state = State::InKey;
                self.key.clear();
            }
            State::Key if c == '}' => {
                self.state = State::Over;
                return Member::End;
            }
            State::Key if c.is_whitespace() || c == ',' => {}
            State::InKey => match c {
                // Keys that matter have no escapes.
                '"' if !self.escaped => self.state = State::Colon,
                _ => {
                    self.escaped = c == '\\' && !self.escaped;
                    self.key.push(c);
                }
            },
            State::Colon if c == ':' => {
                self.state = State::InValue;
                self.value.clear();
                (self.depth, self.in_string, self.escaped) = (0, false, false);
            }
            State::Colon if c.is_whitespace() => {}
            State::InValue => return self.in_value(c),
            State::Before | State::Key | State::Colon | State::Over => {
                self.state = State::Over;
                return Member::Malformed;
            }
        }
        Member::None
    }

    fn in_value(&mut self, c: char) -> Member<'_> {
        if self.in_string {
            match c {
                _ if self.escaped => self.escaped = false,
                '\\' => self.escaped = true,
                '"' => self.in_string = false,
                _ => {}
            }
            return self.piece(c);
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.depth += 1,
            '}' | ']' if self.depth > 0 => self.depth -= 1,
            ',' if self.depth == 0 => {
                self.state = State::Key;
                return Member::Value(&self.key, self.value.trim());
            }
            '}' if self.depth == 0 => {
                self.state = State::Over;
                return Member::Value(&self.key, self.value.trim());
            }
            ']' => {
                self.state = State::Over;
                return Member::Malformed;
            }
            _ => {}
        }
        self.piece(c)
    }

    fn piece(&mut self, c: char) -> Member<'_> {
        // Only short values are asked for as a whole.
        const MAX_VALUE: usize = 4096;
        if self.value.len() < MAX_VALUE {
            self.value.push(c);
        }
        Member::Piece(&self.key)
    }

    /// Whether the object has ended.
    pub(crate) fn is_over(&self) -> bool {
        self.state == State::Over
    }
}

/// How many bytes at the end of `text` may begin `mark`.
pub(crate) fn n_beginning(text: &str, mark: &str) -> usize {
    let longest = mark.len().saturating_sub(1).min(text.len());
    let ends = (1..=longest).rev();
    ends.into_iter()
        .find(|&n| {
            text.is_char_boundary(text.len() - n) && mark.starts_with(&text[text.len() - n..])
        })
        .unwrap_or(0)
}
