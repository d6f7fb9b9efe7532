//! Flags for what an answer has to match.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use sterna::constraint::Grammar;

use crate::verbs;

/// What an answer has to match.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Constrained output")]
#[group(multiple = false)]
pub(crate) struct GrammarFlags {
    /// Answer with JSON that this schema describes: a file, or the schema itself
    #[arg(short = 'j', long, value_name = "FILE|JSON")]
    json_schema: Option<String>,

    /// Answer with a JSON object
    #[arg(long)]
    json_object: bool,

    /// Answer with text that this regular expression matches as a whole
    #[arg(long, value_name = "PATTERN")]
    regex: Option<String>,

    /// Answer with text that this grammar matches, in llguidance's variant of Lark
    #[arg(long, alias = "grammar-file", value_name = "FILE")]
    grammar: Option<PathBuf>,
}

impl GrammarFlags {
    /// What they ask for.
    pub(crate) fn grammar(&self) -> Result<Option<Grammar>> {
        Ok(match self {
            GrammarFlags {
                json_schema: Some(schema),
                ..
            } => Some(Grammar::JsonSchema(match is_json(schema) {
                true => schema.clone(),
                false => verbs::read_text(schema.as_ref())?,
            })),
            GrammarFlags {
                json_object: true, ..
            } => Some(Grammar::JsonObject),
            GrammarFlags {
                regex: Some(pattern),
                ..
            } => Some(Grammar::Regex(pattern.clone())),
            GrammarFlags {
                grammar: Some(file),
                ..
            } => Some(Grammar::Lark(verbs::read_text(file)?)),
            _ => None,
        })
    }
}

/// Whether a schema is given as it is: none is a file of such a name.
fn is_json(schema: &str) -> bool {
    schema.trim_start().starts_with('{') || matches!(schema.trim(), "true" | "false")
}
