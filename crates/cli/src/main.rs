//! The `sterna` command.
//!
//! Where the libraries meet: verbs parse their flags, [`model`] opens files and feeds the engine, [`runtime`]
//! says how a scheduler fills its steps and what an answer took, [`output`] writes results. Only this crate
//! chooses threads, backends and defaults.
#![forbid(unsafe_code)]

mod args;
mod batch;
mod chat;
mod conversion;
mod device;
#[cfg(all(feature = "gpu", target_os = "linux"))]
mod environment;
mod folders;
mod grammar;
mod interrupt;
mod key_file;
mod machine;
mod model;
mod multicall;
mod numbers;
mod output;
#[cfg(feature = "gpu")]
mod pipelines;
mod progress;
mod prompt;
mod pull;
mod runtime;
mod sampling;
mod serve;
mod size;
mod tensor_file;
mod trust;
#[cfg(feature = "gpu")]
mod tuning;
mod verbs;
mod worker;

use std::process::{self, ExitCode};

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Run low-bit language models
///
/// MODEL is a GGUF file (or the first of a split set), a folder with config.json and safetensors files, a
/// package (a folder with manifest.json), an engine bundle (a folder with qmodel.tensors), the address of a
/// package, of a GGUF file or of a Hugging Face repository (https://huggingface.co/OWNER/REPO), the name of a
/// model in the store, or `builtin`: the small story teller inside this program.
#[derive(Debug, Parser)]
#[command(name = "sterna", version)]
struct Cli {
    /// No notes, progress or timings; warnings and errors are still shown
    #[arg(short, long, global = true)]
    quiet: bool,

    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Run(Box<verbs::run::Run>),
    Inspect(verbs::inspect::Inspect),
    Tokenize(verbs::tokenize::Tokenize),
    Template(verbs::template::Template),
    Logits(verbs::logits::Logits),
    Embed(verbs::embed::Embed),
    Perplexity(verbs::perplexity::Perplexity),
    Bench(verbs::bench::Bench),
    Convert(verbs::convert::Convert),
    Verify(verbs::verify::Verify),
    Check(verbs::check::Check),
    Pull(verbs::pull::PullVerb),
    #[cfg(feature = "stores")]
    Push(verbs::push::Push),
    List(verbs::pull::List),
    Remove(verbs::pull::Remove),
    Cp(verbs::cp::Cp),
    Gc(verbs::pull::Gc),
    Diff(verbs::diff::Diff),
    #[cfg(feature = "gpu")]
    Diagnose(verbs::diagnose::Diagnose),
    Doctor(verbs::doctor::Doctor),
    Bundle(verbs::bundle::Bundle),
    Quantize(verbs::quantize::Quantize),
    Serve(Box<serve::Serve>),
    Sign(verbs::sign::Sign),
    Trust(verbs::trust::Trust),
    #[cfg(feature = "gpu")]
    Tune(verbs::tune::Tune),
    Worker(verbs::worker::Worker),
    Completions(verbs::completions::Completions),
    Man(verbs::man::Man),
}

impl Verb {
    /// Whether it looks for a GPU.
    #[cfg(all(feature = "gpu", target_os = "linux"))]
    fn may_open_gpu(&self) -> bool {
        matches!(
            self,
            Verb::Run(_)
                | Verb::Inspect(_)
                | Verb::Logits(_)
                | Verb::Embed(_)
                | Verb::Perplexity(_)
                | Verb::Bench(_)
                | Verb::Diagnose(_)
                | Verb::Doctor(_)
                | Verb::Tune(_)
        )
    }

