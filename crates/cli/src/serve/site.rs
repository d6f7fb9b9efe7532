//! All that is served beside the API: a package, and pages.

use super::package::{Package, ServedFile};
use super::pages::{PageFile, Pages};

/// The package, at the root, and pages below.
#[derive(Debug)]
pub(super) struct Site {
    package: Option<Package>,
    pages: Pages,
}

impl Site {
    /// Serves `package`, if there is one, and the pages in `table`, which offer it.
    pub(super) fn new(package: Option<Package>, table: &[PageFile]) -> Site {
        let pages = Pages::new(table, package.as_ref());
        Site { package, pages }
    }

    /// The package.
    pub(super) fn package(&self) -> Option<&Package> {
        self.package.as_ref()
    }

    /// Whether there are pages.
    pub(super) fn has_pages(&self) -> bool {
        !self.pages.is_empty()
    }

    /// The file at `path`.
    ///
    /// The package's own come first, so that it arrives whole, whatever its files are called. They are in no folder,
    /// so they can hide no file of a page, only the list of models.
    pub(super) fn file(&self, path: &str) -> Option<&ServedFile> {
        let package = self.package.as_ref();
        let of_model = || package?.file(self.pages.in_model(path)?);
        let of_package = package.and_then(|package| package.file(path));
        of_package
            .or_else(|| self.pages.file(path))
            .or_else(of_model)
    }

    /// Whether `path` is a folder with a page, without the slash at its end.
    pub(super) fn is_folder(&self, path: &str) -> bool {
        self.pages.is_folder(path)
    }
}
