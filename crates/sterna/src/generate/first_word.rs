//! The first word of an answer, as it is shown.

/// Leaves out the blank before the first word that chat templates provoke: line breaks, and a space
/// by itself. Indentation stays.
///
/// Only for showing an answer: the blank is part of what the model said.
#[derive(Debug)]
pub struct FirstWord {
    /// White space so far; `None` once the first word came.
    held: Option<String>,
}

impl FirstWord {
    /// Leaves out the blank if `trims`, and nothing otherwise.
    pub fn new(trims: bool) -> FirstWord {
        FirstWord {
            held: trims.then(String::new),
        }
    }

    /// What to show of the next `piece`.
    pub fn push(&mut self, piece: &str) -> String {
        let Some(mut text) = self.held.take() else {
            return piece.to_owned();
        };
        text += piece;
        let word = text.trim_start();
        if word.is_empty() {
            self.held = Some(text);
            return String::new();
        }
        let blank = text[..text.len() - word.len()].trim_start_matches(['\r', '\n']);
        if blank == " " {
            word.to_owned()
        } else {
            format!("{blank}{word}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_blank_is_left_out_and_indentation_stays() {
        for (pieces, shown) in [
            (&[" Once", " upon"][..], "Once upon"),
            (&["\n", "\n", " ", "Once\n"], "Once\n"),
            (&["    if", " x"], "    if x"),
            (&["\n  ", "- a"], "  - a"),
            (&[" ", "\n"], ""),
            (&["\u{3000}ん"], "\u{3000}ん"),
        ] {
            let show = |trims| -> String {
                let mut first = FirstWord::new(trims);
                pieces.iter().map(|piece| first.push(piece)).collect()
            };
            assert_eq!(show(true), shown, "{pieces:?}");
            assert_eq!(show(false), pieces.concat());
        }
    }
}
