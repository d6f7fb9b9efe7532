//! `sterna pull`, `list` and `remove`: models in the store.

use std::env;
use std::num::NonZero;
use std::path::Path;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use sterna::native::BUILTIN;
use sterna_delivery::fetch::Limits;
use sterna_delivery::package::SignatureState;
use sterna_delivery::pull::{PullOptions, Pulled};
use sterna_delivery::source::hugging_face::Hub;
use sterna_delivery::store::{Interrupted, Swept};

use crate::interrupt::Transfer;
use crate::output::{self, Bytes};
use crate::size::n_bytes;
use crate::{model, pull, trust};

/// Fetch a model into the store
///
/// SOURCE is the URL of a package (the folder with its manifest.json), of a Hugging Face repository or of a
/// GGUF file, a folder, or the name of a model in the store, which is fetched from where it came: what changed
/// there, and what was damaged here. Every byte of packages and repositories is verified before it is kept; a
/// pull that failed or was interrupted goes on where it was when it is given again; what models in the store
/// have in common with this one is not fetched again, and groups that changed come as deltas where there are. HF_TOKEN and HF_ENDPOINT are understood.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sterna pull https://example.org/tiny-rdrr tiny
  sterna pull https://huggingface.co/OWNER/REPO-GGUF --file Q4_K_M
  sterna pull https://example.org/model-Q4_0.gguf
  sterna pull https://example.org/tiny-rdrr --peers")]
pub(crate) struct PullVerb {
    /// Where to fetch the model from
    #[arg(value_name = "SOURCE")]
    source: String,

    /// Name in the store [default: the last part of the address]
    #[arg(value_name = "NAME")]
    name: Option<String>,

    /// Take the place of a model of that name from elsewhere
    #[arg(long)]
    replace: bool,

    /// Another place where the same package is; may be given several times
    #[arg(long, value_name = "SOURCE")]
    mirror: Vec<String>,

    /// Ask the local network as well who has the package; what peers send counts only by the hashes of its manifest
    #[cfg(feature = "p2p")]
    #[arg(long)]
    peers: bool,

    /// Relay at which any peer may be reached, besides those of their addresses; may be given several times
    #[cfg(feature = "p2p")]
    #[arg(long, value_name = "URL")]
    relay: Vec<String>,

    /// Which model of a repository: a file name, or a part of a GGUF file name
    #[arg(long, value_name = "FILE")]
    file: Option<String>,

    /// Maximum bytes per second, such as 20MiB
    #[arg(long, value_name = "SIZE", value_parser = n_bytes)]
    rate: Option<NonZero<u64>>,

    /// Maximum parallel requests
    #[arg(long, value_name = "N", default_value = "4")]
    parallel: NonZero<u8>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl PullVerb {
    pub(crate) fn run(self) -> Result<()> {
        let limits = Limits {
            parallel: self.parallel.get().into(),
            bytes_per_second: self.rate.map(NonZero::get),
            seed: std::process::id().into(),
            ..Limits::default()
        };
        let store = pull::store()?;
        let origin = pull::origin(&store, &self.source)?;
        if let Some(made_from) = origin.as_deref().and_then(pull::made_from) {
            bail!(
                "{}: made on this machine, from {made_from}; `sterna serve {made_from}` makes it again",
                self.source
            );
        }
        if origin.is_none() && !model::is_address(&self.source) && !Path::new(&self.source).exists()
        {
            match self.source.as_str() {
                BUILTIN => bail!(
                    "{BUILTIN}: expected a model from elsewhere, found the one inside this program, which needs no pull"
                ),
                source => bail!(model::absent(source)),
            }
        }
        let (source, name) = match origin {
            Some(origin) => (origin, self.name.or(Some(self.source))),
            None => (self.source, self.name),
        };
        let transfer = Transfer::begin()?;
        let options = PullOptions {
            cancel: transfer.cancel(),
            mirrors: self.mirror,
            name,
            file: self.file,
            replace: self.replace,
            limits,
            hub: Some(Hub::from_env()?),
            #[cfg(feature = "p2p")]
            peers: pull::peers(self.peers, self.relay)?,
            ..PullOptions::default()
        };
        let pulled = pull::pull(&store, &source, options)?;
        if self.json {
            return output::json(&Report::of(&pulled));
        }
        let mut parts = vec![format!("{} fetched", Bytes(pulled.received))];
        if pulled.copied > 0 {
            parts.push(format!("{} taken from models here", Bytes(pulled.copied)));
        }
        if pulled.made > 0 {
            parts.push(format!(
                "{} made of models here by {} of deltas",
                Bytes(pulled.made),
                Bytes(pulled.deltas)
            ));
        }
        if let Some(signer) = &pulled.signer {
            parts.push(format!("signed by {signer}"));
        }
        output::line(format_args!(
            "{}: {}, {}",
            pulled.name,
            Bytes(pulled.size),
            parts.join(", ")
        ))?;
        if pulled.received_by.len() > 1 {
            for (source, n_bytes) in &pulled.received_by {
                output::line(format_args!("{:>10} from {source}", Bytes(*n_bytes)))?;
            }
        }
        Ok(())
    }
}

/// The result of a pull, for programs.
#[derive(Serialize)]
struct Report<'a> {
    name: &'a str,
    source: &'a str,
    size: u64,
    received: u64,
    received_by: &'a [(String, u64)],
    copied: u64,
    made: u64,
    deltas: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    signer: Option<&'a str>,
    dropped: &'a [(String, String)],
}

