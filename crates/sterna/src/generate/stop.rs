//! Stop strings: text that ends an answer and is not part of it.

/// Passes text through until a stop string appears, holding back possible prefixes of one.
#[derive(Debug, Clone, Default)]
pub(super) struct StopStrings {
    /// None is empty.
    strings: Vec<String>,
    /// Text not yet passed on: always a proper prefix of some stop string.
    held: String,
}

/// The result of [`StopStrings::push`].
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Passed {
    /// Text that certainly precedes any stop string.
    pub(super) text: String,
    /// True if a stop string follows that text.
    pub(super) stopped: bool,
}

impl StopStrings {
    /// Stops at the first of `strings` to appear. Empty ones are ignored.
    pub(super) fn new(strings: Vec<String>) -> StopStrings {
        let strings = strings.into_iter().filter(|s| !s.is_empty()).collect();
        StopStrings {
            strings,
            held: String::new(),
        }
    }

    /// Takes the next `piece` of text.
    pub(super) fn push(&mut self, piece: &str) -> Passed {
        self.held.push_str(piece);
        let found = self
            .strings
            .iter()
            .filter_map(|stop| self.held.find(stop))
            .min();
        let end = found.unwrap_or_else(|| self.certain());
        let rest = self.held.split_off(end);
        let text = std::mem::replace(&mut self.held, rest);
        if found.is_some() {
            self.held.clear();
        }
        Passed {
            text,
            stopped: found.is_some(),
        }
    }

    /// The text held back, at the end of the answer.
    pub(super) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes of the held text that no stop string can begin in.
    fn certain(&self) -> usize {
        let begins_stop = |at: &usize| {
            let tail = &self.held[*at..];
            self.strings.iter().any(|stop| stop.starts_with(tail))
        };
        let mut starts = self.held.char_indices().map(|(at, _)| at);
        starts.find(begins_stop).unwrap_or(self.held.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All text passed on for `pieces`, and whether a stop string ended it.
    fn pass(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut stop = StopStrings::new(stops.iter().map(|s| s.to_string()).collect());
        let mut text = String::new();
        for piece in pieces {
            let passed = stop.push(piece);
            text += &passed.text;
            if passed.stopped {
                return (text, true);
            }
        }
        (text + &stop.finish(), false)
    }

    #[test]
    fn stops_are_found_however_the_text_is_cut() {
        for (stops, text, expected) in [
            (&["\n\n"][..], "one\ntwo\n\nthree", ("one\ntwo", true)),
            (&["User:"], "Use a User: x", ("Use a ", true)),
            (&["aab"], "aaab", ("a", true)),
            (&["cd", "bc"], "abcd", ("a", true)),
            (&["ö!"], "schön schö!", ("schön sch", true)),
            (&["never"], "it ends in nev", ("it ends in nev", false)),
            (&["", "x"], "abc", ("abc", false)),
            (&[], "abc", ("abc", false)),
        ] {
            let expected = (expected.0.to_owned(), expected.1);
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let letters: Vec<&str> = letters.iter().map(String::as_str).collect();
            assert_eq!(pass(stops, &[text]), expected, "{text} at once");
            assert_eq!(pass(stops, &letters), expected, "{text} by letters");
        }
    }

    #[test]
    fn only_possible_beginnings_are_held() {
        let mut stop = StopStrings::new(vec!["</s>".into()]);
        for (piece, text) in [("a <", "a "), ("/", ""), ("b", "</b"), ("<", "")] {
            assert_eq!(
                stop.push(piece),
                Passed {
                    text: text.into(),
                    stopped: false
                }
            );
        }
        assert_eq!(stop.finish(), "<");
    }
}
