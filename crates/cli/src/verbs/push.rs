//! `sterna push`: packages to registries and object stores.

use std::num::NonZero;
use std::sync::Mutex;

use anyhow::{Result, anyhow, bail};
use clap::Args;
use serde::Serialize;
use sterna_delivery::package::PackageError;
use sterna_delivery::push::{self, Event, PackageFiles, PushError, PushOptions, Pushed};
use sterna_format::rdrr::MANIFEST_FILE;

use crate::folders;
use crate::interrupt::Transfer;
use crate::model::PackagePlace;
use crate::output::{self, Bytes};
use crate::progress::Progress;
use crate::trust;

/// Send a package to a registry or an object store
///
/// TARGET is a repository of a registry, oci://HOST/REPOSITORY[:TAG], or a folder of an object store, s3://, gs:// or
/// az://BUCKET/FOLDER; `sterna pull TARGET` fetches it. Files that are there already, of other versions too, are not
/// sent again, and the package becomes visible when all of it is there; a push that failed or was interrupted goes
/// on where it was when it is given again. Registries are asked with what `docker login` keeps, and without
/// encryption only on this machine or as oci+http://; object stores with the variables of the environment that
/// their own tools read, such as AWS_ACCESS_KEY_ID, AWS_REGION and AWS_ENDPOINT_URL.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sterna push tiny-rdrr oci://ghcr.io/me/tiny:v1
  sterna push tiny s3://models/tiny")]
pub(crate) struct Push {
    /// Folder of a package, or the name of one in the store
    #[arg(value_name = "PACKAGE")]
    package: String,

    /// Where to send it
    #[arg(value_name = "TARGET")]
    target: String,

    /// Maximum parallel files
    #[arg(long, value_name = "N", default_value = "4")]
    parallel: NonZero<u8>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

impl Push {
    pub(crate) fn run(self) -> Result<()> {
        push::check_target(&self.target)?;
        let files = match PackagePlace::find(&self.package)? {
            PackagePlace::Folder(path) => PackageFiles::folder(path),
            PackagePlace::Stored(model) => {
                if !model.paths().contains_key(MANIFEST_FILE) {
                    let name = &self.package;
                    bail!(
                        "{name}: expected a package, found another kind of model; `sterna convert {name} FOLDER` \
                         makes a package of it"
                    );
                }
                PackageFiles::stored(&model)
            }
        };
        let pushed = push(&files, &self.target, self.parallel)?;
        if self.json {
            return output::json(&Report::of(&pushed));
        }
        output::line(in_words(&pushed))
    }
}

/// Sends a package, and shows how far that is.
pub(crate) fn push(files: &PackageFiles, target: &str, parallel: NonZero<u8>) -> Result<Pushed> {
    let transfer = Transfer::begin_push()?;
    let options = PushOptions {
        parallel: parallel.get().into(),
        cancel: transfer.cancel(),
        trust: trust::list()?,
        uploads: Some(folders::uploads()?),
        ..PushOptions::default()
    };
    let shown = Mutex::new(Shown::default());
    let pushed = push::push(files, target, &options, &|event| {
        let mut shown = shown.lock().unwrap_or_else(|shown| shown.into_inner());
        shown.event(event);
    });
    drop(shown);
    pushed.map_err(with_advice)
}

/// What was done, for people.
pub(crate) fn in_words(pushed: &Pushed) -> String {
    let rest = pushed.size - pushed.sent;
    let mut parts = vec![format!("{} sent", Bytes(pushed.sent))];
    if rest > 0 {
        parts.push(format!("{} was there", Bytes(rest)));
    }
    if let Some(before) = pushed.replaced {
        parts.push(format!("in the place of sha256:{before}"));
    }
    format!(
        "{}: sha256:{}, {}, {}",
        pushed.target,
        pushed.digest,
        Bytes(pushed.size),
        parts.join(", ")
    )
}

fn with_advice(error: PushError) -> anyhow::Error {
    let advice = match &error {
        PushError::Package(PackageError::Signature { problem, .. }) => trust::advice(problem),
        PushError::Cancelled => "; the same command sends the rest",
        PushError::Damaged { .. } => "; nothing that refers to it was sent",
        _ => "",
    };
    match advice {
        "" => error.into(),
        advice => anyhow!("{:#}{advice}", anyhow::Error::from(error)),
    }
}

/// The bars of a push.
#[derive(Default)]
struct Shown {
    bar: Option<(&'static str, Progress)>,
    done: u64,
}

impl Shown {
    fn event(&mut self, event: Event) {
        let (what, done, total) = match event {
            Event::Checked { done, total } => ("checking", done, total),
            Event::Progress { done, total } => ("sending", done, total),
            _ => return,
        };
        if self.bar.as_ref().is_none_or(|(shown, _)| *shown != what) {
            self.bar = Some((what, Progress::bytes(what, total)));
            self.done = 0;
        }
        if let Some((_, bar)) = &self.bar {
            bar.add(done.saturating_sub(self.done));
            self.done = self.done.max(done);
        }
    }
}

/// The result of a push, for programs.
#[derive(Serialize)]
pub(crate) struct Report {
    target: String,
    digest: String,
    size: u64,
    sent: u64,
    n_files: usize,
    n_sent: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    replaced: Option<String>,
}

impl Report {
    pub(crate) fn of(pushed: &Pushed) -> Report {
        Report {
            target: pushed.target.clone(),
            digest: format!("sha256:{}", pushed.digest),
            size: pushed.size,
            sent: pushed.sent,
            n_files: pushed.n_files,
            n_sent: pushed.n_sent,
            replaced: pushed.replaced.map(|digest| format!("sha256:{digest}")),
        }
    }
}
