//! Chat templates as minijinja renders them, to compare with: filters, methods and slices that it lacks or has
//! otherwise are added, and slices are rewritten.

mod filters;
mod json;
mod methods;
mod source;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Rest;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior, Value};
use sterna_text::ChatInput;

/// The prompt, or what is wrong.
pub(crate) fn render(source: &str, input: &ChatInput) -> Result<String, String> {
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
    environment.set_fuel(Some(5_000_000));
    environment.set_recursion_limit(100);
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
    environment.add_function("raise_exception", |message: &str| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
    });
    let source = source::prepare(source)?;
    environment
        .add_template_owned("template", source)
        .map_err(|error| error.to_string())?;
    let template = environment.get_template("template");
    let template = template.map_err(|error| error.to_string())?;
    let list = |values: &[serde_json::Value]| -> Value { values.iter().map(json::value).collect() };
    let optional =
        |values: &Option<Vec<serde_json::Value>>| values.as_deref().map_or(Value::from(()), list);
    let mut variables: Vec<(String, Value)> = Vec::new();
    for (name, value) in &input.extra {
        variables.push((name.clone(), json::value(value)));
    }
    variables.push(("messages".to_owned(), list(&input.messages)));
    variables.push(("tools".to_owned(), optional(&input.tools)));
    variables.push(("documents".to_owned(), optional(&input.documents)));
    variables.push((
        "add_generation_prompt".to_owned(),
        Value::from(input.add_generation_prompt),
    ));
    if let Some(enable) = input.enable_thinking {
        variables.push(("enable_thinking".to_owned(), Value::from(enable)));
    }
    template
        .render(Value::from_pairs(variables))
        .map_err(|error| error.to_string())
}
