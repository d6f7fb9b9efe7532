//! Models as verbs name them: found, opened, loaded under a progress bar, and what is odd about them told.

use std::ffi::OsStr;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use sterna::native::{
    self, BUILTIN, Device, ExpertsInMemory, FileSet, IncomingFiles, LoadFrom, LocalFolder,
    LocalModel, Located, StoredFiles, Weights, builtin,
};
use sterna::receipt::{self, Setup};
use sterna::swap::{Revisions, SwappedGroup};
use sterna::{Adapted, AdapterFiles, ModelEntry, Signatures, Warning};
use sterna_delivery::fetch::Limits;
use sterna_delivery::hash::Digest;
use sterna_delivery::pull::{PullError, PullOptions, source_and_name};
use sterna_delivery::store::{self, StoreError, portable_name};
use sterna_engine::plan::{HeadOptions, HeadScreen, PlanOptions};
use sterna_engine::{Backend, Model, ModelPlan, Session};
use sterna_format::hf::GenerationConfig;
use sterna_format::rdrr::MANIFEST_FILE;

use crate::args::{EngineFlags, LoraFlag, ModelFlags, WeightsFlag, isa};
use crate::machine::{self, Machine};
use crate::progress::Progress;
use crate::{output, pull, trust};

/// Fails if `name` stands for nothing on this machine; an address is not looked up.
pub(crate) fn expect(name: &str) -> Result<()> {
    match name.contains("://") {
        true => Ok(()),
        false => find(name).map(drop),
    }
}

/// Opens what `name` stands for: a path, an address, a name in the store, or the built-in model.
pub(crate) fn open(name: &str) -> Result<LocalModel> {
    open_with(name, None)
}

/// The same; `config` is the `config.json` of a model whose files have none.
pub(crate) fn open_with(name: &str, config: Option<Value>) -> Result<LocalModel> {
    let signatures: Arc<dyn Signatures> = Arc::new(Trusted);
    LocalModel::open(name, find(name)?, config, Some(signatures)).map_err(with_advice)
}

/// Lets packages in by the trust list of this user.
struct Trusted;

impl Signatures for Trusted {
    fn check(&self, name: &str, manifest: &[u8], signature: &str) -> sterna::Result<()> {
        trust::check_signature(name, manifest, Some(signature))
            .map(drop)
            .map_err(|error| sterna::Error::new(sterna::ErrorCode::Untrusted, format!("{error:#}")))
    }
}

/// Finds what `model` names.
fn find(model: &str) -> Result<Located> {
    if model.is_empty() {
        bail!("expected a model, found an empty name");
    }
    if model == BUILTIN {
        return Ok(builtin());
    }
    let path = Path::new(model);
    if !path.exists() && near_address(model).is_some() {
        bail!(absent(model));
    }
    if model.contains("://") {
        return fetched(model);
    }
    // A name of the store can't look like a path in a folder.
    if !path.exists() && !model.contains(['/', '\\']) {
        let stored = in_store(model)?.with_context(|| absent(model))?;
        return Ok(Located::stored(stored)?);
    }
    Ok(Located::at(path)?)
}

/// Where a package is.
pub(crate) enum PackagePlace {
    /// In a folder.
    Folder(PathBuf),
    /// In the store.
    Stored(Arc<store::Model>),
}

impl PackagePlace {
    /// That of `name`: a path, or a name in the store.
    pub(crate) fn find(name: &str) -> Result<PackagePlace> {
        match name {
            BUILTIN => bail!(
                "{BUILTIN}: expected a package, found the model inside this program; \
                 `sterna convert {BUILTIN} FOLDER` makes a package of it"
            ),
            "" => bail!("expected a package, found an empty name"),
            _ => {}
        }
        let path = Path::new(name);
        if path.exists() {
            return Ok(PackagePlace::Folder(path.to_owned()));
        }
        let model = in_store(name)?.with_context(|| absent(name))?;
        Ok(PackagePlace::Stored(Arc::new(model)))
    }

