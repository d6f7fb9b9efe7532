//! Deltas of groups, applied to a group of zeros, and lists of deltas.

use sterna_format::delta::{Delta, DeltaError, DeltaList};

/// The largest group that is made.
const LARGE: u64 = 1 << 20;
/// The most that may be asked for at once.
const PIECE: usize = 64 << 10;

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    if let Ok(list) = DeltaList::parse(data) {
        assert!(list.deltas.iter().all(|d| !d.file.contains(['/', '\\'])));
        let again = DeltaList::parse(&list.to_json()).expect("a list that was written");
        assert_eq!(again, list);
    }
    let Ok(delta) = Delta::parse(data) else {
        return;
    };
    delta
        .check_base(&delta.base(), delta.size())
        .expect("its own base");
    if delta.size() > LARGE {
        return;
    }
    let (mut read, mut written) = (0_u64, 0_u64);
    let applied = delta.apply(
        |bytes| {
            assert!(bytes.len() <= PIECE);
            bytes.fill(0);
            read += bytes.len() as u64;
            Ok::<(), DeltaError>(())
        },
        |bytes| {
            written += bytes.len() as u64;
            Ok(())
        },
    );
    assert!(read <= delta.size() && written <= read);
    if applied.is_ok() {
        assert_eq!(written, delta.size());
    }
}
