//! Models from elsewhere into this user's store, with progress and warnings on the terminal.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Result, anyhow, bail};
use sterna::native::BUILTIN;
use sterna_delivery::fetch::Limits;
#[cfg(feature = "p2p")]
use sterna_delivery::peers::PeerOptions;
use sterna_delivery::pull::{
    self, Event, IncomingPackage, PullError, PullOptions, Pulled, Warning,
};
use sterna_delivery::source::hugging_face::Hub;
use sterna_delivery::store::{Listed, Store, StoreError};
use sterna_format::rdrr::{MANIFEST_FILE, Package};

use crate::interrupt::Transfer;
use crate::output::Bytes;
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
    if model.is_none() {
        let unreadable = store.unreadable()?;
        if let Some((name, problem)) = unreadable.iter().find(|(lost, _)| lost == name) {
            bail!(
                "{name}: where it came from isn't known, its index is damaged: {problem}; {}",
                mending(name, false)
            );
        }
    }
    Ok(model.map(|model| model.entry.source))
}

/// The one of `models` that is meant by where it came from, its source being as `is_source` says: the one with this
/// `name`, or else the only one. Of several others, which are copies, none is.
pub(crate) fn of_source<'a>(
    models: &'a [Listed],
    name: &str,
    is_source: impl Fn(&str) -> bool,
) -> Option<&'a Listed> {
    let mut from = models.iter().filter(|model| is_source(&model.entry.source));
    let named = from.clone().find(|model| model.name == name);
    named.or_else(|| from.next().filter(|_| from.next().is_none()))
}

/// The commands that mend the damaged model `name`, or are done with it.
pub(crate) fn mending(name: &str, has_origin: bool) -> String {
    let source = if has_origin { "" } else { "SOURCE " };
    format!(
        "`sterna pull {source}{name}` fetches what is wrong again, `sterna remove {name}` removes it"
    )
}

/// An error of the store, with the command that mends the model it is about.
pub(crate) fn with_mending(error: StoreError) -> anyhow::Error {
    match error {
        StoreError::Damaged {
            name,
            file,
            problem,
        } => anyhow!("{name}: {file}: {problem}; {}", mending(&name, true)),
        StoreError::DamagedIndex {
            name,
            origin,
            source,
        } => anyhow!(
            "{name}: its index is damaged: {:#}; {}",
            anyhow::Error::from(*source),
            mending(&name, origin.is_some())
        ),
        error => error.into(),
    }
}

/// Names that no model in the store may have.
fn taken() -> Vec<String> {
    vec![BUILTIN.to_owned()]
}

/// Whether no model in the store may be called `name`.
pub(crate) fn is_taken(name: &str) -> bool {
    taken().iter().any(|taken| taken.eq_ignore_ascii_case(name))
}

/// Begins the source of packages that were made on this machine; their model's path and state come after.
pub(crate) const CONVERTED: &str = "convert:";

/// The path of the model that a package with this `source` was made from on this machine.
pub(crate) fn made_from(source: &str) -> Option<&str> {
    let (path, _state) = source.strip_prefix(CONVERTED)?.rsplit_once('#')?;
    Some(path)
}

/// What a model with this `source` came from, in words.
pub(crate) fn origin_in_words(source: &str) -> String {
    match made_from(source) {
        Some(path) => format!("converted from {path}"),
        None => format!("from {source}"),
    }
}

/// A name like `name` that no model in the store has.
pub(crate) fn free_name(name: &str) -> String {
    let models = store().and_then(|store| Ok(store.list()?));
    // What can't be listed doesn't hinder advice.
    let models = models.unwrap_or_default();
    let is_free = |name: &String| {
        let is_it = |model: &Listed| model.name.eq_ignore_ascii_case(name);
        !models.iter().any(is_it)
    };
    let mut names = (2_u32..).map(|n| format!("{name}-{n}"));
    names.find(is_free).expect("numbers outnumber models")
}

