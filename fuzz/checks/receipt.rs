//! Receipts of answers.

use sterna::receipt::Receipt;
use sterna_delivery::sign::{TrustList, Verdict};

/// Panics if a promise of the reader is broken.
pub(crate) fn check(data: &[u8]) {
    let Ok(receipt) = Receipt::parse(data) else {
        return;
    };
    let n_tokens = receipt.prompt().len() + receipt.answer().len();
    assert!(!receipt.prompt().is_empty());
    assert!(n_tokens as u64 <= receipt.settings().context.saturating_add(1));
    assert!(
        receipt
            .adapters()
            .iter()
            .all(|adapter| adapter.scale.is_finite())
    );
    // Nobody has signed it.
    let signer = receipt.signer(&TrustList::default());
    assert!(!matches!(signer, Ok(Verdict::Signed(_))));
    // What can be read can be written, and reads the same.
    let again = Receipt::parse(receipt.to_json().as_bytes()).expect("what was written");
    assert_eq!(again, receipt);
}
