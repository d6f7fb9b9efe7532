//! Groups that are made of those of an earlier version, by deltas beside the package.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use sterna_format::delta::{
    DELTAS_FILE, Delta, DeltaError, DeltaList, ListedDelta, MAX_LIST_BYTES,
};
use sterna_format::digest::Digest;
use sterna_format::rdrr::{Group, Manifest, Package, Span};

use super::sources::says_none;
use super::{PullError, Transaction, Warning, known};
use crate::fetch::{Failure, FetchError, Limits, Standing, fetch_small, race, read_small};
use crate::hash::{Expected, Hasher, Mismatch, Verifier};
use crate::package::{Contents, group_spans};
use crate::source::Source;
use crate::store::{Blob, Piece, StoreError};

/// What came of deltas.
#[derive(Debug, Clone, Default)]
pub(super) struct Made {
    /// Bytes of the groups that were made.
    pub(super) bytes: u64,
    /// Bytes of deltas that were received, of no use or not.
    pub(super) received: u64,
    /// The same by source.
    pub(super) received_by: Vec<(String, u64)>,
}

/// Why a delta wasn't used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaFailure {
    /// It isn't to be had.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// It isn't the file that the list names.
    #[error("{0}")]
    OtherFile(Mismatch),
    /// It is no delta, or none of the group that is here.
    #[error(transparent)]
    Delta(#[from] DeltaError),
    /// What comes out isn't what the manifest names.
    #[error("what it makes is another group: {0}")]
    OtherTarget(Mismatch),
    /// The group that it is of is here no more.
    #[error("the group that it is of is not in the store any more")]
    NoBase,
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Transaction<'_> {
    /// Makes the groups that aren't here of those that are, as far as the package has deltas which are smaller. What
    /// can't be made is left to be fetched, with a warning.
    ///
    /// Errors: those of the store, and [`FetchError::Cancelled`].
    pub(super) fn make_groups(
        &self,
        contents: &Contents,
        manifest: &Manifest,
        package: &Package,
        sources: &[&dyn Source],
    ) -> Result<Made, PullError> {
        let mut made = Made::default();
        let sources = known(sources);
        let here = self.store.groups()?;
        if here.is_empty() || sources.is_empty() {
            return Ok(made);
        }
        let mut wanted = Vec::new();
        for group in &manifest.groups {
            if here.find(&group.hash).is_none() {
                let missing = self.missing(contents, package, group)?;
                if !missing.is_empty() {
                    wanted.push((group, missing));
                }
            }
        }
        if wanted.is_empty() {
            return Ok(made);
        }
        let Some(list) = self.delta_list(&sources)? else {
            return Ok(made);
        };
        for (group, missing) in wanted {
            let size = group_spans(package, group).map(|span| span.size).sum();
            let smallest = (list.deltas.iter())
                .filter(|delta| delta.target == group.hash)
                .filter(|delta| delta.size < size)
                .filter_map(|delta| Some((delta, here.find(&delta.base)?)))
                .min_by_key(|(delta, _)| delta.size);
            let Some((delta, base)) = smallest else {
                continue;
            };
            let to = To {
                contents,
                package,
                group,
                missing: &missing,
                size,
            };
            match self.make(delta, base, &to, &sources, &mut made) {
                Ok(()) => made.bytes += size,
                Err(DeltaFailure::Fetch(FetchError::Cancelled)) => {
                    return Err(FetchError::Cancelled.into());
                }
                Err(why) => self.warn(Warning::DeltaNotUsed {
                    file: delta.file.clone(),
                    group: group.id.clone(),
                    why,
                }),
            }
        }
        Ok(made)
    }

    /// The pieces of `group` that aren't here completely, and which bytes of their shards are lacking.
    fn missing(
        &self,
        contents: &Contents,
        package: &Package,
        group: &Group,
    ) -> Result<Missing, StoreError> {
        let mut missing = Missing::new();
        for span in group_spans(package, group) {
            let (start, end) = (span.offset, span.offset + span.size);
            let arrived = self.pull.extents(&contents.shards()[span.shard].stored())?;
            let lacking = without(start..end, &arrived);
            if !lacking.is_empty() {
                missing.insert(span, lacking);
            }
        }
        Ok(missing)
    }

    /// The list of deltas, of the first source that has one; `None` if there is none, or none that can be read.
    fn delta_list(&self, sources: &[&dyn Source]) -> Result<Option<DeltaList>, PullError> {
        // Nothing depends on it.
        let limits = Limits {
            retries: 0,
            ..self.limits.clone()
        };
        // Mirrors needn't have it, so the others are asked, too.
        let is_found = |found: &[Standing<Option<Vec<u8>>>], _: Duration| {
            found.iter().any(|s| matches!(s, Standing::Has(Some(_))))
        };
        let found = race(
            sources,
            &limits,
            limits.grace,
            self.cancel,
            |source| {
                let answer = source.open(DELTAS_FILE, None);
                match answer
                    .and_then(|answer| read_small(answer, DELTAS_FILE, MAX_LIST_BYTES, &limits))
                {
                    Ok(bytes) => Ok(Some(bytes)),
                    Err(fault) if says_none(&fault) => Ok(None),
                    Err(fault) => Err(fault),
                }
            },
            is_found,
        );
        let why = match found.and_then(|found| first_list(sources, found)) {
            Ok(None) => return Ok(None),
            Ok(Some(bytes)) => match DeltaList::parse(&bytes) {
                Ok(list) => return Ok(Some(list)),
                Err(problem) => problem.to_string(),
            },
            Err(FetchError::Cancelled) => return Err(FetchError::Cancelled.into()),
            Err(error) => error.to_string(),
        };
        self.warn(Warning::NoDeltas {
            from: self.from.to_owned(),
            why,
        });
        Ok(None)
    }

    /// Makes a group of the one that `base` is.
    fn make(
        &self,
        listed: &ListedDelta,
        base: &[Piece],
        to: &To<'_>,
        sources: &[&dyn Source],
        made: &mut Made,
    ) -> Result<(), DeltaFailure> {
        // Little: the list was read.
        let max = listed.size as usize;
        let fetched = fetch_small(&listed.file, max, sources, self.limits, self.cancel);
        let (bytes, source) = fetched?;
        let n_bytes = bytes.len() as u64;
        made.received += n_bytes;
        add_received(&mut made.received_by, sources[source].name(), n_bytes);
        let is_it = Expected::Digest(listed.hash).verify(&bytes);
        is_it.map_err(DeltaFailure::OtherFile)?;
        let delta = Delta::parse(&bytes)?;
        let base_size = base.iter().map(|piece| piece.len).sum();
        delta.check_target(&to.group.hash, to.size)?;
        // What the list says, before all of it is read.
        delta.check_base(&listed.base, base_size)?;
        delta.check_base(&self.digest_of(base, &listed.base)?, base_size)?;
        let applied = self.apply(&delta, base, to);
        if applied.is_err() {
            for (span, lacking) in to.missing {
                for range in lacking {
                    self.pull.discard(&to.shard(span), range.clone())?;
                }
            }
        }
        applied
    }

    /// The digest of what `base` is, by the algorithm of `listed`.
    fn digest_of(&self, base: &[Piece], listed: &Digest) -> Result<Digest, DeltaFailure> {
        let mut reader = self.pull.reader(base)?.ok_or(DeltaFailure::NoBase)?;
        let mut hasher = Hasher::new(listed.algorithm());
        let mut left: u64 = base.iter().map(|piece| piece.len).sum();
        let mut buffer = vec![0; 1 << 20];
        while left > 0 {
            self.check_cancel()?;
            // At most the length of the buffer.
            let piece = &mut buffer[..left.min(1 << 20) as usize];
            reader.read(piece)?;
            hasher.update(piece);
            left -= piece.len() as u64;
        }
        Ok(hasher.finish())
    }

    fn check_cancel(&self) -> Result<(), DeltaFailure> {
        match self.cancel.is_cancelled() {
            true => Err(FetchError::Cancelled.into()),
            false => Ok(()),
        }
    }

    /// Writes what `delta` makes of `base` to where it is lacking, and verifies it.
    fn apply(&self, delta: &Delta<'_>, base: &[Piece], to: &To<'_>) -> Result<(), DeltaFailure> {
        let mut reader = self.pull.reader(base)?.ok_or(DeltaFailure::NoBase)?;
        let mut verifier = Verifier::new(Expected::Digest(to.group.hash), to.size);
        let mut spans = group_spans(to.package, to.group);
        let mut span = spans.next();
        // Bytes that were made of it.
        let mut at = 0;
        delta.apply(
            |bytes| {
                self.check_cancel()?;
                Ok(reader.read(bytes)?)
            },
            |mut bytes| {
                verifier.update(bytes);
                while let Some(now) = span.filter(|_| !bytes.is_empty()) {
                    // Of what came, so it fits an address.
                    let n = (now.size - at).min(bytes.len() as u64) as usize;
                    let (here, later) = bytes.split_at(n);
                    let start = now.offset + at;
                    for lacking in to.missing.get(&now).into_iter().flatten() {
                        let range = lacking.start.max(start)..lacking.end.min(start + n as u64);
                        if !range.is_empty() {
                            // Within `here`.
                            let part = (range.start - start) as usize..(range.end - start) as usize;
                            let shard = to.shard(&now);
                            self.pull.write_at(&shard, range.start, &here[part])?;
                        }
                    }
                    (bytes, at) = (later, at + n as u64);
                    if at == now.size {
                        (span, at) = (spans.next(), 0);
                    }
                }
                Ok::<(), DeltaFailure>(())
            },
        )?;
        verifier.finish().map_err(DeltaFailure::OtherTarget)?;
        Ok(())
    }
}