/// Fetches the model at `address` into `store`; shows how far it is.
pub(crate) fn pull(store: &Store, address: &str, mut options: PullOptions) -> Result<Pulled> {
    options.taken = taken();
    let shown = Shown::default();
    let pulled = pull::pull(store, address, &options, &trust::list()?, &|event| {
        shown.event(event);
    });
    drop(shown);
    pulled.map_err(|error| {
        let error = with_advice(error);
        match kept(store, address, &options) {
            Some(n_bytes) => anyhow!(
                "{error:#}\nwhat has arrived is kept ({}): the same command goes on with it, \
                 `sterna gc --interrupted` deletes it",
                Bytes(n_bytes)
            ),
            None => error,
        }
    })
}

/// Bytes that a pull which failed leaves for the next.
fn kept(store: &Store, address: &str, options: &PullOptions) -> Option<u64> {
    let (_, name) = pull::source_and_name(address, options).ok()?;
    let key = name.to_ascii_lowercase();
    let mut interrupted = store.interrupted().ok()?.into_iter();
    interrupted.find(|(name, _)| *name == key).map(|(_, n)| n)
}

/// Begins to fetch the model at `address` into `store`, under `name` if one is given. Those who wait for the
/// files of a package show their progress.
pub(crate) fn begin(
    store: Store,
    address: &str,
    name: Option<&str>,
    limits: Limits,
) -> Result<Arc<IncomingPackage>> {
    let transfer = Transfer::begin()?;
    let options = PullOptions {
        name: name.map(str::to_owned),
        limits,
        cancel: transfer.cancel(),
        hub: Some(Hub::from_env()?),
        taken: taken(),
        #[cfg(feature = "p2p")]
        peers: peers(false, Vec::new())?,
        ..PullOptions::default()
    };
    let shown = Shown::default();
    let notify = move |event: Event<'_>| {
        // Ends with the thread that fetches.
        let _ = &transfer;
        shown.event_of_incoming(event);
    };
    let address = address.to_owned();
    Ok(IncomingPackage::begin(
        store,
        address,
        options,
        trust::list()?,
        notify,
    ))
}

/// How peers are found and reached: on the local network if `find_local`, and by these relays.
#[cfg(feature = "p2p")]
pub(crate) fn peers(find_local: bool, relays: Vec<String>) -> Result<PeerOptions> {
    Ok(PeerOptions {
        find_local,
        relays,
        liars: Some(folders::liars()?),
    })
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
    let advice = match &error {
        PullError::NameInUse {
            address,
            name,
            existing,
        } => {
            let (origin, free) = (origin_in_words(existing), free_name(name));
            return anyhow!(
                "{address}: the store has another model called `{name}`, {origin}; `sterna pull {address} {free}` \
                 fetches this one as `{free}`, `sterna pull {address} {name} --replace` in its place"
            );
        }
        PullError::NameTaken { address, name } => {
            let free = free_name(name);
            return anyhow!(
                "{address}: `{name}` stands for another model; `sterna pull {address} {free}` fetches this one as \
                 `{free}`"
            );
        }
        PullError::NoManifest { from } if Path::new(from).is_dir() => format!(
            "; if it is a model's folder, it runs as it is, and `sterna convert {from} OUT` makes a package of it"
        ),
        error => (error.signature_error().map(trust::advice))
            .unwrap_or_default()
            .to_owned(),
    };
    match advice.as_str() {
        "" => error.into(),
        advice => anyhow!("{:#}{advice}", anyhow::Error::from(error)),
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
    let is_warning = matches!(
        warning,
        Warning::NotUsed { .. }
            | Warning::GivenUp { .. }
            | Warning::Unverified { .. }
            | Warning::NoDeltas { .. }
            | Warning::DeltaNotUsed { .. }
            | Warning::Liar { .. }
            | Warning::Forgotten { .. }
    );
    let advice = match warning {
        Warning::NotUsed { reason, .. } => reason.signature_error().map(trust::advice),
        _ => None,
    };
    let advice = advice.unwrap_or_default();
    output::remark(is_warning, format_args!("{warning}{advice}"));
}
