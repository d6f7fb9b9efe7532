//! The verbs of the command line, one file each, and what several of them share.

pub(crate) mod bench;
pub(crate) mod bundle;
pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod cp;
#[cfg(feature = "gpu")]
pub(crate) mod diagnose;
pub(crate) mod diff;
pub(crate) mod doctor;
pub(crate) mod embed;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod man;
pub(crate) mod perplexity;
pub(crate) mod pull;
#[cfg(feature = "stores")]
pub(crate) mod push;
pub(crate) mod quantize;
pub(crate) mod run;
pub(crate) mod sign;
pub(crate) mod template;
pub(crate) mod tokenize;
pub(crate) mod trust;
#[cfg(feature = "gpu")]
pub(crate) mod tune;
pub(crate) mod verify;
pub(crate) mod worker;

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};

/// Maximum length of a text: hundreds of times what a context holds, and well below what fills the memory.
const MAX_TEXT_BYTES: u64 = 256 << 20;

const BYTE_ORDER_MARK: char = '\u{feff}';

/// The text in `file`, which must be UTF-8.
pub(crate) fn read_text(file: &Path) -> Result<String> {
    let name = file.display();
    let bytes = File::open(file)
        .and_then(read_bounded)
        .with_context(|| format!("{name}: cannot read"))?;
    utf8(&name.to_string(), bytes)
}

/// The text on standard input, which must be UTF-8.
fn read_stdin() -> Result<String> {
    let name = "standard input";
    let bytes = read_bounded(io::stdin()).with_context(|| format!("{name}: cannot read"))?;
    utf8(name, bytes)
}

/// The text that is `bytes`, without the byte order mark that some editors begin files with.
fn utf8(name: &str, bytes: Vec<u8>) -> Result<String> {
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!("{name}: expected UTF-8 text, found other bytes at offset {at}")
    })?;
    if text.starts_with(BYTE_ORDER_MARK) {
        text.remove(0);
    }
    Ok(text)
}

/// All of `source`, unless it is longer than any text.
fn read_bounded(source: impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(MAX_TEXT_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_TEXT_BYTES {
        let message = format!("expected at most {MAX_TEXT_BYTES} bytes of text, found more");
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// Checks that all `ids` are in the vocabulary of a model with `n_vocab` tokens.
fn check_ids(ids: &[u32], n_vocab: usize) -> Result<()> {
    match ids
        .iter()
        .enumerate()
        .find(|&(_, &id)| id as usize >= n_vocab)
    {
        Some((i, id)) => bail!("id {i}: expected a token id below {n_vocab}, found {id}"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_outside_the_vocabulary_are_refused() {
        assert!(check_ids(&[0, 9], 10).is_ok());
        let error = check_ids(&[0, 10], 10).unwrap_err().to_string();
        assert_eq!(error, "id 1: expected a token id below 10, found 10");
    }
}