/// What is lacking of pieces of a group: ranges of bytes of their shards.
type Missing = HashMap<Span, Vec<Range<u64>>>;

/// The parts of `range` that aren't in `arrived`: ranges that neither overlap nor touch, in order.
fn without(range: Range<u64>, arrived: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut lacking = Vec::new();
    let mut at = range.start;
    for here in arrived {
        lacking.push(at..here.start.min(range.end));
        at = at.max(here.end);
    }
    lacking.push(at..range.end);
    lacking.retain(|part| !part.is_empty());
    lacking
}

/// The list that one of `sources` has; `None` if all say that they have none.
///
/// Errors: none was found, and not all say so.
fn first_list(
    sources: &[&dyn Source],
    found: Vec<Standing<Option<Vec<u8>>>>,
) -> Result<Option<Vec<u8>>, FetchError> {
    let mut reasons = Vec::new();
    for (source, standing) in sources.iter().zip(found) {
        match standing {
            Standing::Has(Some(bytes)) => return Ok(Some(bytes)),
            Standing::GivenUp(why) => reasons.push((source.name().to_owned(), why)),
            Standing::Has(None) | Standing::Silent | Standing::Failing => {}
        }
    }
    let blob = DELTAS_FILE.to_owned();
    match reasons.is_empty() {
        true => Ok(None),
        false => Err(Failure::Exhausted { blob, reasons }.into()),
    }
}

/// A group that is to be made.
struct To<'a> {
    contents: &'a Contents,
    package: &'a Package,
    group: &'a Group,
    missing: &'a Missing,
    size: u64,
}

impl To<'_> {
    fn shard(&self, span: &Span) -> Blob {
        self.contents.shards()[span.shard].stored()
    }
}

/// Adds bytes to what came from the source called `name`.
pub(super) fn add_received(received_by: &mut Vec<(String, u64)>, name: &str, n_bytes: u64) {
    match received_by.iter_mut().find(|(source, _)| source == name) {
        Some((_, sum)) => *sum += n_bytes,
        None => received_by.push((name.to_owned(), n_bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_lacking_is_made() {
        let all = vec![Range { start: 10, end: 20 }];
        assert_eq!(without(10..20, &[]), all);
        assert_eq!(without(10..20, &[0..5, 25..30]), all);
        assert_eq!(without(10..20, &[0..10, 20..30]), all);
        assert_eq!(without(10..20, &[0..12, 14..15, 18..30]), [12..14, 15..18]);
        assert_eq!(without(10..20, &[0..1, 5..20]), []);
        assert_eq!(without(10..10, &[]), []);
    }
}
