//! Which of several sources to believe: each is asked for the manifest, and the first that has one which can
//! be read, with a signature that is believed where there is one, says what the package is.

use std::thread;

use anyhow::{Context, Error, Result, bail};
use serde::de::IgnoredAny;
use sterna_delivery::fetch::{Cancel, Limits, fetch_small_if_any};
use sterna_delivery::sign::SIGNATURE_FILE;
use sterna_delivery::source::Source;
use sterna_format::rdrr::{MANIFEST_FILE, Manifest};

use super::{MAX_FILE_BYTES, check_signature, small};

/// A manifest that is believed, and who has the files that it speaks of.
pub(super) struct Offer<'a> {
    pub(super) manifest: Manifest,
    /// The manifest as it stands.
    pub(super) bytes: Vec<u8>,
    pub(super) signature: Option<String>,
    /// The name of the key it is signed with.
    pub(super) signer: Option<String>,
    /// Who may be asked for files: everybody but those who have another manifest.
    pub(super) sources: Vec<&'a dyn Source>,
    /// Sources that are not asked again, and why.
    pub(super) dropped: Vec<(String, String)>,
}

/// Asks `sources` in turn what the package is, and all who come after the first that can say it whether they
/// have the same. Those that don't answer now may still have shards.
///
/// Errors: nobody has a manifest to be believed; `must_be_signed` is whose signature an earlier revision
/// bore, and then an unsigned one is not.
pub(super) fn choose<'a>(
    sources: &[&'a dyn Source],
    must_be_signed: Option<&str>,
    limits: &Limits,
) -> Result<Offer<'a>> {
    let mut silent = Vec::new();
    let mut dropped = Vec::new();
    let mut failures: Vec<(&str, Error)> = Vec::new();
    for (i, source) in sources.iter().enumerate() {
        let bytes = match small(MANIFEST_FILE, &[*source], limits) {
            Ok(bytes) => bytes,
            Err(error) => {
                silent.push(*source);
                failures.push((source.name(), error));
                continue;
            }
        };
        match believe(*source, bytes, must_be_signed, limits) {
            Ok(mut offer) => {
                offer.sources.splice(0..0, silent);
                offer.dropped = dropped;
                offer.ask_others(&sources[i + 1..], limits);
                return Ok(offer);
            }
            Err(error) => {
                dropped.push((source.name().to_owned(), format!("{error:#}")));
                failures.push((source.name(), error));
            }
        }
    }
    if failures.len() == 1
        && let Some((_, error)) = failures.pop()
    {
        return Err(error);
    }
    let reasons: String = (failures.iter())
        .map(|(name, error)| format!("\n  {name}: {error:#}"))
        .collect();
    bail!("no source has a package:{reasons}")
}

/// What `source` offers, with `bytes` as its manifest.
fn believe<'a>(
    source: &'a dyn Source,
    bytes: Vec<u8>,
    must_be_signed: Option<&str>,
    limits: &Limits,
) -> Result<Offer<'a>> {
    let from = source.name();
    // A server that answers everything with a page has no package, signed or not.
    serde_json::from_slice::<IgnoredAny>(&bytes)
        .with_context(|| format!("{from}: no package: {MANIFEST_FILE}: expected JSON"))?;
    let signature = signature(source, limits)?;
    // Before anything in it is believed.
    let signer = check_signature(from, &bytes, signature.as_deref())?;
    if let (None, Some(name)) = (&signer, must_be_signed) {
        bail!(
            "{from}: refused: not signed, but what the store has under this name was signed by {name}; \
             remove that first if this is meant"
        );
    }
    let manifest = Manifest::parse(&bytes).with_context(|| format!("{from}: {MANIFEST_FILE}"))?;
    Ok(Offer {
        manifest,
        bytes,
        signature,
        signer,
        sources: vec![source],
        dropped: Vec::new(),
    })
}

/// The signature that a source has; `None` only if it says that there is none.
fn signature(source: &dyn Source, limits: &Limits) -> Result<Option<String>> {
    let max = MAX_FILE_BYTES as usize;
    let bytes = fetch_small_if_any(SIGNATURE_FILE, max, source, limits, &Cancel::new());
    let Some(bytes) = bytes? else {
        return Ok(None);
    };
    let text = String::from_utf8(bytes);
    let text = text.with_context(|| format!("{}: {SIGNATURE_FILE}: no text", source.name()))?;
    Ok(Some(text))
}

impl<'a> Offer<'a> {
    /// Adds those of `others` that don't contradict.
    fn ask_others(&mut self, others: &[&'a dyn Source], limits: &Limits) {
        // Asked once and all at a time: they are not waited for longer than one of them takes.
        let once = Limits {
            retries: 0,
            ..limits.clone()
        };
        let is_signed = self.signature.is_some();
        let ask = |source: &dyn Source| -> (Result<Vec<u8>>, Result<Option<String>>) {
            let manifest = small(MANIFEST_FILE, &[source], &once);
            let signature = match is_signed {
                true => Ok(None),
                false => signature(source, &once),
            };
            (manifest, signature)
        };
        let answers: Vec<_> = thread::scope(|scope| {
            let asked: Vec<_> = (others.iter())
                .map(|source| scope.spawn(|| ask(*source)))
                .collect();
            let answers = asked.into_iter().map(|thread| thread.join());
            answers.map(|a| a.expect("asking doesn't panic")).collect()
        });
        let first = self.sources.last().map_or("", |source| source.name());
        for (source, (manifest, signature)) in others.iter().zip(answers) {
            let name = source.name();
            match manifest {
                Ok(bytes) if bytes != self.bytes => {
                    let why = format!("its {MANIFEST_FILE} is not that of {first}");
                    self.dropped.push((name.to_owned(), why));
                    continue;
                }
                // What was taken off the first may be there.
                Ok(bytes) if self.signature.is_none() => {
                    if let Ok(Some(text)) = signature {
                        match check_signature(name, &bytes, Some(&text)) {
                            Ok(signer) => (self.signer, self.signature) = (signer, Some(text)),
                            Err(error) => {
                                self.dropped.push((name.to_owned(), format!("{error:#}")));
                                continue;
                            }
                        }
                    }
                }
                // No answer is no contradiction; it may have shards, and fetching finds out.
                Ok(_) | Err(_) => {}
            }
            self.sources.push(*source);
        }
    }
}
