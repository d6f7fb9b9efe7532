//! The `sterna` command.
//!
//! Where the libraries meet: verbs parse their flags, [`model`] opens files and feeds the engine,
//! [`runtime`] turns prompts into text, [`output`] writes results. Only this crate chooses threads,
//! backends and defaults.
#![forbid(unsafe_code)]

mod args;
mod builtin;
mod chat;
mod convert;
mod display;
mod interrupt;
mod machine;
mod model;
mod output;
mod progress;
mod runtime;
mod sampling;
mod speculate;
mod stop;
mod verbs;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Run low-bit language models
///
/// MODEL is a GGUF file (or the first of a split set), a folder with config.json and safetensors
/// files, or `builtin`: the small story teller inside this program.
#[derive(Debug, Parser)]
#[command(name = "sterna", version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Run(verbs::run::Run),
    Inspect(verbs::inspect::Inspect),
    Tokenize(verbs::tokenize::Tokenize),
    Template(verbs::template::Template),
    Logits(verbs::logits::Logits),
    Perplexity(verbs::perplexity::Perplexity),
    Bench(verbs::bench::Bench),
    Convert(verbs::convert::Convert),
    Doctor(verbs::doctor::Doctor),
}

impl Verb {
    fn run(self) -> Result<()> {
        match self {
            Verb::Run(verb) => verb.run(),
            Verb::Inspect(verb) => verb.run(),
            Verb::Tokenize(verb) => verb.run(),
            Verb::Template(verb) => verb.run(),
            Verb::Logits(verb) => verb.run(),
            Verb::Perplexity(verb) => verb.run(),
            Verb::Bench(verb) => verb.run(),
            Verb::Convert(verb) => verb.run(),
            Verb::Doctor(verb) => verb.run(),
        }
    }
}

fn main() -> ExitCode {
    match Cli::parse().verb.run() {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever closed the pipe has what they wanted.
        Err(error) if output::is_closed_stdout(&error) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(format_args!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
