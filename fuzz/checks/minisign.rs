//! Files of minisign: signatures, public keys, secret keys that no password closes.

use sterna_delivery::sign::{PublicKey, SecretKey, TrustList, Verdict};

/// The key and the signed file of minisign's documentation, whose signatures are among the seeds.
const KEY: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
const SIGNED: &[u8] = b"test";

/// Panics if a promise of the readers is broken.
pub(crate) fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    let mut trust = TrustList::default();
    trust.insert("me", PublicKey::parse(KEY).expect("a public key"));
    if let Ok(Verdict::Signed(signer)) = trust.check(SIGNED, Some(text)) {
        // Nobody can say anything else in its name.
        assert!(
            matches!(
                signer.trusted_comment.as_str(),
                "timestamp:1556193335\tfile:test" | "timestamp:1555779966\tfile:test"
            ),
            "{signer:?}"
        );
    }
    assert!(!matches!(
        trust.check(b"altered", Some(text)),
        Ok(Verdict::Signed(_))
    ));
    if let Ok(key) = PublicKey::parse(text) {
        assert_eq!(PublicKey::parse(&key.to_string()).as_ref(), Ok(&key));
        assert_eq!(PublicKey::parse(&key.to_file()).as_ref(), Ok(&key));
    }
    // Opening an encrypted one takes a second of work, which its file asks for.
    if matches!(SecretKey::is_encrypted(text), Ok(false))
        && let Ok(key) = SecretKey::parse(text, None)
    {
        let signature = key
            .sign(SIGNED, "file:test")
            .expect("a comment in one line");
        let mut trust = TrustList::default();
        trust.insert("it", key.public());
        let verdict = trust.check(SIGNED, Some(&signature));
        assert!(matches!(verdict, Ok(Verdict::Signed(_))), "{verdict:?}");
    }
}