    fn run(self) -> Result<()> {
        match self {
            Verb::Run(verb) => verb.run(),
            Verb::Inspect(verb) => verb.run(),
            Verb::Tokenize(verb) => verb.run(),
            Verb::Template(verb) => verb.run(),
            Verb::Logits(verb) => verb.run(),
            Verb::Embed(verb) => verb.run(),
            Verb::Perplexity(verb) => verb.run(),
            Verb::Bench(verb) => verb.run(),
            Verb::Convert(verb) => verb.run(),
            Verb::Verify(verb) => verb.run(),
            Verb::Check(verb) => verb.run(),
            Verb::Pull(verb) => verb.run(),
            #[cfg(feature = "stores")]
            Verb::Push(verb) => verb.run(),
            Verb::List(verb) => verb.run(),
            Verb::Remove(verb) => verb.run(),
            Verb::Cp(verb) => verb.run(),
            Verb::Gc(verb) => verb.run(),
            Verb::Diff(verb) => verb.run(),
            #[cfg(feature = "gpu")]
            Verb::Diagnose(verb) => verb.run(),
            Verb::Doctor(verb) => verb.run(),
            Verb::Bundle(verb) => verb.run(),
            Verb::Quantize(verb) => verb.run(),
            Verb::Serve(verb) => verb.run(),
            Verb::Sign(verb) => verb.run(),
            Verb::Trust(verb) => verb.run(),
            #[cfg(feature = "gpu")]
            Verb::Tune(verb) => verb.run(),
            Verb::Worker(verb) => verb.run(),
            Verb::Completions(verb) => verb.run(),
            Verb::Man(verb) => verb.run(),
        }
    }
}

/// All verbs and their flags.
fn command() -> clap::Command {
    // `-1` is a value of flags that take one, so that it is refused for what it is.
    fn with_negative_numbers(command: clap::Command) -> clap::Command {
        let takes_value = |arg: &clap::Arg| {
            arg.get_action().takes_values()
                && !arg.is_positional()
                && !arg.is_allow_hyphen_values_set()
        };
        command.mut_args(|arg| match takes_value(&arg) {
            true => arg.allow_negative_numbers(true),
            false => arg,
        })
    }
    let command = with_negative_numbers(Cli::command());
    command.mut_subcommands(|verb| {
        // `bench -t` takes several.
        let has_threads = verb.get_arguments().any(|arg| arg.get_id() == "threads");
        let verb = match has_threads && verb.get_name() != "bench" {
            true => verb.mut_arg("threads", |arg| arg.short('t')),
            false => verb,
        };
        // Flags of verbs that run a model, which `inspect` only describes.
        let verb = match verb.get_name() {
            "inspect" => verb.mut_args(|arg| {
                let is_for_running = ["threads", "activations", "weights", "lora"];
                let is_for_running = is_for_running.contains(&arg.get_id().as_str());
                arg.hide(is_for_running)
            }),
            _ => verb,
        };
        with_negative_numbers(verb)
    })
}

/// The command line of this process; prints what is wrong with it, or the help that it asks for, and exits.
fn parse() -> Cli {
    let parsed = command()
        .try_get_matches_from(multicall::args())
        .and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| {
        let text = error.to_string();
        // Arguments may be as long as names in files.
        if error.use_stderr() && output::shortened(&text) != text {
            output::reply(text);
            process::exit(error.exit_code());
        }
        error.exit()
    })
}

fn main() -> ExitCode {
    let Cli { quiet, verb } = parse();
    if quiet {
        output::be_quiet();
    }
    #[cfg(all(feature = "gpu", target_os = "linux"))]
    if verb.may_open_gpu() {
        environment::prepare();
    }
    match verb.run() {
        Ok(()) => ExitCode::SUCCESS,
        // The pipe's reader has all it wants.
        Err(error) if output::is_closed_stdout(&error) => ExitCode::SUCCESS,
        Err(_) if interrupt::is_ending() => ExitCode::from(interrupt::EXIT_CODE),
        Err(error) => {
            output::error(format_args!("{error:#}"));
            exit_code(&error)
        }
    }
}

/// The exit status of a program that failed with `error`.
fn exit_code(error: &anyhow::Error) -> ExitCode {
    if error.is::<worker::ProtocolError>() {
        // As for invalid arguments: the caller's mistake.
        ExitCode::from(2)
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }
}
