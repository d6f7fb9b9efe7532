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
//! // One engine.
//! let served = Served::new("tales", &files, plan, vec![model], session, &mut Vec::new())?;
//! let server = Server::start(vec![served], Settings::default())?;
//! // To be served by whatever listens.
//! let router: axum::Router = server.router();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod adapters;
mod answer;
mod api;
mod engine;
mod id;
mod infill;
mod metrics;
mod model;
mod settings;
mod trace;

use std::io;
use std::sync::Arc;

use axum::Router;
use sterna::Adapted;
use sterna_engine::lora::ActiveAdapter;
use sterna_engine::{Backend, Model};

use adapters::{Shelf, Source};
use api::{App, Shared};
use engine::{EngineModel, Engines, LoadAdapter};
use metrics::Metrics;

pub use api::{Keys, KeysError};
pub use engine::EngineOptions;
pub use model::Served;
pub use settings::{CACHE_BYTES, Log, MAX_BODY, PARALLEL, QUEUE, Settings};
pub use trace::{Span, Trace, Tracer};

/// The version of this runtime.
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// Running engines, and the routes to them.
#[derive(Clone)]
pub struct Server {
    app: Shared,
}

impl Server {
    /// Starts the engines for `models`: as many as each of these was loaded for.
    ///
    /// Errors: models that were loaded for different numbers of engines, or for none; the system has no thread left.
    pub fn start<B>(models: Vec<Served<B>>, settings: Settings) -> io::Result<Server>
    where
        B: Backend + 'static,
        Adapted<B>: Send + Sync,
        Model<B>: Send + Sync,
        ActiveAdapter<B>: Send,
    {
        let n_engines = models.first().map_or(1, |served| served.engines.len());
        let differs = |served: &&Served<B>| served.engines.len() != n_engines || n_engines == 0;
        if let Some(served) = models.iter().find(differs) {
            let found = served.engines.len();
            let message = format!(
                "{}: expected a model that was loaded for {} engines, found one for {found}",
                served.name(),
                n_engines.max(1)
            );
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let mut texts = Vec::new();
        let mut engines: Vec<Vec<EngineModel<B>>> = (0..n_engines).map(|_| Vec::new()).collect();
        let (mut sources, mut loaded) = (Vec::new(), Vec::new());
        for (index, served) in models.into_iter().enumerate() {
            loaded.extend(served.loaded.into_iter().map(|key| (index, key)));
            let loader: Arc<dyn LoadAdapter> = Arc::clone(&served.engines[0].adapters) as _;
            let open = served.open;
            sources.push(Source { loader, open });
            texts.push(Arc::new(served.text));
            for (engine, model) in engines.iter_mut().zip(served.engines) {
                engine.push(model);
            }
        }
        let shelf = Shelf::new(sources, loaded);
        let token_bytes = engines[0].first().map_or(0, |model| {
            (model.cache_bytes)(1).saturating_sub((model.cache_bytes)(0))
        });
        let mut devices = settings.devices.clone();
        devices.resize(n_engines, String::new());
        let metrics = Metrics::new(&devices, settings.engine.cache_bytes, token_bytes);
        let metrics = Arc::new(metrics);
        let (options, log) = (settings.engine, Arc::clone(&settings.log));
        let engines = Engines::start(engines, devices, options, &metrics, log)?;
        let app = App::new(engines, texts, shelf, settings, metrics);
        Ok(Server { app: Arc::new(app) })
    }

    /// The routes of the API.
    pub fn router(&self) -> Router {
        api::router(Arc::clone(&self.app))
    }

    /// Takes no more requests; those that were taken are answered.
    pub fn drain(&self) {
        self.app.drain();
    }
}
