//! `sterna serve`: the files of a package over HTTP.
//!
//! [`converted`] makes packages of other models, [`package`] lists the files, [`routes`] maps paths, [`files`] and
//! [`range`] answer requests for a file, [`index`] renders the folder, and [`listener`] handles connections.

mod converted;
mod files;
mod index;
mod listener;
mod package;
mod range;
mod routes;

use std::sync::Arc;

use anyhow::Result;
use clap::Args;

use crate::model::PackagePlace;
use crate::output;

use package::Package;

const EXAMPLE: &str = "Example:
  sterna serve model-rdrr
  sterna serve model-rdrr --host 0.0.0.0 --port 80
  sterna serve model.gguf";

/// Serve the files of a package over HTTP, to browsers, programs and other machines
///
/// A GGUF file or a checkpoint is converted into the store, once. Only files that the package names are served;
/// they must not be changed while serving. Ctrl-C waits for transfers to finish; twice, it stops at once.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Serve {
    /// Folder with a manifest.json, the name of a package in the store, or another model in a folder or the
    /// store, which is converted into the store first
    package: String,

    /// Address to listen on; 0.0.0.0 and :: are all addresses of this machine
    #[arg(long, default_value = "127.0.0.1")]
    host: String,

    /// Port to listen on; 0 takes a free one
    #[arg(long, default_value_t = 8765)]
    port: u16,
}

impl Serve {
    pub(crate) fn run(self) -> Result<()> {
        let mut place = PackagePlace::find(&self.package)?;
        if converted::is_convertible(&place) {
            place = PackagePlace::Stored(Arc::new(converted::package_of(&self.package, &place)?));
        }
        let package = Package::open(&place)?;
        let n_bytes = package.files().map(|file| file.size()).sum();
        let what = format!(
            "serving {}: {} files, {}",
            package.name(),
            package.files().count(),
            output::Bytes(n_bytes),
        );
        let router = routes::router(Arc::new(package));
        listener::serve(&self.host, self.port, &what, router)
    }
}