impl Report<'_> {
    fn of(pulled: &Pulled) -> Report<'_> {
        Report {
            name: &pulled.name,
            source: &pulled.source,
            size: pulled.size,
            received: pulled.received,
            received_by: &pulled.received_by,
            copied: pulled.copied,
            made: pulled.made,
            deltas: pulled.deltas,
            signer: pulled.signer.as_deref(),
            dropped: &pulled.dropped,
        }
    }
}

/// List the models in the store: size, origin, whose signature they bear, and whether they are damaged
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  sterna list --json")]
pub(crate) struct List {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    name: String,
    /// Bytes of all its files, if they are known.
    size: Option<u64>,
    /// Bytes that no other model has.
    own: Option<u64>,
    source: Option<String>,
    /// The name of the key it is signed with, if that is trusted now.
    signer: Option<String>,
    /// The state of the signature: `none`, `trusted`, `unknown_key` or `wrong`.
    signature: &'static str,
    /// What is wrong with its index or the sizes of its files, if anything is.
    damage: Option<String>,
    #[serde(skip)]
    state: SignatureState,
}

impl Row {
    /// What stands behind the name, for people.
    fn text(&self) -> String {
        let mut parts = Vec::new();
        if let (Some(size), Some(own)) = (self.size, self.own) {
            let shared = match size - own {
                0 => String::new(),
                shared => format!(" ({} shared)", Bytes(shared)),
            };
            parts.push(format!("{:>10}{shared}", Bytes(size)));
        }
        parts.extend(
            self.source
                .as_deref()
                .map(|source| match pull::made_from(source) {
                    Some(path) => format!("converted from {}", from_here(path)),
                    None => from_here(source).to_owned(),
                }),
        );
        match &self.damage {
            Some(problem) => parts.push(format!(
                "damaged: {problem}; {}",
                pull::mending(&self.name, self.source.is_some())
            )),
            None => parts.extend(described(&self.state)),
        }
        parts.join("  ")
    }
}

impl List {
    pub(crate) fn run(self) -> Result<()> {
        let store = pull::store()?;
        let trusted = trust::list()?;
        let mut rows: Vec<Row> = (store.list()?.into_iter())
            .map(|model| {
                let state = SignatureState::of(&store, &trusted, &model.name, &model.entry);
                Row {
                    size: Some(model.entry.size()),
                    name: model.name,
                    own: Some(model.own_bytes),
                    source: Some(model.entry.source),
                    signer: state.signer().map(str::to_owned),
                    signature: word(&state),
                    damage: model.damage,
                    state,
                }
            })
            .collect();
        let unreadable = store.unreadable()?.into_iter();
        rows.extend(unreadable.map(|(name, problem)| Row {
            name,
            size: None,
            own: None,
            source: None,
            signer: None,
            signature: word(&SignatureState::NoPackage),
            damage: Some(problem),
            state: SignatureState::NoPackage,
        }));
        rows.sort_by_cached_key(|row| row.name.to_lowercase());
        if self.json {
            return output::json(&rows);
        }
        for (name, n_bytes) in store.interrupted()? {
            output::note(format_args!(
                "note: an interrupted pull of `{name}` left {}; the same pull resumes it, \
                 `sterna gc --interrupted` deletes it",
                Bytes(n_bytes)
            ));
        }
        if rows.is_empty() {
            output::note("no models; sterna pull SOURCE fetches one");
            return Ok(());
        }
        let texts: Vec<(&str, String)> = (rows.iter())
            .map(|row| (row.name.as_str(), row.text()))
            .collect();
        output::line(output::table(&texts))
    }
}

