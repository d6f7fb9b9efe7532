//! Low-bit language models over HTTP: the dialects that clients speak, many answers at once.
//!
//! For programs that serve models, of which the `sterna` command is one. Not for sockets: whoever composes a server
//! listens, and hands connections to a [`Server`]'s router. Not for arithmetic either: that is `sterna`'s.
//!
//! A request goes from its dialect into the queue of the engines, each of which computes on a device of its own, and
//! comes back as one stream of events, which the dialect encodes. An answer doesn't depend on what else is asked at the
//! same time.
//!
//! ```
//! use sterna::Adapted;
//! use sterna::native::{BUILTIN, LoadFrom, LocalModel, Weights, builtin};
//! use sterna_engine::{Cpu, SessionOptions, plan::PlanOptions};
//! use sterna_server::{Served, Server, Settings};
//!
//! let files = LocalModel::open(BUILTIN, builtin(), None, None)?;
//! let plan = files.plan(&PlanOptions::default())?;
//! let cpu = Cpu::new(1, sterna_kernels::Isa::detect());
//! let options = LoadFrom { weights: Weights::Mapped, experts: None, n_threads: 1, progress: &|_| {} };
//! let model = Adapted::new(files.load_on(plan.clone(), cpu, &options)?.model);
//! let session = SessionOptions::new(512);
//! let served = Served::new("tales", &files, plan, session, &mut Vec::new())?;
//! // One engine.
//! let served = served.with_weights(vec![model]);
//! let server = Server::start(vec![served], Settings::default())?;
//! // To be served by whatever listens.
//! let router: axum::Router = server.router();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod adapters;
mod answer;
mod api;
mod catalog;
mod engine;
mod hosts;
mod id;
mod infill;
mod metrics;
mod model;
mod settings;
mod signal;
mod trace;

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use axum::Router;
use sterna::Adapted;
use sterna_engine::lora::ActiveAdapter;
use sterna_engine::{Backend, Model};

use adapters::{Shelf, Source};
use api::{App, Shared};
use catalog::{Catalog, OpenModel, Opened};
use engine::{Engines, Library};
use metrics::Metrics;
use model::ModelText;

pub use api::{Keys, KeysError};
pub use engine::{CacheFolder, EngineOptions};
pub use hosts::Hosts;
pub use model::Served;
pub use settings::{
    BODY_TIMEOUT, CACHE_BYTES, FOLDER_BYTES, GRAMMAR_TIMEOUT, Log, MAX_BODY, MOST_PARALLEL,
    PARALLEL, QUEUE, Settings, Sign, parallel_on,
};
pub use signal::{Signal, SignalLimits};
pub use trace::{Span, Trace, Tracer};

/// The version of this runtime.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Running engines, and the routes to them.
#[derive(Clone)]
pub struct Server {
    app: Shared,
}

/// The models of a server.
pub struct Models<B: Backend> {
    listed: Vec<Served<B>>,
    open: Option<Box<OpenServed<B>>>,
}

/// Opens a model by what a client calls it.
type OpenServed<B> = dyn Fn(&str) -> std::result::Result<Served<B>, String> + Send + Sync;

impl<B: Backend> From<Vec<Served<B>>> for Models<B> {
    fn from(listed: Vec<Served<B>>) -> Models<B> {
        Models { listed, open: None }
    }
}

impl<B: Backend> Models<B> {
    /// Clients with the permission may load other models, too, which `open` opens by what they call them.
    #[must_use]
    pub fn with_others(
        mut self,
        open: impl Fn(&str) -> std::result::Result<Served<B>, String> + Send + Sync + 'static,
    ) -> Models<B> {
        self.open = Some(Box::new(open));
        self
    }
}

