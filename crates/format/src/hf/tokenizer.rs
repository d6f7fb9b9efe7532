//! `tokenizer_config.json`: special tokens and chat templates.

use std::collections::BTreeMap;

use super::ConfigError;
use super::node::{self, Node};

/// The facts of `tokenizer_config.json`. What the file doesn't say is `None` or empty.
#[derive(Debug, Clone, Default, PartialEq)]
// Fields without a comment are the keys of the file.
#[allow(missing_docs)]
#[non_exhaustive]
pub struct TokenizerConfig {
    /// The Transformers class, such as `LlamaTokenizer`.
    pub tokenizer_class: Option<String>,
    pub bos_token: Option<String>,
    pub eos_token: Option<String>,
    pub pad_token: Option<String>,
    pub unk_token: Option<String>,
    pub add_bos_token: Option<bool>,
    pub add_eos_token: Option<bool>,
    pub add_prefix_space: Option<bool>,
    pub clean_up_tokenization_spaces: Option<bool>,
    /// `None` also for the huge number by which Transformers means "no limit".
    pub model_max_length: Option<usize>,
    pub chat_template: Option<ChatTemplate>,
    /// Tokens added to the vocabulary, by id.
    pub added_tokens_decoder: BTreeMap<u32, AddedToken>,
}

/// One template, or several with names.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChatTemplate {
    /// The only one.
    Single(String),
    /// Name and template, in file order; one is usually called `default`, others `tool_use` or `rag`.
    Named(Vec<(String, String)>),
}

impl ChatTemplate {
    /// The template for plain chat: the only one, the one called `default`, or else the first.
    pub fn default_template(&self) -> Option<&str> {
        match self {
            ChatTemplate::Single(template) => Some(template),
            ChatTemplate::Named(named) => {
                let default = named.iter().find(|(name, _)| name == "default");
                default
                    .or(named.first())
                    .map(|(_, template)| template.as_str())
            }
        }
    }

    /// The template called `name`; the only one answers to `default`.
    pub fn named(&self, name: &str) -> Option<&str> {
        match self {
            ChatTemplate::Single(template) => (name == "default").then_some(template),
            ChatTemplate::Named(named) => {
                let found = named.iter().find(|(n, _)| n == name);
                found.map(|(_, template)| template.as_str())
            }
        }
    }
}

/// A token outside of the trained vocabulary.
#[derive(Debug, Clone, PartialEq, Eq)]
// Fields without a comment are the keys of the file.
#[allow(missing_docs)]
#[non_exhaustive]
pub struct AddedToken {
    pub content: String,
    pub special: bool,
    pub single_word: bool,
    pub lstrip: bool,
    pub rstrip: bool,
    pub normalized: bool,
}

impl TokenizerConfig {
    /// Parses `tokenizer_config.json`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if it isn't JSON or a value isn't what its key demands.
    pub fn parse(json: &[u8]) -> Result<TokenizerConfig, ConfigError> {
        let json = node::parse(json)?;
        let root = Node::root(&json);
        root.expect_object()?;
        let bool = |key: &str| root.get(key).map(|n| n.bool()).transpose();
        let token = |key: &str| token(root.get(key));
        Ok(TokenizerConfig {
            tokenizer_class: root.get("tokenizer_class").map(|n| n.str()).transpose()?,
            bos_token: token("bos_token")?,
            eos_token: token("eos_token")?,
            pad_token: token("pad_token")?,
            unk_token: token("unk_token")?,
            add_bos_token: bool("add_bos_token")?,
            add_eos_token: bool("add_eos_token")?,
            add_prefix_space: bool("add_prefix_space")?,
            clean_up_tokenization_spaces: bool("clean_up_tokenization_spaces")?,
            model_max_length: max_length(root.get("model_max_length"))?,
            chat_template: chat_template(root.get("chat_template"))?,
            added_tokens_decoder: added_tokens(root.get("added_tokens_decoder"))?,
        })
    }
}

/// `"<s>"` or `{"content": "<s>", …}`. A few files say `false` for none.
fn token(node: Option<Node<'_>>) -> Result<Option<String>, ConfigError> {
    let Some(node) = node else { return Ok(None) };
    if node.is_bool() && !node.bool()? {
        return Ok(None);
    }
    match node.get("content") {
        Some(content) => content.str().map(Some),
        None => node.str().map(Some),
    }
}

