//! Conversations to prompts: the chat templates that models ship, and some for models that ship none.
//!
//! Templates are programs by strangers, so the interpreter is made for that: the parser limits length and nesting,
//! the renderer counts its recursion, pays for every step and for every byte before it is there.

mod args;
mod ast;
mod builtin;
mod clock;
mod error;
mod filters;
mod format;
mod json;
mod lexer;
mod meter;
mod methods;
mod operators;
mod parser;
mod predicates;
mod print;
mod render;
mod value;

use std::sync::Arc;

use serde_json::Map;

use crate::SpecialTokens;
use ast::Program;
use error::Fault;
use meter::Meter;
use render::Renderer;
use value::Value;

pub use builtin::ChatFormat;
pub use clock::DateTime;
pub use error::TemplateError;

/// Templates in use have up to 30 kB.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// Longer conversations are no prompt for any model.
const MAX_INPUT_BYTES: usize = 64 << 20;
/// The most bytes of a prompt, for an empty conversation. Prompts in use have up to a few megabytes.
const MAX_OUTPUT_BYTES: usize = 16 << 20;

/// A compiled chat template. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    program: Arc<Program>,
    specials: SpecialTokens,
}

/// What a chat template is rendered with.
#[derive(Debug, Clone, Default)]
pub struct ChatInput {
    /// Objects with `role`, `content` and whatever else the template knows, in the form of the OpenAI API.
    pub messages: Vec<serde_json::Value>,
    /// Tools the model may call, each as a JSON schema.
    pub tools: Option<Vec<serde_json::Value>>,
    /// Documents to answer from.
    pub documents: Option<Vec<serde_json::Value>>,
    /// End the prompt where the answer begins.
    pub add_generation_prompt: bool,
    /// For models that can think before they answer; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Any other variables; they go before those above.
    pub extra: Map<String, serde_json::Value>,
    /// The time, for templates that name the date.
    pub now: Option<DateTime>,
}

impl ChatInput {
    /// A conversation of `(role, content)` pairs, to be answered.
    pub fn conversation<'a>(turns: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let message = |(role, content)| serde_json::json!({ "role": role, "content": content });
        Self {
            messages: turns.into_iter().map(message).collect(),
            add_generation_prompt: true,
            ..Self::default()
        }
    }

    /// Bytes of all strings, and some for each value.
    pub(crate) fn size(&self) -> usize {
        let lists = [
            Some(&self.messages),
            self.tools.as_ref(),
            self.documents.as_ref(),
        ];
        let values = lists.into_iter().flatten().flatten();
        let extra = self
            .extra
            .iter()
            .map(|(name, value)| name.len() + json_size(value));
        values.map(json_size).chain(extra).sum()
    }
}

fn json_size(value: &serde_json::Value) -> usize {
    use serde_json::Value as Json;
    const VALUE: usize = 16;
    VALUE
        + match value {
            Json::Null | Json::Bool(_) | Json::Number(_) => 0,
            Json::String(text) => text.len(),
            Json::Array(items) => items.iter().map(json_size).sum(),
            Json::Object(entries) => {
                let entries = entries.iter();
                entries
                    .map(|(key, item)| VALUE + key.len() + json_size(item))
                    .sum()
            }
        }
}

