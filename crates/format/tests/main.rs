//! Parsers, against files of others, damaged files and the documentation.

mod bundle;
mod docs;
mod files;
mod mutations;
mod rdrr;
mod rdrr_hostile;
mod regressions;
mod source_examples;
