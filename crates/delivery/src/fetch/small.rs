//! Small files without a known digest: manifests and listings.

use std::{
    io::{self, Read as _},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use super::{
    Cancel, Failure, Fault, FetchError, Limits, RateLimit,
    fault::Verdict,
    state::{Jitter, SourceState},
};
use crate::source::{Answer, Source, body_fault};

/// Bytes read at once.
const PIECE: usize = 64 << 10;

/// Retries of a source that has never answered, where nothing listens: it may be about to start.
const CLOSED_RETRIES: u32 = 2;

/// How often it is looked whether there is something to do.
const TICK: Duration = Duration::from_millis(20);

/// Fetches the whole of a file of at most `max_bytes` bytes, from the first source that has it, and says
/// which source that was. A source that is silent or fails is not waited for while another can be asked. Nothing is known of its bytes: whoever asks for them must check them.
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
        read(source.open(name, None)?, name, max_bytes, limits)
    })
}

/// Asks `sources` for the file called `name` until one has it, again and again while that may help; each next
/// one once those before it have failed or said nothing for a while.
pub(crate) fn fetch_from<S: Source + ?Sized, T: Send>(
    sources: &[&S],
    name: &str,
    limits: &Limits,
    cancel: &Cancel,
    ask: impl Fn(&S) -> Result<T, Fault> + Sync,
) -> Result<(T, usize), FetchError> {
    let is_found = |found: &[Standing<T>], _| found.iter().any(|s| matches!(s, Standing::Has(_)));
    let found = race(sources, limits, limits.grace, cancel, ask, is_found)?;
    let mut reasons = Vec::new();
    for (index, (source, standing)) in sources.iter().zip(found).enumerate() {
        match standing {
            Standing::Has(found) => return Ok((found, index)),
            Standing::GivenUp(why) => reasons.push((source.name().to_owned(), why)),
            Standing::Silent | Standing::Failing => {}
        }
    }
    let blob = name.to_owned();
    Err(Failure::Exhausted { blob, reasons }.into())
}

/// What came of asking a source so far.
#[derive(Debug)]
pub(crate) enum Standing<T> {
    /// It has said nothing, or was not asked yet.
    Silent,
    /// It has failed, and may yet answer.
    Failing,
    /// It is not asked again, for this reason.
    GivenUp(String),
    /// It has what it was asked for.
    Has(T),
}

/// Asks `sources` in their order until `is_enough` says so, of what came of each and the time that has passed,
/// or nothing more is to be expected. Another is asked beside those that have said nothing for `stagger`.
/// Requests that are still under way at the end are interrupted.
///
/// Errors: [`FetchError::Cancelled`], [`FetchError::Thread`].
pub(crate) fn race<S: Source + ?Sized, T: Send>(
    sources: &[&S],
    limits: &Limits,
    stagger: Duration,
    cancel: &Cancel,
    ask: impl Fn(&S) -> Result<T, Fault> + Sync,
    mut is_enough: impl FnMut(&[Standing<T>], Duration) -> bool,
) -> Result<Vec<Standing<T>>, FetchError> {
    let began = Instant::now();
    let closed_limits = Limits {
        retries: limits.retries.min(CLOSED_RETRIES),
        ..limits.clone()
    };
    let mut jitter = Jitter(limits.seed);
    let mut states: Vec<_> = (sources.iter())
        .map(|source| SourceState::new(source.name().to_owned()))
        .collect();
    let mut standings: Vec<_> = sources.iter().map(|_| Standing::Silent).collect();
    let mut asking = vec![false; sources.len()];
    let mut last_start = None;
    let (sender, answers) = mpsc::channel();
    let ask = &ask;
    thread::scope(|scope| {
        let outcome = loop {
            let now = began.elapsed();
            let is_open = |i: usize| matches!(standings[i], Standing::Silent | Standing::Failing);
            if cancel.is_cancelled() {
                break Err(FetchError::Cancelled);
            }
            if is_enough(&standings, now) || !(0..sources.len()).any(is_open) {
                break Ok(());
            }
            let next = (0..sources.len())
                .filter(|&i| is_open(i) && !asking[i] && states[i].wait_until <= now)
                .min_by_key(|&i| (states[i].failures, i));
            let is_turn = !asking.contains(&true)
                || last_start.is_none_or(|start: Duration| now >= start.saturating_add(stagger));
            if let Some(index) = next.filter(|_| is_turn) {
                (asking[index], last_start) = (true, Some(now));
                let (sender, source) = (sender.clone(), sources[index]);
                let asked = thread::Builder::new().name("ask".into());
                let asked = asked.spawn_scoped(scope, move || {
                    // Nobody listens any more once the race is over.
                    let _ = sender.send((index, ask(source)));
                });
                match asked {
                    Ok(_) => continue,
                    Err(error) => {
                        asking[index] = false;
                        break Err(FetchError::Thread(error));
                    }
                }
            }
            let Ok((index, answer)) = answers.recv_timeout(TICK) else {
                continue;
            };
            asking[index] = false;
            standings[index] = match answer {
                Ok(found) => Standing::Has(found),
                Err(fault) if fault.verdict() == Verdict::Again => {
                    let (state, now) = (&mut states[index], began.elapsed());
                    let limits = match fault {
                        Fault::Closed { .. } => &closed_limits,
                        _ => limits,
                    };
                    state.fail(&fault, state.n_failures, now, limits, jitter.next());
                    match state.dropped.take() {
                        Some(why) => Standing::GivenUp(why),
                        None => Standing::Failing,
                    }
                }
                Err(fault) => Standing::GivenUp(fault.to_string()),
            };
        };
        // Again and again: one may be about to begin its request.
        while asking.contains(&true) {
            let under_way = sources.iter().zip(&asking).filter(|(_, asking)| **asking);
            under_way.for_each(|(source, _)| source.interrupt());
            if let Ok((index, _)) = answers.recv_timeout(TICK * 5) {
                asking[index] = false;
            }
        }
        outcome
    })?;
    Ok(standings)
}

