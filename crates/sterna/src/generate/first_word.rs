//! The first word of an answer, as it is shown.

/// Removes the white space before the first word that chat templates provoke: line breaks, and a single
/// space. Indentation stays.
///
/// Only for display: the white space is part of the model's answer.
#[derive(Debug, Clone)]
pub struct FirstWord {
    /// White space so far; `None` after the first word.
    held: Option<String>,
}

impl FirstWord {
    /// Removes white space if `trims`, else passes everything through.
    pub fn new(trims: bool) -> FirstWord {
        FirstWord {
            held: trims.then(String::new),
        }
    }

    /// The part of the next `piece` to display.
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
