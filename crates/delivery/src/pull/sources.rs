//! Which of several sources to believe: all are asked for the manifest, and what they answer is judged by
//! [`Offer`].

use std::time::Duration;

use sterna_format::rdrr::MANIFEST_FILE;

use super::{PullError, Rejection};
use crate::fetch::{Cancel, Failure, Fault, FetchError, Limits, Standing, race, read_small};
use crate::hash::{Digest, Expected};
use crate::package::{MAX_FILE_BYTES, Offer, PackageError, Rejected, check_json, signature_text};
use crate::sign::{SIGNATURE_FILE, TrustList};
use crate::source::Source;

/// A trusted package, and who has its files.
pub(super) struct Chosen<'a> {
    pub(super) offer: Offer,
    /// Who may be asked for files: everybody but those who have another manifest. First those who have this
    /// one, then those who didn't answer, and may have shards.
    pub(super) sources: Vec<&'a dyn Source>,
    /// How many have it.
    pub(super) n_sure: usize,
    /// Sources that have said nothing.
    pub(super) silent: Vec<String>,
    /// Sources that are not asked again, and why.
    pub(super) rejected: Vec<(String, Rejection)>,
}

impl<'a> Chosen<'a> {
    /// Adds `sources` that have the package, too.
    pub(super) fn join(&mut self, sources: Vec<&'a dyn Source>) {
        let n = sources.len();
        self.sources.splice(self.n_sure..self.n_sure, sources);
        self.n_sure += n;
    }
}

/// The criteria for sources.
pub(super) struct Judge<'a> {
    pub(super) trust: &'a TrustList,
    /// The signer of an earlier revision; then an unsigned one is not trusted.
    pub(super) must_be_signed: Option<&'a str>,
    /// The digest of the manifest, where the address says it.
    pub(super) manifest: Option<Digest>,
    pub(super) limits: &'a Limits,
    pub(super) cancel: &'a Cancel,
}

/// Whether a source that fails so has no such file, where it is one that a package may lack: hosts of files differ
/// in how they say that there is none.
pub(super) fn says_none(fault: &Fault) -> bool {
    matches!(
        fault,
        Fault::Missing { .. }
            | Fault::Refused {
                status: 403 | 404 | 410,
            }
            | Fault::NotData { .. }
    )
}

/// What one source has.
struct Answer {
    manifest: Vec<u8>,
    /// The text of its signature, `None` only if it says that there is none.
    signature: Result<Option<String>, PackageError>,
    offer: Result<Offer, PullError>,
}

impl Judge<'_> {
    /// Asks all `sources` at once what the package is, and believes the first of them, in their order, that
    /// can say it. Those that haven't failed are waited for a while; those that don't answer now may still
    /// have shards.
    ///
    /// Errors: no source has a trusted manifest.
    pub(super) fn choose<'a>(&self, sources: &[&'a dyn Source]) -> Result<Chosen<'a>, PullError> {
        let is_enough = |found: &[Standing<Option<Answer>>], now: Duration| {
            let is_believed = |standing: &Standing<Option<Answer>>| match standing {
                Standing::Has(Some(answer)) => answer.offer.is_ok(),
                _ => false,
            };
            let is_waited_for = |standing: &_| matches!(standing, Standing::Silent);
            found.iter().any(is_believed)
                && (now >= self.limits.grace || !found.iter().any(is_waited_for))
        };
        let found = race(
            sources,
            self.limits,
            Duration::ZERO,
            self.cancel,
            |source| self.ask(source),
            is_enough,
        )?;
        let mut chosen: Option<Chosen<'a>> = None;
        let mut failures = Vec::new();
        let mut doubtful = Vec::new();
        let mut silent = Vec::new();
        for (source, standing) in sources.iter().zip(found) {
            let name = || source.name().to_owned();
            let answer = match standing {
                Standing::Has(Some(answer)) => answer,
                Standing::Has(None) => {
                    doubtful.push(*source);
                    failures.push((name(), PullError::NoManifest { from: name() }, false));
                    continue;
                }
                Standing::GivenUp(why) => {
                    doubtful.push(*source);
                    let error = FetchError::from(Failure::Exhausted {
                        blob: MANIFEST_FILE.to_owned(),
                        reasons: vec![(name(), why)],
                    });
                    failures.push((name(), error.into(), false));
                    continue;
                }
                Standing::Failing => {
                    doubtful.push(*source);
                    continue;
                }
                Standing::Silent => {
                    doubtful.push(*source);
                    silent.push(name());
                    continue;
                }
            };
            match (&mut chosen, answer.offer) {
                (Some(chosen), _) => {
                    let compared =
                        (answer.signature.map_err(Rejected::from)).and_then(|signature| {
                            let offer = &mut chosen.offer;
                            offer.compare(source.name(), &answer.manifest, signature, self.trust)
                        });
                    match compared {
                        Ok(()) => chosen.sources.push(*source),
                        Err(why) => chosen.rejected.push((name(), why.into())),
                    }
                }
                (None, Ok(offer)) => {
                    chosen = Some(Chosen {
                        offer,
                        sources: vec![*source],
                        n_sure: 0,
                        silent: Vec::new(),
                        rejected: Vec::new(),
                    });
                }
                (None, Err(error)) => failures.push((name(), error, true)),
            }
        }
        if let Some(mut chosen) = chosen {
            chosen.n_sure = chosen.sources.len();
            chosen.sources.extend(doubtful);
            chosen.silent = silent;
            let lied = failures.into_iter().filter(|(.., has_one)| *has_one);
            let lied = lied.map(|(name, error, _)| (name, Rejection::Failed(error)));
            chosen.rejected.splice(0..0, lied);
            return Ok(chosen);
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

    /// What `source` has; `None` if it says that it has no manifest.
    fn ask(&self, source: &dyn Source) -> Result<Option<Answer>, Fault> {
        let from = source.name();
        let read = |file: &str| {
            let answer = source.open(file, None)?;
            read_small(answer, file, MAX_FILE_BYTES as usize, self.limits)
        };
        let manifest = match read(MANIFEST_FILE) {
            Ok(bytes) => bytes,
            Err(Fault::Missing { .. } | Fault::Refused { status: 404 | 410 }) => return Ok(None),
            Err(fault) => return Err(fault),
        };
        // Before its signature is asked for.
        let is_expected = match self.manifest {
            Some(digest) => Expected::Digest(digest).verify(&manifest).map(|_| ()),
            None => Ok(()),
        };
        let checked = (is_expected.map_err(|problem| PullError::Mismatch {
            file: MANIFEST_FILE.to_owned(),
            problem,
        }))
        .and_then(|()| Ok(check_json(from, &manifest)?));
        if let Err(error) = checked {
            return Ok(Some(Answer {
                manifest,
                signature: Ok(None),
                offer: Err(error),
            }));
        }
        let signature = match read(SIGNATURE_FILE) {
            Ok(bytes) => signature_text(from, bytes).map(Some),
            Err(fault) if says_none(&fault) => Ok(None),
            Err(fault) => return Err(fault),
        };
        let offer = match &signature {
            Ok(text) => {
                let (bytes, text) = (manifest.clone(), text.clone());
                Offer::read(from, bytes, text, self.trust, self.must_be_signed)
                    .map_err(PullError::from)
            }
            Err(_) => Err(PackageError::SignatureNotText {
                from: from.to_owned(),
            }
            .into()),
        };
        Ok(Some(Answer {
            manifest,
            signature,
            offer,
        }))
    }
}