impl ChatTemplate {
    /// Compiles `source`; `specials` become variables such as `bos_token`.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Syntax`] if it is no Jinja template or nests too deep, [`TemplateError::TooLarge`] beyond
    /// 256 KiB.
    pub fn new(source: &str, specials: &SpecialTokens) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(TemplateError::TooLarge {
                len: source.len(),
                limit: MAX_SOURCE_BYTES,
            });
        }
        Ok(Self {
            program: Arc::new(parser::parse(source)?),
            specials: specials.clone(),
        })
    }

    /// The source of the template for a conversation, of those that a `tokenizer_config.json` holds: the one called
    /// `tool_use` if there are tools, or else the default.
    pub fn choose(templates: &sterna_format::hf::ChatTemplate, has_tools: bool) -> Option<&str> {
        let for_tools = templates.named("tool_use").filter(|_| has_tools);
        for_tools.or_else(|| templates.default_template())
    }

    /// The prompt for a conversation.
    ///
    /// However the template is made, this takes about as long as its work budget allows (a fraction of a second for
    /// a short conversation), 32 MiB and eight times the conversation, and less than 512 KiB of stack.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Raised`] if the template refuses the conversation in its own words,
    /// [`TemplateError::Render`] if it does something impossible, takes too long or grows too large,
    /// [`TemplateError::ConversationTooLarge`] beyond 64 MiB.
    pub fn render(&self, input: &ChatInput) -> Result<String, TemplateError> {
        let len = input.size();
        if len > MAX_INPUT_BYTES {
            return Err(TemplateError::ConversationTooLarge {
                len,
                limit: MAX_INPUT_BYTES,
            });
        }
        let meter = Meter::new(len);
        let max_output = MAX_OUTPUT_BYTES + 2 * len;
        let mut renderer = Renderer::new(&self.program, meter, input.now, max_output)
            .map_err(|fault| fault.at(0))?;
        self.define_variables(&mut renderer, input)
            .and_then(|()| renderer.run())
            .map_err(|fault| fault.at(renderer.line()))
    }

    fn define_variables(
        &self,
        renderer: &mut Renderer<'_>,
        input: &ChatInput,
    ) -> Result<(), Fault> {
        for (name, token) in self.specials.named() {
            renderer.define(name, |meter| Value::str(token, meter))?;
        }
        for (name, value) in &input.extra {
            renderer.define(name, |meter| Value::from_json(value, meter))?;
        }
        // Transformers passes `None` for what there is none of, so that such variables are defined.
        let lists = [
            ("messages", Some(&input.messages)),
            ("tools", input.tools.as_ref()),
            ("documents", input.documents.as_ref()),
        ];
        for (name, values) in lists {
            renderer.define(name, |meter| match values {
                None => Ok(Value::None),
                Some(values) => {
                    let mut list = value::List::new(meter)?;
                    for value in values {
                        list.push(Value::from_json(value, meter)?)?;
                    }
                    Ok(list.into_value())
                }
            })?;
        }
        let add = Value::Bool(input.add_generation_prompt);
        renderer.define("add_generation_prompt", |_| Ok(add))?;
        if let Some(enable) = input.enable_thinking {
            renderer.define("enable_thinking", |_| Ok(Value::Bool(enable)))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn render(source: &str) -> Result<String, TemplateError> {
        ChatTemplate::new(source, &SpecialTokens::default())?
            .render(&ChatInput::conversation([("user", "x")]))
    }

    #[test]
    fn what_the_template_raises_is_told_apart() {
        let error = render("{{ raise_exception('only ' ~ messages[0].role) }}").unwrap_err();
        assert!(matches!(error, TemplateError::Raised(message) if message == "only user"));
    }

    #[test]
    fn errors_name_the_line() {
        let cases = [
            (
                "a\n{{ x.y }}",
                "chat template, line 2: attribute `y` of an undefined value",
            ),
            (
                "a\n\n{% if x",
                "chat template, line 3: expected `%}`, found the end of the template",
            ),
            (
                "{{ 1 +\n'a' }}",
                "chat template, line 1: `+` takes no number and string",
            ),
        ];
        for (source, expected) in cases {
            assert_eq!(render(source).unwrap_err().to_string(), expected);
        }
    }

    #[test]
    fn every_built_in_format_compiles() {
        use ChatFormat::{BitNet, ChatMl, Gemma, Llama2, Llama3, Mistral, Phi3, Plain, Zephyr};
        for format in [
            BitNet, ChatMl, Gemma, Llama2, Llama3, Mistral, Phi3, Plain, Zephyr,
        ] {
            ChatTemplate::of_format(format, &SpecialTokens::default());
        }
    }
}
