//! Which of several sources to trust: each is asked for the manifest, and [`Offer`] judges the responses.

use std::thread;

use sterna_format::rdrr::MANIFEST_FILE;

use super::{PullError, Rejection, small};
use crate::fetch::{Cancel, FetchError, Limits, fetch_small_if_any};
use crate::package::{MAX_FILE_BYTES, Offer, Rejected, check_json, signature_text};
use crate::sign::{SIGNATURE_FILE, TrustList};
use crate::source::Source;

/// A trusted package, and who has its files.
pub(super) struct Chosen<'a> {
    pub(super) offer: Offer,
    /// Sources that may be asked for files: all but those with another manifest.
    pub(super) sources: Vec<&'a dyn Source>,
    /// Dropped sources, and why.
    pub(super) rejected: Vec<(String, Rejection)>,
}

/// The criteria for sources.
pub(super) struct Judge<'a> {
    pub(super) trust: &'a TrustList,
    /// The signer of an earlier revision; then an unsigned one is not trusted.
    pub(super) must_be_signed: Option<&'a str>,
    pub(super) limits: &'a Limits,
}

/// The response of one of the other sources.
struct Answers {
    manifest: Result<Vec<u8>, FetchError>,
    signature: Result<Option<String>, PullError>,
}

impl Judge<'_> {
    /// Asks `sources` in turn for the package, and all after the first that has it whether they have the
    /// same. Those that don't respond now may still have shards.
    ///
    /// Errors: no source has a trusted manifest.
    pub(super) fn choose<'a>(&self, sources: &[&'a dyn Source]) -> Result<Chosen<'a>, PullError> {
        let mut silent = Vec::new();
        let mut failures: Vec<(String, PullError, bool)> = Vec::new();
        for (i, source) in sources.iter().enumerate() {
            let name = source.name().to_owned();
            let bytes = match small(MANIFEST_FILE, &[*source], self.limits) {
                Ok(bytes) => bytes,
                Err(error) => {
                    silent.push(*source);
                    failures.push((name, error.into(), false));
                    continue;
                }
            };
            match self.believe(*source, bytes) {
                Ok(offer) => {
                    let rejected = failures.into_iter().filter(|(.., has_one)| *has_one);
                    silent.push(*source);
                    let mut chosen = Chosen {
                        offer,
                        sources: silent,
                        rejected: rejected
                            .map(|(name, error, _)| (name, Rejection::Failed(error)))
                            .collect(),
                    };
                    self.ask_others(&mut chosen, &sources[i + 1..]);
                    return Ok(chosen);
                }
                Err(error) => failures.push((name, error, true)),
            }
        }
        let mut reasons: Vec<_> = (failures.into_iter())
            .map(|(name, error, _)| (name, error))
            .collect();
        match (reasons.pop(), reasons.is_empty()) {
            (Some((_, only)), true) => Err(only),
            (last, _) => {
                reasons.extend(last);
                Err(PullError::NoPackage { reasons })
            }
        }
    }

    /// The offer of `source`, with `bytes` as its manifest.
    fn believe(&self, source: &dyn Source, bytes: Vec<u8>) -> Result<Offer, PullError> {
        let from = source.name();
        // Before its signature is requested.
        check_json(from, &bytes)?;
        let signature = signature(source, self.limits)?;
        let offer = Offer::read(from, bytes, signature, self.trust, self.must_be_signed)?;
        Ok(offer)
    }

    /// Adds those of `others` that don't contradict.
    fn ask_others<'a>(&self, chosen: &mut Chosen<'a>, others: &[&'a dyn Source]) {
        // Asked once and in parallel: the wait is no longer than one of them takes.
        let once = Limits {
            retries: 0,
            ..self.limits.clone()
        };
        let is_signed = chosen.offer.signature().is_some();
        let ask = |source: &dyn Source| Answers {
            manifest: small(MANIFEST_FILE, &[source], &once),
            signature: match is_signed {
                true => Ok(None),
                false => signature(source, &once),
            },
        };
        let answers: Vec<_> = thread::scope(|scope| {
            let asked: Vec<_> = (others.iter())
                .map(|source| scope.spawn(|| ask(*source)))
                .collect();
            let answers = asked.into_iter().map(|thread| thread.join());
            answers.map(|a| a.expect("asking doesn't panic")).collect()
        });
        for (source, answers) in others.iter().zip(answers) {
            // No response is no contradiction; it may have shards, and fetching finds out.
            if let Ok(bytes) = answers.manifest {
                let signature = answers.signature.unwrap_or_default();
                let compared = (chosen.offer).compare(source.name(), &bytes, signature, self.trust);
                if let Err(rejected) = compared {
                    chosen.reject(*source, rejected);
                    continue;
                }
            }
            chosen.sources.push(*source);
        }
    }
}

impl Chosen<'_> {
    fn reject(&mut self, source: &dyn Source, why: Rejected) {
        self.rejected.push((source.name().to_owned(), why.into()));
    }
}

/// The signature that a source has; `None` only if it says that there is none.
fn signature(source: &dyn Source, limits: &Limits) -> Result<Option<String>, PullError> {
    let max = MAX_FILE_BYTES as usize;
    let bytes = fetch_small_if_any(SIGNATURE_FILE, max, source, limits, &Cancel::new());
    Ok(match bytes? {
        Some(bytes) => Some(signature_text(source.name(), bytes)?),
        None => None,
    })
}