    /// Its files.
    pub(crate) fn files(&self) -> Box<dyn FileSet> {
        match self {
            PackagePlace::Folder(path) => Box::new(LocalFolder::new(path)),
            PackagePlace::Stored(model) => Box::new(StoredFiles::new(Arc::clone(model))),
        }
    }
}

/// The model called `name` in the store, if there is one.
fn in_store(name: &str) -> Result<Option<store::Model>> {
    let store = pull::store()?;
    match store.model(name) {
        Ok(model) => Ok(Some(model)),
        Err(StoreError::NoSuchModel { .. } | StoreError::Name { .. }) => Ok(None),
        Err(error) => Err(pull::with_mending(error)),
    }
}

/// Whether `name` is an address, and neither a path nor a name in the store.
pub(crate) fn is_address(name: &str) -> bool {
    name.contains("://") && !name.starts_with(HUB)
}

/// What repositories of Hugging Face are often written with, and begins no address.
const HUB: &str = "hf:";

/// What to say of a name that means nothing here: what it may have been meant as.
pub(crate) fn absent(name: &str) -> String {
    if is_address(name) {
        return format!(
            "{name}: expected a path or the name of a model in the store, found an address; \
             `sterna pull {name}` fetches it"
        );
    }
    if let Some(address) = near_address(name) {
        return format!("{name}: no such file or folder; if an address was meant, it is {address}");
    }
    match name.contains(['/', '\\']) {
        true => format!("{name}: no such file or folder"),
        false => unknown(name),
    }
}

/// The address that `name` is, but for its beginning.
fn near_address(name: &str) -> Option<String> {
    let hub = name.strip_prefix(HUB).map(|id| id.trim_matches('/'));
    let (first, rest) = hub.unwrap_or(name).split_once('/')?;
    let is_repository = hub.is_some()
        || (portable_name(first) == first
            && portable_name(rest) == rest
            && !first.contains('.')
            && Path::new(rest)
                .extension()
                .is_none_or(|end| !is_of_model(end)));
    if is_repository {
        return Some(format!("https://huggingface.co/{first}/{rest}"));
    }
    let (host, port) = first.split_once(':').unwrap_or((first, "80"));
    let is_host = (host.contains('.') || host == "localhost" || first != host)
        && !host.starts_with('.')
        && portable_name(host) == host
        && port.parse::<u16>().is_ok();
    is_host.then(|| format!("https://{name}"))
}

/// Whether files with this extension are models, or parts of them.
fn is_of_model(extension: &OsStr) -> bool {
    let extensions = ["gguf", "safetensors", "json"];
    (extensions.iter()).any(|known| extension.eq_ignore_ascii_case(known))
}

/// What to say of a name that no model has: which ones have names.
fn unknown(name: &str) -> String {
    const SHOWN: usize = 5;
    let models = pull::store().and_then(|store| Ok(store.list()?));
    // What can't be listed can't be suggested; whoever asks for it is told why.
    let mut names: Vec<String> = models.map_or(Vec::new(), |models| {
        models.into_iter().map(|model| model.name).collect()
    });
    names.sort_by_cached_key(|known| (distance(name, known), known.clone()));
    let has = match names.len() {
        0 => "which is empty (`sterna pull SOURCE` fetches a model)".to_owned(),
        n if n > SHOWN => format!(
            "which has {} and {} more",
            names[..SHOWN].join(", "),
            n - SHOWN
        ),
        _ => format!("which has {}", names.join(", ")),
    };
    format!("{name}: no such file or folder, and no model of that name in the store, {has}")
}

/// Letters to be put in, taken out or exchanged to make `b` of `a`, whatever their case.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let exchanged = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = exchanged.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The error, with what the user can do about a package that is being fetched and not let in.
fn with_advice(error: sterna::Error) -> anyhow::Error {
    let refusal = error
        .find::<PullError>()
        .and_then(PullError::signature_error);
    match refusal
        .map(trust::advice)
        .filter(|advice| !advice.is_empty())
    {
        Some(advice) => anyhow::anyhow!("{error:#}{advice}"),
        None => error.into(),
    }
}

