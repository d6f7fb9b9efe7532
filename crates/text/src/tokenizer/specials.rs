//! The roles of special tokens.

use super::added::AddedTokens;

/// Special tokens by role, spelled out, as model files name them and chat templates use them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
#[allow(missing_docs)]
pub struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub unk: Option<String>,
    pub sep: Option<String>,
    pub pad: Option<String>,
    pub cls: Option<String>,
    pub mask: Option<String>,
}

impl SpecialTokens {
    /// The tokens under the names they have in chat templates, such as `bos_token`.
    pub fn named(&self) -> impl Iterator<Item = (&'static str, &str)> {
        [
            ("bos_token", &self.bos),
            ("eos_token", &self.eos),
            ("unk_token", &self.unk),
            ("sep_token", &self.sep),
            ("pad_token", &self.pad),
            ("cls_token", &self.cls),
            ("mask_token", &self.mask),
        ]
        .into_iter()
        .filter_map(|(name, token)| Some((name, token.as_deref()?)))
    }
}

/// Control tokens that begin a text, wherever they occur.
const BEGIN: [&str; 6] = [
    "<|begin_of_text|>",
    "<bos>",
    "<s>",
    "<|startoftext|>",
    "[CLS]",
    "<|begin▁of▁sentence|>",
];

/// Control tokens that end a turn or a text, wherever they occur.
const END: [&str; 22] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|end|>",
    "<|eot|>",
    "<|return|>",
    "<|call|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|end_of_sentence|>",
    "<|end▁of▁sentence|>",
    "<|EOT|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_role|>",
    "<|endofturn|>",
    "<end_of_utterance>",
    "<EOT>",
    "_<EOT>",
    "</s>",
    "<eos>",
];

/// The id of a control token that is known to begin texts.
pub(super) fn known_bos(added: &AddedTokens) -> Option<u32> {
    BEGIN.iter().find_map(|name| {
        added
            .id(name)
            .filter(|id| added.get(*id).is_some_and(|token| token.special))
    })
}

/// The ids of control tokens that are known to end turns or texts.
pub(super) fn known_ends(added: &AddedTokens) -> impl Iterator<Item = u32> {
    added
        .iter()
        .filter(|(_, token)| token.special && END.contains(&token.content.as_str()))
        .map(|(id, _)| id)
}