/// The state of a signature, in one word for programs.
fn word(state: &SignatureState) -> &'static str {
    match state {
        SignatureState::NoPackage | SignatureState::Unsigned => "none",
        SignatureState::Signed(_) => "trusted",
        SignatureState::Refused(refusal) if refusal.is_unknown_key() => "unknown_key",
        SignatureState::Refused(_) => "wrong",
    }
}

/// The same for people; `None` where nothing can be signed.
fn described(state: &SignatureState) -> Option<String> {
    Some(match state {
        SignatureState::NoPackage => return None,
        SignatureState::Unsigned => "not signed".to_owned(),
        SignatureState::Signed(name) => format!("signed by {name}"),
        SignatureState::Refused(refusal) if refusal.is_unknown_key() => {
            "signed by an unknown key".to_owned()
        }
        SignatureState::Refused(_) => "its signature does not fit".to_owned(),
    })
}

/// A path relative to the current folder, if it is inside; any other unchanged.
fn from_here(source: &str) -> &str {
    let here = env::current_dir();
    let below = here
        .ok()
        .and_then(|here| Path::new(source).strip_prefix(here).ok());
    let below = below.and_then(Path::to_str).filter(|path| !path.is_empty());
    below.unwrap_or(source)
}

/// Remove a model from the store, and the bytes that no other has
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  sterna remove tiny")]
pub(crate) struct Remove {
    /// Name of the model, as `sterna list` shows it
    #[arg(value_name = "NAME")]
    name: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What was deleted, for programs.
#[derive(Serialize)]
struct Freed<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    freed_bytes: u64,
}

impl Remove {
    pub(crate) fn run(self) -> Result<()> {
        let swept = pull::store()?.remove(&self.name)?;
        tell_damaged(&swept);
        if self.json {
            return output::json(&Freed {
                name: Some(&self.name),
                freed_bytes: swept.bytes,
            });
        }
        output::line(format_args!(
            "{}: removed, {} freed",
            self.name,
            Bytes(swept.bytes)
        ))
    }
}

/// Names the models for whose sake nothing was deleted.
fn tell_damaged(swept: &Swept) {
    for name in &swept.damaged {
        output::warning(format_args!(
            "no files of models were deleted: the index of `{name}` is damaged, and any may be its; {}",
            pull::mending(name, false)
        ));
    }
}

/// The first of `paths`, and how many more there are.
fn shortened(paths: &[String]) -> String {
    const SHOWN: usize = 6;
    let shown = paths[..paths.len().min(SHOWN)].join(", ");
    match paths.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Delete what no model in the store needs
///
/// Files that nothing here made are left alone, and so is what a damaged model may need.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  sterna gc --interrupted")]
pub(crate) struct Gc {
    /// Also delete what interrupted pulls left, which a later one could resume
    #[arg(long)]
    interrupted: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Gc {
    pub(crate) fn run(self) -> Result<()> {
        let interrupted = match self.interrupted {
            true => Interrupted::Drop,
            false => Interrupted::Keep,
        };
        let swept = pull::store()?.gc(interrupted)?;
        tell_damaged(&swept);
        if !swept.unknown.is_empty() {
            let paths: Vec<_> = (swept.unknown.iter())
                .map(|path| path.display().to_string())
                .collect();
            output::note(format_args!(
                "note: left alone, since nothing here made it: {}",
                shortened(&paths)
            ));
        }
        if self.json {
            return output::json(&Freed {
                name: None,
                freed_bytes: swept.bytes,
            });
        }
        output::line(format_args!("{} freed", Bytes(swept.bytes)))
    }
}