/// The model at an address, as it is there now: a package while it is fetched, others once they are in
/// the store. One that can't be reached is taken as it was last.
fn fetched(address: &str) -> Result<Located> {
    let store = pull::store()?;
    let (meant, default) = source_and_name(address, &PullOptions::default())?;
    let is_source = |source: &str| source == meant;
    let known = store.list()?;
    let copies = copies(&known, is_source);
    let known = pull::of_source(&known, &default, is_source);
    let name = known.map(|model| model.name.as_str());
    let limits = Limits {
        seed: std::process::id().into(),
        // What is here already isn't waited for.
        retries: if known.is_some() {
            1
        } else {
            Limits::default().retries
        },
        ..Limits::default()
    };
    let arrival = pull::begin(store.clone(), address, name, limits)?;
    let failed = match arrival.files() {
        Ok(files) if files.contains_key(MANIFEST_FILE) => {
            return Ok(Located {
                files: Arc::new(IncomingFiles::new(arrival)),
                entry: ModelEntry::File(MANIFEST_FILE.to_owned()),
            });
        }
        Ok(_) => arrival.finish().err(),
        Err(error) => Some(error),
    };
    match (failed, name) {
        (None, _) => {}
        // That it can't be reached is no refusal.
        (Some(error), Some(name)) if error.is_unanswered() => {
            let error = anyhow::Error::from(error);
            output::warning(format_args!(
                "{error:#}; using `{name}` as it is in the store"
            ));
        }
        (Some(PullError::NameInUse { .. }), None) if !copies.is_empty() => bail!(
            "{address}: the store has it as {}; expected one of these names",
            copies.join(" and ")
        ),
        (Some(error), _) => return Err(pull::with_advice(error)),
    }
    let models = store.list()?;
    let model = pull::of_source(&models, &default, is_source);
    let model = model.with_context(|| format!("{address}: not in the store"))?;
    Ok(Located::stored(store.model(&model.name)?)?)
}

/// The names of those of `models` whose source is as `is_source` says.
fn copies(models: &[store::Listed], is_source: impl Fn(&str) -> bool) -> Vec<String> {
    let copies = models.iter().filter(|model| is_source(&model.entry.source));
    copies.map(|model| model.name.clone()).collect()
}

/// Tells what is odd.
pub(crate) fn tell(warning: &Warning) {
    match warning {
        Warning::Placement { .. } | Warning::NotOnGpu { .. } => output::note(warning),
        warning if warning.is_warning() => output::warning(warning),
        warning => output::note(format_args!("note: {warning}")),
    }
}

/// What the engine makes of `files`, the output head as `flags` have it, with a screen only if they ask for one.
pub(crate) fn plan(files: &LocalModel, flags: &ModelFlags) -> Result<ModelPlan> {
    plan_with(files, flags, HeadScreen::Off)
}

/// The same, with a screen of the output head as in `otherwise` if `flags` ask for none: where answers are generated. A model that
/// memory has no room for is given none, which would be a copy in it.
pub(crate) fn plan_with(
    files: &LocalModel,
    flags: &ModelFlags,
    otherwise: HeadScreen,
) -> Result<ModelPlan> {
    let options = PlanOptions {
        i2s_layout: flags.i2s_layout(),
    };
    let otherwise = match otherwise {
        HeadScreen::Off => otherwise,
        _ if files.file_bytes() <= room_for_weights() => otherwise,
        _ => HeadScreen::Off,
    };
    let plan = files.plan(&options)?.with_head(flags.head(otherwise));
    plan.with_context(|| files.name().to_owned())
}

/// `generation_config.json`, or the empty one; tells of recommendations in it that are ignored.
pub(crate) fn generation_config(files: &LocalModel) -> Result<GenerationConfig> {
    let mut warnings = Vec::new();
    let config = files.generation_config(&mut warnings)?;
    warnings.iter().for_each(tell);
    Ok(config)
}

