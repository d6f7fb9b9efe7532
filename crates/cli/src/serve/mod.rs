//! `sterna serve`: the API of a model over HTTP, the files of its package, and pages that run it in a browser.
//!
//! [`api`] has the settings of the API, which crate `server` is. [`converted`] makes packages of other models, [`package`] lists the files, [`pages`] has the pages, [`site`] finds
//! the file at a path in either, [`routes`] maps paths, [`files`] and [`range`] answer requests for a file, [`index`]
//! renders the folder, [`listener`] handles connections, to which [`places`] gives places, [`stdin`] ends with who began it, and [`tls`] encrypts them; with the feature `otel`, `otlp` sends traces, and with `p2p` `share` gives the package to peers.

mod api;
mod converted;
mod files;
mod index;
mod listener;
#[cfg(feature = "otel")]
mod otlp;
mod package;
mod pages;
mod places;
mod range;
mod routes;
#[cfg(feature = "p2p")]
mod share;
mod site;
mod stdin;
mod tls;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use axum::Router;
use clap::Args;
use sterna::native::BUILTIN;
use sterna_delivery::store::portable_name;
use sterna_server::{Keys, Server};

use crate::args::{EngineFlags, ModelFlags};
use crate::{model, output, pull};

use api::{ApiFlags, Chosen, ConfigFile, Opened};
use listener::Listener;
#[cfg(feature = "otel")]
use otlp::Collector;
use package::Package;
use pages::PAGES;
use site::Site;
use stdin::Stdin;

const EXAMPLE: &str = "Example:
  sterna serve
  sterna serve model.gguf
  sterna serve model-rdrr --host 0.0.0.0 --port 80
  sterna serve model.gguf other-model --no-files --parallel 16
  sterna serve model.gguf --no-files --gpus all
  sterna serve a.gguf b.gguf c.gguf --no-files --models-memory 12GiB
  sterna serve model.gguf --no-files --cache-folder /var/cache/sterna --cache-folder-size 64GiB
  STERNA_API_KEY=... sterna serve model-rdrr --host 0.0.0.0
  sterna serve model-rdrr --share --no-api
  sterna serve model-rdrr --no-api --signal
  sterna serve other/model.gguf --name other-rdrr";

/// Serve a model over HTTP: the API that clients of OpenAI and Anthropic speak, and the files of its package
///
/// The API is at /v1/. Files are for browsers, programs and other machines: a GGUF file or a checkpoint is
/// converted into the store, once; only files that the package names are served, and they must not be changed
/// while serving. Of several models, the first one's files are served. Browsers get a chat with the model at /; in a
/// program that was built after the npm package, models can run in the browser there, too, and in /tldr/. Ctrl-C waits
/// for answers and transfers to finish; twice, it stops at once.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Serve {
    /// Folder with a manifest.json, the name of a model in the store, or another model in a folder or the store,
    /// or `builtin`, which are converted into the store first; by default the built-in model, for the pages
    #[arg(value_name = "MODEL")]
    models: Vec<String>,

    /// Name in the store of the package that a model is converted into [default: that of the model, and -rdrr]
    #[arg(long, value_name = "NAME", value_parser = package_name)]
    name: Option<String>,

    /// Address to listen on; 0.0.0.0 and :: are all addresses of this machine, where the API asks for a key
    /// [default: 127.0.0.1]
    #[arg(long, env = "STERNA_SERVE_HOST")]
    host: Option<String>,

    /// Port to listen on; 0 takes a free one [default: 8765]
    #[arg(long, env = "STERNA_SERVE_PORT")]
    port: Option<u16>,

    /// End as after SIGTERM when standard input closes, so that no server outlives the program that began it, however
    /// that ends; what is read there is passed over
    #[arg(long)]
    exit_on_stdin_close: bool,

    #[command(flatten)]
    api: ApiFlags,

    #[cfg(feature = "p2p")]
    #[command(flatten)]
    share: share::ShareFlags,

    #[command(flatten)]
    engine: EngineFlags,

    #[command(flatten)]
    files: ModelFlags,
}

