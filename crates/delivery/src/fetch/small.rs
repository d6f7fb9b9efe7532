//! Small files without a known digest: manifests and listings.

use std::{
    io::Read as _,
    thread,
    time::{Duration, Instant},
};

use super::{
    Cancel, Failure, Fault, FetchError, Limits,
    fault::Verdict,
    state::{Jitter, SourceState},
};
use crate::source::{Answer, Source, body_fault};

/// Fetches a whole file of at most `max_bytes` bytes, from the first source that has it, and returns which
/// source that was. Its bytes are unverified: the caller must check them.
///
/// Errors: [`FetchError`], with the reasons of all sources.
pub fn fetch_small(
    name: &str,
    max_bytes: usize,
    sources: &[&dyn Source],
    limits: &Limits,
    cancel: &Cancel,
) -> Result<(Vec<u8>, usize), FetchError> {
    fetch_from(sources, name, limits, cancel, |source| {
        read(source.open(name, None)?, name, max_bytes)
    })
}

/// As [`fetch_small`], from one source which may have no such file: `None` if it says so, or that access is
/// forbidden, or sends a web page instead. File hosts differ in how they report a missing file.
///
/// Errors: [`FetchError`].
pub fn fetch_small_if_any(
    name: &str,
    max_bytes: usize,
    source: &dyn Source,
    limits: &Limits,
    cancel: &Cancel,
) -> Result<Option<Vec<u8>>, FetchError> {
    let asked = fetch_from(&[source], name, limits, cancel, |source| {
        let answer = source.open(name, None);
        match answer.and_then(|answer| read(answer, name, max_bytes)) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(
                Fault::Missing { .. }
                | Fault::Refused {
                    status: 403 | 404 | 410,
                }
                | Fault::NotData { .. },
            ) => Ok(None),
            Err(fault) => Err(fault),
        }
    });
    Ok(asked?.0)
}

/// Asks each of `sources` for the file called `name`, repeatedly while that may help.
pub(crate) fn fetch_from<S: Source + ?Sized, T>(
    sources: &[&S],
    name: &str,
    limits: &Limits,
    cancel: &Cancel,
    ask: impl Fn(&S) -> Result<T, Fault>,
) -> Result<(T, usize), FetchError> {
    let began = Instant::now();
    let mut jitter = Jitter(limits.seed);
    let mut reasons = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        let mut state = SourceState::new(source.name().to_owned());
        while state.dropped.is_none() {
            wait_until(state.wait_until, began, cancel)?;
            let fault = match ask(source) {
                Ok(found) => return Ok((found, index)),
                Err(fault) => fault,
            };
            if fault.verdict() == Verdict::Again {
                let (before, now) = (state.n_failures, began.elapsed());
                state.fail(&fault, before, now, limits, jitter.next());
            } else {
                state.dropped = Some(fault.to_string());
            }
        }
        reasons.extend(state.dropped.map(|why| (state.name, why)));
    }
    let blob = name.to_owned();
    Err(Failure::Exhausted { blob, reasons }.into())
}

fn wait_until(time: Duration, began: Instant, cancel: &Cancel) -> Result<(), FetchError> {
    loop {
        if cancel.is_cancelled() {
            return Err(FetchError::Cancelled);
        }
        let left = time.saturating_sub(began.elapsed());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(Duration::from_millis(100)));
    }
}

/// The whole body of a response, if it has the promised length and is not longer than `max_bytes`.
pub(crate) fn read(answer: Answer, name: &str, max_bytes: usize) -> Result<Vec<u8>, Fault> {
    answer.head.check_kind(name)?;
    let promised = answer.head.content_length;
    let too_long = |found| Fault::TooLarge {
        limit: max_bytes as u64,
        found,
    };
    if let Some(found) = promised.filter(|&promised| promised > max_bytes as u64) {
        return Err(too_long(found));
    }
    let mut bytes = Vec::new();
    let outcome = answer
        .body
        .take(max_bytes as u64 + 1)
        .read_to_end(&mut bytes);
    let received = bytes.len() as u64;
    let expected = promised.unwrap_or(received);
    outcome.map_err(|error| body_fault(&error, received, expected))?;
    if bytes.len() > max_bytes {
        return Err(too_long(received));
    }
    if received < expected {
        return Err(Fault::Cut { received, expected });
    }
    Ok(bytes)
}
