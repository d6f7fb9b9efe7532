//! `sterna serve`: the files of a package over HTTP, and pages that run it in a browser.
//!
//! [`converted`] makes packages of other models, [`package`] lists the files, [`pages`] has the pages, [`site`] finds
//! the file at a path in either, [`routes`] maps paths, [`files`] and [`range`] answer requests for a file, [`index`]
//! renders the folder, and [`listener`] handles connections.

mod converted;
mod files;
mod index;
mod listener;
mod package;
mod pages;
mod range;
mod routes;
mod site;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::Args;
use sterna::native::BUILTIN;
use sterna_delivery::store::portable_name;

use crate::{output, pull};

use listener::Listener;
use package::Package;
use pages::PAGES;
use site::Site;

const EXAMPLE: &str = "Example:
  sterna serve
  sterna serve model-rdrr
  sterna serve model-rdrr --host 0.0.0.0 --port 80
  sterna serve model.gguf
  sterna serve other/model.gguf --name other-rdrr";

/// Serve the files of a package over HTTP, to browsers, programs and other machines
///
/// A GGUF file or a checkpoint is converted into the store, once. Only files that the package names are served;
/// they must not be changed while serving. A program that was built after the npm package also serves two pages
/// that run the model in a browser, /chat/ and /tldr/. Ctrl-C waits for transfers to finish; twice, it stops at
/// once.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Serve {
    /// Folder with a manifest.json, the name of a package in the store, or another model in a folder or the
    /// store, or `builtin`, which are converted into the store first; by default the built-in model, for the pages
    model: Option<String>,

    /// Name in the store of the package that a model is converted into [default: that of the model, and -rdrr]
    #[arg(long, value_name = "NAME", value_parser = package_name)]
    name: Option<String>,

    /// Address to listen on; 0.0.0.0 and :: are all addresses of this machine
    #[arg(long, default_value = "127.0.0.1")]
    host: String,

    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8765)]
    port: u16,
}

impl Serve {
    pub(crate) fn run(self) -> Result<()> {
        let model = match self.model.as_deref() {
            Some(model) => model,
            None if !PAGES.is_empty() => BUILTIN,
            None => bail!(
                "expected a model, found none; the built-in one would be for the pages, which this program was built \
                 without: `npm ci --prefix packages/sterna`, `scripts/build-web.sh` and `npm run build --prefix \
                 packages/sterna` make them for its next build"
            ),
        };
        // Before what takes time.
        let listener = Listener::bind(&self.host, self.port)?;
        let package = Package::open(&converted::find(model, self.name.as_deref())?)?;
        let what = format!(
            "serving {}: {} files, {}",
            package.name(),
            package.files().count(),
            output::Bytes(package.size()),
        );
        let site = Site::new(package, PAGES);
        let has_pages = site.has_pages();
        let tell = |address: SocketAddr| {
            output::note(&what);
            output::line(format_args!("http://{address}/"))?;
            // Not on standard output, where programs read the one address.
            if has_pages {
                let host = host_for_browsers(address);
                output::note(format_args!("chat in a browser: http://{host}/chat/"));
            }
            Ok(())
        };
        listener.serve(routes::router(Arc::new(site)), tell)
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