impl Server {
    /// Starts the engines for `models`: one for each of the devices that `settings` name, else one for each of those
    /// that the first model was loaded for.
    ///
    /// Errors: a model that was loaded for another number of engines, or can't be loaded at all; an adapter that
    /// doesn't fit; a folder of the cache that can't be used; the system has no thread left.
    pub fn start<B>(models: impl Into<Models<B>>, settings: Settings) -> sterna::Result<Server>
    where
        B: Backend + 'static,
        Adapted<B>: Send + Sync,
        Model<B>: Send + Sync,
        ActiveAdapter<B>: Send,
    {
        let Models { listed, open } = models.into();
        let mut devices = settings.devices.clone();
        if devices.is_empty() {
            let loaded = listed
                .first()
                .and_then(|first| first.source.loaded.as_ref());
            devices.resize(loaded.map_or(1, Vec::len).max(1), String::new());
        }
        let mut metrics = Metrics::new(&devices, settings.engine.cache_bytes);
        if settings.gateway_metrics {
            let first = listed.first();
            let token_bytes = first.map_or(0, |served| served.source.token_bytes());
            metrics = metrics.with_aliases(token_bytes);
        }
        let (metrics, shelf) = (Arc::new(metrics), Arc::new(Shelf::default()));
        let tell = {
            let shelf = Arc::clone(&shelf);
            Box::new(move |number, loader| shelf.set_loader(number, loader))
        };
        let log = Arc::clone(&settings.log);
        let (engine, folder) = (settings.engine, settings.cache_folder.as_ref());
        let (engines, library) =
            Engines::start::<B>(devices, (engine, folder), &metrics, log, tell)?;
        let mut texts = Vec::new();
        for served in listed {
            let is_loaded = served.source.loaded.is_some();
            let (text, add) = parts(served, &shelf, &library);
            add()?;
            let text = Arc::new(text);
            if is_loaded && settings.grammars {
                prepare_grammars(&text);
            }
            texts.push(text);
        }
        let swap = {
            let library = Arc::clone(&library);
            Box::new(move |number, revision: &str, ids: &[String]| {
                library.swap(number, revision, ids)
            })
        };
        let open = open.map(|open| {
            let shelf = Arc::clone(&shelf);
            let open = move |name: &str| {
                let served = open(name)?;
                if served.source.load.is_none() {
                    return Err(format!("{name}: it can't be loaded"));
                }
                let (text, add) = parts(served, &shelf, &library);
                Ok(Opened {
                    text,
                    add: Box::new(add),
                })
            };
            Box::new(open) as Box<OpenModel>
        });
        let catalog = Catalog::new(texts, open, swap);
        let app = App::new(engines, catalog, shelf, settings, metrics);
        Ok(Server { app: Arc::new(app) })
    }

    /// The routes of the API.
    pub fn router(&self) -> Router {
        api::router(Arc::clone(&self.app))
    }

    /// How many requests run and wait at once, at most.
    pub fn max_requests(&self) -> usize {
        self.app.engines.limit()
    }

    /// Takes no more requests; those that were taken are answered.
    pub fn drain(&self) {
        self.app.drain();
    }

    /// Ends the engines, once all is answered or given up, and waits for that and until what is kept of conversations
    /// is in the cache's folder, but no longer than `patience`; whether it is.
    pub fn finish(&self, patience: Duration) -> bool {
        self.app.engines.finish(patience)
    }
}

/// Has a thread prepare the vocabulary of a model for grammars, which takes half a second where it is large: the first request
/// with one waits for less of that.
fn prepare_grammars(text: &Arc<ModelText>) {
    let text = Arc::clone(text);
    // Who asks for a grammar finds out why there can't be any.
    let prepare = move || drop(text.constraints.prepare());
    let thread = thread::Builder::new().name("grammars".to_owned());
    // Without a thread for it, that request makes it.
    let _ = thread.spawn(prepare);
}

/// The text side of `served`, and what lets adapters and engines know it.
fn parts<B>(
    served: Served<B>,
    shelf: &Arc<Shelf>,
    library: &Arc<Library<B>>,
) -> (ModelText, impl FnOnce() -> sterna::Result<usize> + use<B>)
where
    B: Backend + 'static,
    Model<B>: Send + Sync,
    ActiveAdapter<B>: Send,
{
    let Served { text, source, open } = served;
    let (shelf, library) = (Arc::clone(shelf), Arc::clone(library));
    let add = move || {
        // Before anything is numbered.
        library.expect_room(&source.name, source.bytes)?;
        let adapters = source.adapters.iter();
        shelf.add(Source {
            loader: None,
            open: open.map(Arc::from),
            fixed: adapters.map(|adapter| Arc::clone(&adapter.key)).collect(),
        });
        library.add(source)
    };
    (text, add)
}
