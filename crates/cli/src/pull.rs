//! Models from elsewhere into this user's store, with progress and warnings on the terminal.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Result;
use sterna_delivery::fetch::Limits;
use sterna_delivery::pull::{
    self, Event, IncomingPackage, PullError, PullOptions, Pulled, Warning,
};
use sterna_delivery::source::hugging_face::Hub;
use sterna_delivery::store::Store;
use sterna_format::rdrr::{MANIFEST_FILE, Package};

use crate::progress::Progress;
use crate::{folders, output, trust};

/// The store of this user.
pub(crate) fn store() -> Result<Store> {
    Ok(Store::open(folders::data()?)?)
}

/// The origin of the model called `name`, if there is one in the store and nothing else of that name.
pub(crate) fn origin(store: &Store, name: &str) -> Result<Option<String>> {
    if name.contains(['/', '\\']) || Path::new(name).exists() {
        return Ok(None);
    }
    let model = store.list()?.into_iter().find(|model| model.name == name);
    Ok(model.map(|model| model.entry.source))
}

/// Fetches the model at `address` into `store`; shows its progress.
pub(crate) fn pull(store: &Store, address: &str, options: &PullOptions) -> Result<Pulled> {
    let shown = Shown::default();
    let pulled = pull::pull(store, address, options, &trust::list()?, &|event| {
        shown.event(event);
    });
    pulled.map_err(with_advice)
}

/// Begins to fetch the model at `address` into `store`, under `name` if one is given. Those who wait for the
/// files of a package show their progress.
pub(crate) fn begin(
    store: Store,
    address: &str,
    name: Option<&str>,
    limits: Limits,
) -> Result<Arc<IncomingPackage>> {
    let options = PullOptions {
        name: name.map(str::to_owned),
        limits,
        hub: Some(Hub::from_env()?),
        ..PullOptions::default()
    };
    let shown = Shown::default();
    let notify = move |event: Event<'_>| shown.event_of_incoming(event);
    let address = address.to_owned();
    Ok(IncomingPackage::begin(
        store,
        address,
        options,
        trust::list()?,
        notify,
    ))
}

/// The package at `address` as it is described there: its manifest, and where its tensors are.
pub(crate) fn read_remote_package(address: &str) -> Result<Package> {
    let shown = Shown::default();
    let package = pull::read_remote_package(address, &trust::list()?, &|event| {
        shown.event(event);
    });
    package.map_err(with_advice)
}

/// The error, with what the user can do about it.
pub(crate) fn with_advice(error: PullError) -> anyhow::Error {
    match error.signature_error().map(trust::advice) {
        Some(advice) if !advice.is_empty() => {
            anyhow::anyhow!("{:#}{advice}", anyhow::Error::from(error))
        }
        _ => error.into(),
    }
}

/// The terminal state of a pull.
#[derive(Default)]
struct Shown(Mutex<Bar>);

#[derive(Default)]
struct Bar {
    bar: Option<Progress>,
    done_bytes: u64,
    /// True once a package is known to be arriving.
    is_package: bool,
}

impl Shown {
    fn event(&self, event: Event<'_>) {
        let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Warning(warning) => {
                // On a separate line, not after the bar.
                shown.bar = None;
                note(&warning);
            }
            Event::Progress(so_far) => {
                let done = so_far.done_bytes.saturating_sub(shown.done_bytes);
                shown.done_bytes += done;
                let bar = shown
                    .bar
                    .get_or_insert_with(|| Progress::bytes("fetching", so_far.total_bytes));
                bar.add(done);
            }
            _ => {}
        }
    }

    /// As [`Self::event`], without progress for packages.
    fn event_of_incoming(&self, event: Event<'_>) {
        let is_package = {
            let mut shown = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            shown.is_package |=
                matches!(&event, Event::Listed(files) if files.contains_key(MANIFEST_FILE));
            shown.is_package
        };
        if !(is_package && matches!(event, Event::Progress(_))) {
            self.event(event);
        }
    }
}

fn note(warning: &Warning) {
    let is_warning = matches!(warning, Warning::NotUsed { .. } | Warning::GivenUp { .. });
    let advice = match warning {
        Warning::NotUsed { reason, .. } => reason.signature_error().map(trust::advice),
        _ => None,
    };
    let advice = advice.unwrap_or_default();
    output::remark(is_warning, format_args!("{warning}{advice}"));
}
