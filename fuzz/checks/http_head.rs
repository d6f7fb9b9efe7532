//! Heads of HTTP answers, each given to the plan of a fetch: no answer makes it store what wasn't asked for.

use std::time::Duration;

use sterna_delivery::fetch::{Action, Blob, Fault, Fetch, Head, Limits};
use sterna_delivery::hash::{Algorithm, BlockDigests, Expected, digest_of};

const SIZE: u64 = 100;

/// Panics if a promise of the planner is broken. The input is the size of requests, then what a server sends:
/// a status line, headers, an empty line, a body.
pub(crate) fn check(data: &[u8]) {
    let Some((&first, data)) = data.split_first() else {
        return;
    };
    let end = data.windows(2).position(|two| two == b"\n\n");
    let (head, body) = match end {
        Some(end) => (&data[..end], &data[end + 2..]),
        None => (data, &[][..]),
    };
    let text = String::from_utf8_lossy(head);
    let mut lines = text.lines();
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1)?.parse().ok());
    let headers: Vec<(String, &str)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect();
    let head = Head::read(status.unwrap_or(200), |name| {
        let found = headers.iter().find(|(existing, _)| existing == name);
        found.map(|(_, value)| (*value).to_owned())
    });
    for with_blocks in [false, true] {
        fetch(&head, body, u64::from(first), with_blocks);
    }
}

/// Answers every request with `head` and `body`, until the fetch waits, ends or is asked often enough.
fn fetch(head: &Head, body: &[u8], segment_bytes: u64, with_blocks: bool) {
    let content: Vec<u8> = (0..SIZE as u8).collect();
    let expected = Expected::Digest(digest_of(Algorithm::Sha256, &content));
    let mut blob = Blob::new("model.bin", SIZE, expected).expect("a plain name");
    if with_blocks {
        let blocks = BlockDigests::of(Algorithm::Blake3, 16, &content).expect("blocks of 16 bytes");
        blob = blob.with_blocks(blocks).expect("digests of all its blocks");
    }
    let limits = Limits {
        segment_bytes: segment_bytes.max(1),
        ..Limits::default()
    };
    let mut plan = Fetch::new(vec![blob], vec!["source".to_owned()], limits).expect("one blob");
    let mut stored = vec![0; content.len()];
    let mut now = Duration::ZERO;
    for _ in 0..40 {
        match plan.poll(now) {
            Action::Transfer(mut transfer) => {
                let outcome = (|| -> Result<(), Fault> {
                    transfer.begin(head)?;
                    let asked = transfer.request().range.clone().unwrap_or(0..SIZE);
                    for piece in body.chunks(7) {
                        let offset = transfer.offset();
                        let wanted = transfer.wanted(piece)?;
                        let end = offset + wanted.len() as u64;
                        assert!(wanted.is_empty() || offset >= asked.start && end <= asked.end);
                        stored[offset as usize..end as usize].copy_from_slice(wanted);
                        transfer.stored(wanted)?;
                        if transfer.is_complete() {
                            break;
                        }
                    }
                    transfer.end()
                })();
                plan.transferred(transfer, outcome, now);
            }
            Action::Hash(mut job) => {
                let range = job.remaining();
                job.take(&stored[range.start as usize..range.end as usize]);
                plan.hashed(job);
            }
            Action::Commit { blob, .. } => {
                assert_eq!(stored, content, "wrong bytes were believed");
                plan.committed(blob);
            }
            Action::Wait(until) => match until {
                Some(until) => now = now.max(until),
                None => return,
            },
            Action::Done | Action::Failed(_) => return,
            _ => {}
        }
    }
}
