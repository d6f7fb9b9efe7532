//! The verbs of the command line, one file each, and what several of them do alike.

pub(crate) mod bench;
pub(crate) mod doctor;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod perplexity;
pub(crate) mod run;
pub(crate) mod template;
pub(crate) mod tokenize;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// The text in `file`, which must be UTF-8.
fn read_text(file: &Path) -> Result<String> {
    let bytes = fs::read(file).with_context(|| format!("{}: cannot read", file.display()))?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        anyhow::anyhow!(
            "{}: expected UTF-8 text, found other bytes at offset {at}",
            file.display()
        )
    })
}

/// Checks that a model with `n_vocab` tokens knows all `ids`.
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