/// The whole of an answer, if it is as long as it says and not longer than `max_bytes`, at no more than the rate of
/// `limits`.
pub(crate) fn read(
    answer: Answer,
    name: &str,
    max_bytes: usize,
    limits: &Limits,
) -> Result<Vec<u8>, Fault> {
    answer.head.check_kind(name)?;
    let promised = answer.head.content_length;
    let too_long = |found| Fault::TooLarge {
        limit: max_bytes as u64,
        found,
    };
    if let Some(found) = promised.filter(|&promised| promised > max_bytes as u64) {
        return Err(too_long(found));
    }
    let mut body = answer.body.take(max_bytes as u64 + 1);
    let mut rate_limit = limits.bytes_per_second.map(RateLimit::new);
    let piece = (rate_limit.as_ref()).map_or(PIECE, |rate_limit| rate_limit.piece().min(PIECE));
    let (mut bytes, mut buffer) = (Vec::new(), vec![0; piece]);
    // Where a rate limit leaves little, a quarter of that shows that something comes.
    let share = limits.bytes_per_second.map_or(f64::INFINITY, |rate| {
        rate as f64 * limits.least_rate_over.as_secs_f64() / 4.0
    });
    let least = limits.trickle().min(share as u64);
    let began = Instant::now();
    let mut mark = (began, 0);
    loop {
        let received = bytes.len() as u64;
        match body.read(&mut buffer) {
            Ok(0) => break,
            Ok(n) => {
                bytes.extend_from_slice(&buffer[..n]);
                if let Some(rate_limit) = &mut rate_limit {
                    thread::sleep(rate_limit.take(n, began.elapsed()));
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(body_fault(&error, received, promised.unwrap_or(received))),
        }
        if mark.0.elapsed() >= limits.least_rate_over {
            let received = bytes.len() as u64;
            if received - mark.1 < least {
                return Err(Fault::Stalled);
            }
            mark = (Instant::now(), received);
        }
    }
    let received = bytes.len() as u64;
    let expected = promised.unwrap_or(received);
    if bytes.len() > max_bytes {
        return Err(too_long(received));
    }
    if received < expected {
        return Err(Fault::Cut { received, expected });
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;
    use crate::fetch::Head;

    #[test]
    fn small_files_come_at_the_rate_too() {
        let bytes = vec![7; 60_000];
        let answer = Answer {
            head: Head {
                status: 200,
                content_length: Some(60_000),
                ..Head::default()
            },
            body: Box::new(Cursor::new(bytes.clone())),
        };
        let limits = Limits {
            bytes_per_second: Some(100_000),
            // So low a rate isn't taken for nothing.
            least_rate: 1 << 20,
            least_rate_over: Duration::from_millis(100),
            ..Limits::default()
        };
        let began = Instant::now();
        assert_eq!(read(answer, "x", 1 << 20, &limits).unwrap(), bytes);
        // But for what may be caught up.
        assert!(began.elapsed() >= Duration::from_millis(300));
    }
}