fn max_length(node: Option<Node<'_>>) -> Result<Option<usize>, ConfigError> {
    let Some(node) = node else { return Ok(None) };
    match node.any_f64()? {
        unlimited if unlimited > f64::from(i32::MAX) => Ok(None),
        _ => node.count().map(Some),
    }
}

fn chat_template(node: Option<Node<'_>>) -> Result<Option<ChatTemplate>, ConfigError> {
    let Some(node) = node else { return Ok(None) };
    if node.is_string() {
        return Ok(Some(ChatTemplate::Single(node.str()?)));
    }
    let named = node.list(|item| {
        let part = |key: &'static str| match item.get(key) {
            Some(part) => part.str(),
            None => item.missing(key),
        };
        Ok((part("name")?, part("template")?))
    })?;
    Ok(Some(ChatTemplate::Named(named)))
}

fn added_tokens(node: Option<Node<'_>>) -> Result<BTreeMap<u32, AddedToken>, ConfigError> {
    let Some(node) = node else {
        return Ok(BTreeMap::new());
    };
    let read = |(id, token): (&str, Node<'_>)| {
        let Ok(id) = id.parse() else {
            return token.refuse("a token id as key", format!("`{id}`"));
        };
        let flag = |key: &str| match token.get(key) {
            Some(flag) => flag.bool(),
            None => Ok(false),
        };
        let content = match token.get("content") {
            Some(content) => content.str()?,
            None => return token.missing("content"),
        };
        let token = AddedToken {
            content,
            special: flag("special")?,
            single_word: flag("single_word")?,
            lstrip: flag("lstrip")?,
            rstrip: flag("rstrip")?,
            normalized: flag("normalized")?,
        };
        Ok((id, token))
    };
    node.members()?.map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> TokenizerConfig {
        TokenizerConfig::parse(json.as_bytes()).unwrap_or_else(|e| panic!("{json}: {e}"))
    }

    #[test]
    fn tokens_and_lengths_in_their_forms() {
        let config = parse(
            r#"{"bos_token":"<s>","eos_token":{"content":"</s>","lstrip":false},"pad_token":null,"unk_token":false,
                "model_max_length":1000000000000000019884624838656,"add_bos_token":true,
                "added_tokens_decoder":{"2":{"content":"</s>","special":true},"10":{"content":" ","rstrip":true}}}"#,
        );
        assert_eq!(config.bos_token.as_deref(), Some("<s>"));
        assert_eq!(config.eos_token.as_deref(), Some("</s>"));
        assert_eq!((config.pad_token, config.unk_token), (None, None));
        assert_eq!(config.model_max_length, None);
        assert_eq!(config.add_bos_token, Some(true));
        let ids: Vec<_> = config.added_tokens_decoder.keys().copied().collect();
        assert_eq!(ids, [2, 10]);
        assert!(config.added_tokens_decoder[&2].special);
        assert!(config.added_tokens_decoder[&10].rstrip);
        assert_eq!(
            parse(r#"{"model_max_length":512}"#).model_max_length,
            Some(512)
        );
    }

    #[test]
    fn one_template_or_several() {
        let one = parse(r#"{"chat_template":"a"}"#).chat_template.unwrap();
        assert_eq!(one.default_template(), Some("a"));
        assert_eq!((one.named("default"), one.named("rag")), (Some("a"), None));
        let several = parse(
            r#"{"chat_template":[{"name":"rag","template":"r"},{"name":"default","template":"d"}]}"#,
        );
        let several = several.chat_template.unwrap();
        assert_eq!(several.default_template(), Some("d"));
        assert_eq!(several.named("rag"), Some("r"));
    }

    #[test]
    fn errors_name_the_path() {
        for (json, message) in [
            (
                r#"{"bos_token":7}"#,
                "`bos_token`: expected a string, found a number",
            ),
            (
                r#"{"chat_template":[{"name":"x"}]}"#,
                "`chat_template[0]`: expected an object, found one without `template`",
            ),
            (
                r#"{"added_tokens_decoder":{"x":{}}}"#,
                "`added_tokens_decoder.x`: expected a token id as key, found `x`",
            ),
            (
                r#"{"added_tokens_decoder":{"1":"x"}}"#,
                "`added_tokens_decoder.1`: expected an object, found a string",
            ),
            (
                r#"{"model_max_length":-5}"#,
                "`model_max_length`: expected a whole number from 0 to 2147483647, found -5",
            ),
        ] {
            let error = TokenizerConfig::parse(json.as_bytes()).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }
}