/// Where it listens, unless another address is chosen: only this machine reaches it.
const HOST: &str = "127.0.0.1";
const PORT: u16 = 8765;
/// How long engines have to end, and to write what they keep.
const FINISH_TIMEOUT: Duration = Duration::from_secs(30);

impl Serve {
    pub(crate) fn run(mut self) -> Result<()> {
        if let Some(name) = &self.api.new_api_key {
            let (key, line) = Keys::make(name).context("--new-api-key")?;
            output::note("the key, which is shown only here, and its line for --api-keys:");
            output::line(key)?;
            return output::line(line);
        }
        let config = match &self.api.config {
            Some(path) => ConfigFile::read(path)?,
            None => ConfigFile::default(),
        };
        self.engine = self.engine.or(&config.engine())?;
        let models = match self.models.is_empty() {
            true => &config.models,
            false => &self.models,
        };
        let is_default = models.is_empty();
        let models: Vec<&str> = match is_default {
            false => models.iter().map(String::as_str).collect(),
            true if !PAGES.is_empty() => vec![BUILTIN],
            true => bail!(
                "expected a model, found none; the built-in one would be for the pages, which this program has not: \
                 it was built outside of its repository"
            ),
        };
        let host = self.host.as_deref().or(config.host.as_deref());
        let (host, port) = (
            host.unwrap_or(HOST),
            self.port.or(config.port).unwrap_or(PORT),
        );
        let chosen = self.api.choose(host, &config)?;
        let tls = self.api.tls(&config)?;
        #[cfg(feature = "otel")]
        let collector = self.api.collector(&config)?;
        #[cfg(not(feature = "otel"))]
        self.api.expect_no_collector(&config)?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let has_api = !self.api.no_api && chosen.may_offer(host)?;
        let signal = chosen.signal(host)?;
        let connections = chosen.connections();
        if self.api.check {
            return self.check(&models, has_api, &chosen);
        }
        // Before what takes time.
        let stdin = match self.exit_on_stdin_close {
            true => Some(Stdin::watch()?),
            false => None,
        };
        let listener = Listener::bind(host, port)?;
        #[cfg(feature = "otel")]
        let exporter = collector.map(Collector::start).transpose()?;
        #[cfg(feature = "otel")]
        let chosen = match &exporter {
            Some(exporter) => chosen.with_tracer(exporter.tracer()),
            None => chosen,
        };
        let package = match self.api.no_files {
            true => None,
            false => Some(self.package(models[0])?),
        };
        #[cfg(feature = "p2p")]
        let _sharing = match &package {
            Some(package) => self.share.start(package)?,
            None => None,
        };
        let server = match has_api {
            true => self.server(&models, chosen)?,
            false => None,
        };
        let table = match self.api.has_pages(&config) {
            true => PAGES,
            false => &[],
        };
        let site = Site::new(package, table);
        let mut told = Vec::new();
        if let Some(package) = site.package() {
            told.push(format!(
                "serving {}: {} files, {}",
                package.name(),
                package.files().count(),
                output::Bytes(package.size()),
            ));
        }
        let has_pages = site.has_pages();
        let mut router = Router::new();
        if has_pages || site.package().is_some() {
            router = router.merge(routes::router(Arc::new(site)));
        }
        if let Some(server) = &server {
            router = router.merge(server.router());
        }
        let has_signal = signal.is_some();
        if let Some(signal) = signal {
            router = router.merge(signal.router());
        }
        let has_api = server.is_some();
        let tell = |address: SocketAddr| {
            told.iter().for_each(output::note);
            output::line(format_args!("{scheme}://{address}/"))?;
            let host = host_for_browsers(address);
            // Not on standard output, where programs read the one address.
            if has_api {
                output::note(format_args!("API: {scheme}://{host}/v1"));
            }
            if has_signal {
                output::note(format_args!("tabs find each other: {scheme}://{host}/"));
            }
            if has_pages {
                output::note(format_args!("chat in a browser: {scheme}://{host}/"));
            }
            Ok(())
        };
        let stopping = || {
            if let Some(server) = &server {
                server.drain();
            }
        };
        let ending = server.clone();
        let finish = move || {
            if let Some(server) = ending
                && !server.finish(FINISH_TIMEOUT)
            {
                output::warning(
                    "not all of what was computed of conversations is kept: it takes too long",
                );
            }
        };
        let limits = connections.limits(server.as_ref().map_or(0, Server::max_requests));
        let served = listener.serve(router, (limits, tls), stdin, tell, stopping, finish);
        #[cfg(feature = "otel")]
        if let Some(exporter) = exporter
            && exporter.finish().is_err()
        {
            output::warning("the last traces may be lost: the collector takes too long");
        }
        served
    }

