//! Conversations to prompts: the chat templates that models ship, and some for models that ship none.

mod builtin;
mod clock;
mod error;
mod filters;
mod json;
mod methods;
mod source;

use std::io;
use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Rest;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};
use serde_json::Map;

use crate::SpecialTokens;

pub use builtin::ChatFormat;
pub use clock::DateTime;
pub use error::TemplateError;

/// Templates in use have up to 30 kB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Prompts in use have up to a few megabytes.
const MAX_OUTPUT_BYTES: usize = 64 << 20;
/// Instructions of the template engine; a conversation of a thousand messages takes a hundred thousand.
const FUEL: u64 = 5_000_000;
/// Nested macros, loops and includes.
const MAX_RECURSION: usize = 100;

/// The only template in each environment.
const NAME: &str = "chat_template";

/// A compiled chat template. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    environment: Arc<Environment<'static>>,
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
}

impl ChatTemplate {
    /// Compiles `source`; `specials` become variables such as `bos_token`.
    ///
    /// # Errors
    ///
    /// [`TemplateError::Syntax`] if it is no Jinja template, [`TemplateError::TooLarge`] beyond a megabyte.
    pub fn new(source: &str, specials: &SpecialTokens) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE_BYTES {
            return Err(TemplateError::TooLarge {
                len: source.len(),
                limit: MAX_SOURCE_BYTES,
            });
        }
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .expect("the delimiters are the default ones");
        let mut environment = Environment::new();
        environment.set_syntax(syntax);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_unknown_method_callback(methods::call);
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_debug(true);
        environment.set_formatter(|output, state, value| match filters::print(value)? {
            Some(text) => Ok(output.write_str(&text)?),
            None => minijinja::escape_formatter(output, state, value),
        });
        environment.add_filter("tojson", json::tojson);
        environment.add_filter(source::BOUNDED, filters::bounded);
        environment.add_filter("int", filters::int);
        environment.add_filter("float", filters::float);
        environment.add_filter("wordcount", filters::wordcount);
        environment.add_function("cycler", |items: Rest<Value>| {
            minijinja_contrib::globals::cycler(items.0)
        });
        environment.add_function("joiner", minijinja_contrib::globals::joiner);
        environment.add_function("raise_exception", raise_exception);
        environment
            .add_template_owned(NAME, source::prepare(source)?)
            .map_err(TemplateError::syntax)?;
        Ok(Self {
            environment: Arc::new(environment),
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
    /// # Errors
    ///
    /// [`TemplateError::Raised`] if the template refuses the conversation in its own words,
    /// [`TemplateError::Render`] if it does something impossible, takes too long or grows too large.
    pub fn render(&self, input: &ChatInput) -> Result<String, TemplateError> {
        let mut output = Limited {
            bytes: Vec::new(),
            limit: MAX_OUTPUT_BYTES,
        };
        let template = self
            .environment
            .get_template(NAME)
            .map_err(TemplateError::render)?;
        template
            .render_captured_to(self.variables(input), &mut output)
            .map_err(TemplateError::render)?;
        // The engine writes strings only.
        Ok(String::from_utf8_lossy(&output.bytes).into_owned())
    }

    fn variables(&self, input: &ChatInput) -> Value {
        let mut variables: Vec<(String, Value)> = Vec::new();
        variables.extend(
            self.specials
                .named()
                .map(|(name, token)| (name.to_owned(), Value::from(token))),
        );
        variables.extend(
            input
                .extra
                .iter()
                .map(|(name, value)| (name.clone(), json::value(value))),
        );
        let mut set = |name: &str, value: Value| variables.push((name.to_owned(), value));
        set("messages", list(&input.messages));
        set("tools", optional(&input.tools));
        set("documents", optional(&input.documents));
        set(
            "add_generation_prompt",
            Value::from(input.add_generation_prompt),
        );
        if let Some(enable) = input.enable_thinking {
            set("enable_thinking", Value::from(enable));
        }
        let now = input.now;
        set(
            "strftime_now",
            Value::from_function(move |format: &str| match now {
                Some(now) => now.strftime(format),
                None => Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "the template asks for the date and none was given",
                )),
            }),
        );
        Value::from_pairs(variables)
    }
}

/// Transformers passes `None` for missing values, so that such variables are defined.
fn optional(values: &Option<Vec<serde_json::Value>>) -> Value {
    values.as_deref().map_or(Value::from(()), list)
}

fn list(values: &[serde_json::Value]) -> Value {
    values.iter().map(json::value).collect()
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    let raised = error::RaisedByTemplate(message.to_owned());
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()).with_source(raised))
}

/// A buffer that refuses to grow beyond a limit.
struct Limited {
    bytes: Vec<u8>,
    limit: usize,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + bytes.len() > self.limit {
            return Err(io::Error::other(format!(
                "the prompt grows beyond {} bytes",
                self.limit
            )));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
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
    fn hostile_templates_end_in_errors() {
        for source in [
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
            "{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = [ns.x] %}{% endfor %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{% for i in range(100000) %}{{ 'aaaaaaaaaa' * 1000000 }}{% endfor %}",
            "{% set x = 'a' * 99999999 %}",
        ] {
            let start = std::time::Instant::now();
            assert!(
                matches!(render(source), Err(TemplateError::Render { .. })),
                "{source}"
            );
            assert!(start.elapsed().as_secs() < 5, "{source}");
        }
    }

    #[test]
    fn what_the_template_raises_is_told_apart() {
        let error = render("{{ raise_exception('only ' ~ messages[0].role) }}").unwrap_err();
        assert!(matches!(error, TemplateError::Raised(message) if message == "only user"));
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
