//! Opening and loading from files that JavaScript has.

use bytes::Bytes;
use sterna::{Machine, Result, Want};

use crate::js::Files;

/// Bytes that are asked of JavaScript at once: more are copied twice at a time.
pub(crate) const PIECE: u64 = 8 << 20;

/// Gives `machine` what it wants of `files`, until it is done.
pub(crate) async fn drive<T>(mut machine: Machine<'_, T>, files: &Files) -> Result<T> {
    while let Some(want) = machine.wanted() {
        match want {
            Want::Len { name } => machine.give_len(files.len(&name).await?)?,
            Want::Bytes { name, range } => {
                let end = range.end.min(range.start.saturating_add(PIECE));
                let bytes = files.read(&name, range.start..end).await?;
                machine.give_bytes(Bytes::from(bytes))?;
            }
        }
    }
    machine.finish()
}