    /// The files of the model called `name`.
    fn package(&self, name: &str) -> Result<Package> {
        let place = converted::find(name, self.name.as_deref())?;
        Package::open(&place)
    }

    /// The API of `models`. Where it wasn't asked for, what can't be run has none, and a warning says why.
    fn server(&self, models: &[&str], chosen: Chosen) -> Result<Option<Server>> {
        let devices = Arc::new(chosen.engines(&self.engine)?);
        let is_needed = models.len() > 1 || chosen.is_asked();
        let open = |(index, name): (usize, &&str)| {
            let adapters = |called: &str| chosen.adapters_of(called, index == 0);
            let call = |name: &str, stem: &str| chosen.name_of(index, name, stem);
            api::open(name, call, adapters, &self.files, &devices)
        };
        chosen.expect_models(models.len())?;
        let opened: Result<Vec<Opened>> = models.iter().enumerate().map(open).collect();
        let names = opened
            .iter()
            .flatten()
            .map(|model| model.served.name().to_owned());
        let names: Vec<String> = names.collect();
        if opened.is_ok() {
            Chosen::expect_apart(&names)?;
            chosen.check_adapters(&names)?;
        }
        match opened.and_then(|opened| chosen.start(opened, devices, &self.files)) {
            Ok(server) => Ok(Some(server)),
            Err(error) if !is_needed => {
                output::warning(format_args!("files only, without an API: {error:#}"));
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Checks what can be checked without loading a model.
    fn check(&self, models: &[&str], has_api: bool, chosen: &Chosen) -> Result<()> {
        let mut names = Vec::new();
        chosen.expect_models(models.len())?;
        for (index, name) in models.iter().enumerate() {
            match has_api {
                true => {
                    let flags = (&self.files, &self.engine);
                    names.push(api::check((index, name), flags, chosen)?);
                    output::line(format_args!("{}: ok", names[names.len() - 1]))?;
                }
                false => model::expect(name)?,
            }
        }
        if has_api {
            Chosen::expect_apart(&names)?;
            chosen.check_adapters(&names)?;
            for (number, name) in chosen.engines(&self.engine)?.names.iter().enumerate() {
                output::line(format_args!("engine {number}: {name}"))?;
            }
        }
        output::line("settings: ok")
    }
}

/// Parses a name for a package in the store.
fn package_name(name: &str) -> Result<String, String> {
    match portable_name(name) {
        portable if portable != name => Err(format!("expected a name such as {portable}")),
        _ if pull::is_taken(name) => {
            Err("expected a name that stands for no other model".to_owned())
        }
        portable => Ok(portable),
    }
}

/// Host and port for a browser on this machine. By the address that means all, browsers don't let pages do what
/// they let those of this machine do.
fn host_for_browsers(address: SocketAddr) -> String {
    match address.ip().is_unspecified() {
        true => format!("localhost:{}", address.port()),
        false => address.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_that_the_store_takes() {
        assert_eq!(package_name("other-rdrr"), Ok("other-rdrr".to_owned()));
        let error = package_name("an other").unwrap_err();
        assert_eq!(error, "expected a name such as an-other");
        for name in ["", "a/b", "builtin", "Builtin"] {
            assert!(package_name(name).is_err(), "{name}");
        }
    }

    #[test]
    fn browsers_get_an_address_that_they_trust() {
        for (address, host) in [
            ("127.0.0.1:8765", "127.0.0.1:8765"),
            ("[::1]:8765", "[::1]:8765"),
            ("192.0.2.1:80", "192.0.2.1:80"),
            ("0.0.0.0:8765", "localhost:8765"),
            ("[::]:8765", "localhost:8765"),
        ] {
            assert_eq!(host_for_browsers(address.parse().unwrap()), host);
        }
    }
}