/// Reads the weights that `plan` asks for, to where `flags` say, using `n_threads` threads.
pub(crate) fn load(
    files: &LocalModel,
    plan: &ModelPlan,
    flags: &EngineFlags,
    n_threads: usize,
) -> Result<Arc<Model<Device>>> {
    let progress = Progress::bytes("loading", plan.weight_bytes());
    let kept = (flags.weights(), flags.experts()?);
    let mut warn = |warning| tell(&warning);
    load_by(files, plan, flags, n_threads, kept, &progress, &mut warn)
}

/// The same, where weights are kept as `kept` says; `progress` and `warn` are told what happens.
fn load_by(
    files: &LocalModel,
    plan: &ModelPlan,
    flags: &EngineFlags,
    n_threads: usize,
    kept: (WeightsFlag, Option<ExpertsInMemory>),
    progress: &Progress,
    warn: &mut dyn FnMut(Warning),
) -> Result<Arc<Model<Device>>> {
    let flags = flags.clone().for_model(files);
    let hints = flags.device().hints(files.hints());
    let load = |device| load_from(files, plan.clone(), device, kept, progress);
    flags.load_on(n_threads, plan, &hints, warn, load)
}

/// Loads the model with its adapters once for each of `engines`, which compute on devices of their own, all at the same
/// time, for sessions that hold `ctx_len` tokens. Where there are several, weights are mapped unless they are to be
/// read: files are read once.
pub(crate) fn adapted_for_each(
    files: &LocalModel,
    plan: &ModelPlan,
    engines: &[EngineFlags],
    ctx_len: usize,
) -> Result<Vec<Adapted<Device>>> {
    let [_, _, ..] = engines else {
        let one = engines
            .first()
            .map(|flags| adapted(files, plan, flags, ctx_len));
        return one.into_iter().collect();
    };
    tell_long_context(files, plan, ctx_len);
    let n_bytes = plan.weight_bytes().saturating_mul(engines.len() as u64);
    let progress = Progress::bytes("loading", n_bytes);
    let load = |flags: &EngineFlags| {
        let weights = match flags.weights() {
            WeightsFlag::Auto => WeightsFlag::Map,
            asked => asked,
        };
        let (kept, mut warnings) = ((weights, flags.experts()?), Vec::new());
        let mut warn = |warning| warnings.push(warning);
        let n_threads = flags.n_threads();
        let model = load_by(files, plan, flags, n_threads, kept, &progress, &mut warn)?;
        Ok((model, warnings))
    };
    let loaded: Vec<Result<_>> = thread::scope(|scope| {
        let threads = engines.iter().map(|flags| scope.spawn(|| load(flags)));
        let threads: Vec<_> = threads.collect();
        let join = |thread: thread::ScopedJoinHandle<'_, Result<_>>| {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    });
    drop(progress);
    let mut told = Vec::new();
    let mut all = Vec::new();
    for (number, (loaded, flags)) in loaded.into_iter().zip(engines).enumerate() {
        let (model, warnings) = loaded.with_context(|| format!("engine {number}"))?;
        for warning in warnings {
            // Of the files, each engine's loading says the same.
            let text = warning.to_string();
            if !told.contains(&text) {
                tell(&warning);
                told.push(text);
            }
        }
        all.push(adapt(model, files, flags.lora())?);
    }
    Ok(all)
}

/// Reads the weights that `plan` asks for onto `backend`.
#[cfg(feature = "gpu")]
pub(crate) fn load_on<B: Backend>(
    files: &LocalModel,
    plan: ModelPlan,
    backend: B,
    flags: &EngineFlags,
) -> Result<Arc<Model<B>>> {
    let kept = (flags.weights(), flags.experts()?);
    let progress = Progress::bytes("loading", plan.weight_bytes());
    let loaded = load_from(files, plan, backend, kept, &progress)?;
    loaded.warnings.iter().for_each(tell);
    Ok(loaded.model)
}

/// How many bytes of weights memory has room for, besides what a session takes.
fn room_for_weights() -> u64 {
    Machine::detect().free_memory_bytes / 2
}

fn load_from<B: Backend>(
    files: &LocalModel,
    plan: ModelPlan,
    backend: B,
    (weights, experts): (WeightsFlag, Option<ExpertsInMemory>),
    progress: &Progress,
) -> sterna::Result<sterna::Loaded<B>> {
    let options = LoadFrom {
        weights: match weights {
            WeightsFlag::Map => Weights::Mapped,
            WeightsFlag::Read => Weights::Read,
            WeightsFlag::Auto => Weights::ReadUpTo(room_for_weights()),
        },
        experts,
        n_threads: machine::default_threads(),
        progress: &|n| progress.add(n),
    };
    files.load_on(plan, backend, &options)
}

/// Loads the model and starts a session that holds `ctx_len` tokens.
pub(crate) fn session(
    files: &LocalModel,
    plan: ModelPlan,
    flags: &EngineFlags,
    ctx_len: usize,
) -> Result<Session<Device>> {
    let flags = flags.clone().for_model(files);
    Ok(adapted(files, &plan, &flags, ctx_len)?.session(flags.session(ctx_len))?)
}

/// Loads the model, with its adapters, for sessions that hold `ctx_len` tokens; `flags` are those for it.
pub(crate) fn adapted(
    files: &LocalModel,
    plan: &ModelPlan,
    flags: &EngineFlags,
    ctx_len: usize,
) -> Result<Adapted<Device>> {
    tell_long_context(files, plan, ctx_len);
    let model = load(files, plan, flags, flags.n_threads())?;
    adapt(model, files, flags.lora())
}

/// What computes answers, for receipts of them: `adapted`, made of `files` by `flags`, which are those for it. All weights
/// are read, but for those of packages.
pub(crate) fn setup(
    files: &LocalModel,
    plan: &ModelPlan,
    flags: &EngineFlags,
    ctx_len: usize,
    adapted: &Adapted<Device>,
) -> Result<Setup> {
    let device = computing(adapted.model().backend())?;
    let activations = flags.activations();
    let cache = flags.session(ctx_len).cache_on(adapted.model().backend());
    let digest = digest(files)?;
    let name = files.stem();
    let setup = Setup::new(name, digest, plan, activations, ctx_len, cache, device);
    Ok(setup.with_adapters(adapted)?)
}

/// The digest of the model's files.
pub(crate) fn digest(files: &LocalModel) -> Result<Digest> {
    let progress = Progress::bytes("hashing", files.file_bytes());
    Ok(files.digest(&|n| progress.add(n))?)
}

/// What `device` is, as receipts name it.
pub(crate) fn computing(device: &Device) -> Result<receipt::Device> {
    Ok(match native::gpu_name(device) {
        Some(name) => receipt::Device::Gpu(name),
        None => receipt::Device::Cpu(isa()?.name().to_owned()),
    })
}

/// Tells of a context that is longer than what the model was trained for.
fn tell_long_context(files: &LocalModel, plan: &ModelPlan, ctx_len: usize) {
    let max_ctx = plan.config().max_ctx;
    if ctx_len > max_ctx {
        tell(&Warning::LongContext {
            model: files.name().to_owned(),
            ctx_len,
            max_ctx,
        });
    }
}

/// The weights of a running model, whose groups can be replaced.
pub(crate) struct Replaceable {
    /// As they are loaded.
    original: Revisions,
    /// As they are now, if something was replaced.
    replaced: Option<Revisions>,
    options: PlanOptions,
    head: HeadOptions,
}

impl Replaceable {
    /// Those of `plan`, made of `files`; other models are planned with `options` and `head`, as it was.
    pub(crate) fn new(
        files: &LocalModel,
        plan: &ModelPlan,
        options: PlanOptions,
        head: HeadOptions,
    ) -> Replaceable {
        Replaceable {
            original: Revisions::of(files, plan),
            replaced: None,
            options,
            head,
        }
    }

    /// Records that the model is loaded again, without what was replaced; whether something was.
    pub(crate) fn load_again(&mut self) -> bool {
        self.replaced.take().is_some()
    }

    /// Replaces groups of `models`, which are equal, by those of the model called `name`: those called `ids`, or without
    /// any, all that aren't known to be the same. Returns what changed to what.
    pub(crate) fn swap(
        &mut self,
        models: &[Arc<Model<Device>>],
        name: &str,
        ids: &[String],
    ) -> Result<Vec<SwappedGroup>> {
        let files = open(name)?;
        let plan = files.plan(&self.options)?.with_head(self.head);
        let plan = plan.with_context(|| name.to_owned())?;
        let revision = Revisions::of(&files, &plan);
        let running = self.replaced.as_ref().unwrap_or(&self.original);
        let groups = running.choose(&revision, ids);
        let groups = groups.with_context(|| name.to_owned())?;
        for (number, model) in models.iter().enumerate() {
            let (_, warnings) = files.swap_into(model, plan.clone(), &groups)?;
            // Each says the same.
            if number == 0 {
                warnings.iter().for_each(tell);
            }
        }
        let running = self.replaced.get_or_insert_with(|| self.original.clone());
        Ok(running.replace(&revision, &groups))
    }
}

/// Loads the adapters that `flags` name for `model`, which is made of `files`.
pub(crate) fn adapt<B: Backend>(
    model: Arc<Model<B>>,
    files: &LocalModel,
    flags: &[LoraFlag],
) -> Result<Adapted<B>> {
    let mut adapted = Adapted::new(model);
    let mut warnings = Vec::new();
    for flag in flags {
        let adapter = open_adapter(&flag.folder)?;
        adapted.add(adapter, files, (flag.scale, flag.dtype), &mut warnings)?;
    }
    warnings.iter().for_each(tell);
    Ok(adapted)
}

/// The adapter in a folder, at an address or in the store: PEFT's, of a package, or of an engine bundle.
pub(crate) fn open_adapter(folder: &Path) -> Result<AdapterFiles> {
    let signatures: Arc<dyn Signatures> = Arc::new(Trusted);
    let named = folder.to_str().filter(|_| !folder.exists());
    let located = match named {
        Some(name) if name.contains("://") => Some(fetched(name)?),
        Some(name) => match in_store(name)? {
            Some(stored) => Some(Located::stored(stored)?),
            None => match name.rsplit_once('=') {
                Some((folder, scale)) => bail!(
                    "adapter {name}: no folder of that name; if {folder} is the adapter, expected a number as its scale, found `{scale}`"
                ),
                // Adapters of Hugging Face's repositories are not fetched.
                None if name.contains(['/', '\\']) => bail!("adapter {name}: no such folder"),
                None => bail!("adapter {}", absent(name)),
            },
        },
        None => None,
    };
    let files = located.map_or_else(|| Arc::new(LocalFolder::new(folder)) as _, |at| at.files);
    let name = folder.display().to_string();
    native::open_adapter(&name, &*files, Some(signatures)).map_err(with_advice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_nearly_an_address_is_told_from_a_path() {
        for (name, address) in [
            ("owner/repo-GGUF", "https://huggingface.co/owner/repo-GGUF"),
            (
                "owner/Llama-3.2-1B",
                "https://huggingface.co/owner/Llama-3.2-1B",
            ),
            ("hf:owner/repo", "https://huggingface.co/owner/repo"),
            ("hf://owner/repo/", "https://huggingface.co/owner/repo"),
            ("example.org/a/x.gguf", "https://example.org/a/x.gguf"),
            ("localhost:8765/tiny", "https://localhost:8765/tiny"),
        ] {
            assert_eq!(near_address(name).as_deref(), Some(address));
        }
        for name in [
            "tiny",
            "models/x.gguf",
            "models/x.GGUF",
            "no/such/folder",
            "./owner/repo",
            "../a",
            "/a/b",
            "~/a",
            "https://example.org/a",
            "C:/models/x",
        ] {
            assert_eq!(near_address(name), None, "{name}");
        }
    }

    #[test]
    fn names_differ_by_their_letters() {
        for (a, b, n) in [
            ("", "", 0),
            ("tiny", "Tiny", 0),
            ("tiny", "", 4),
            ("tiny", "tinny", 1),
            ("tiny", "tony-2", 3),
            ("ab", "ba", 2),
        ] {
            assert_eq!((distance(a, b), distance(b, a)), (n, n), "{a} {b}");
        }
    }
}
