//! The tokens of a model, as the bytes that they spell.

use std::fmt;
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::earley::SlicedBiasComputer;
use toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};

use crate::error::ConstraintError;

/// The tokens of a model, prepared for constraints. Clones share it.
#[derive(Clone)]
pub struct Vocabulary {
    pub(crate) parsers: Arc<ParserFactory>,
    n_tokens: usize,
    /// A bit for each token, the lowest first: whether it begins with a digit.
    digits: Arc<[u32]>,
}

impl Vocabulary {
    /// Precedes the name of a control token, which isn't text: only a grammar that names it allows it.
    pub const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

    /// A vocabulary whose token with id `i` spells `tokens[i]`; ids that nothing uses are empty.
    ///
    /// Errors: so many tokens that ids don't fit.
    pub fn new(mut tokens: Vec<Vec<u8>>) -> Result<Vocabulary, ConstraintError> {
        let n_tokens = tokens.len();
        let is_digit = |token: &Vec<u8>| token.first().is_some_and(u8::is_ascii_digit);
        let word = |tokens: &[Vec<u8>]| {
            let bits = tokens.iter().map(is_digit).rev();
            bits.fold(0, |word, bit| word << 1 | u32::from(bit))
        };
        let digits = tokens.chunks(32).map(word).collect();
        let refused = |error: &dyn fmt::Display| ConstraintError::Vocabulary(error.to_string());
        // The end of the output, whatever a model's tokens for that are.
        tokens.push([&[Vocabulary::CONTROL], &b"<|end of output|>"[..]].concat());
        let end = u32::try_from(n_tokens).map_err(|error| refused(&error))?;
        let trie = TokTrie::from(&TokRxInfo::new(end + 1, end), &tokens);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        let parsers = ParserFactory::new(&env, InferenceCapabilities::default(), &slices);
        let mut parsers = parsers.map_err(|error| refused(&error))?;
        parsers.quiet().limits_mut().verbose_errors = false;
        Ok(Vocabulary {
            parsers: Arc::new(parsers),
            n_tokens,
            digits,
        })
    }

    /// How many tokens there are.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// The bytes of a token.
    pub(crate) fn spelling(&self, id: u32) -> &[u8] {
        self.trie().token(id)
    }

    /// A bit for each token, the lowest first: whether it begins with a digit.
    pub(crate) fn digits(&self) -> &[u32] {
        &self.digits
    }

    pub(crate) fn trie(&self) -> &TokTrie {
        self.parsers.tok_env().tok_trie()
    }
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary")
            .field("n_tokens", &self.n_tokens)
            .finish_non_exhaustive()
    }
}
