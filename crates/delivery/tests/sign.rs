//! Signatures, against minisign's own.

use sterna_delivery::sign::{PublicKey, SecretKey, SignatureError, TrustList, Verdict};

/// The key and signatures of the file "test" that minisign's documentation and its verifying library give.
const KEY: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";
const PREHASHED: &str = "untrusted comment: signature from minisign secret key
RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=
trusted comment: timestamp:1556193335\tfile:test
y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg==
";
const LEGACY: &str = "untrusted comment: signature from minisign secret key
RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=
trusted comment: timestamp:1555779966\tfile:test
QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA==
";

fn trusting(keys: &[(&str, PublicKey)]) -> TrustList {
    let mut list = TrustList::default();
    for (name, key) in keys {
        list.insert(*name, key.clone());
    }
    list
}

fn frank() -> TrustList {
    trusting(&[("frank", PublicKey::parse(KEY).unwrap())])
}

#[test]
fn signatures_of_minisign_are_believed() {
    for (signature, comment) in [
        (PREHASHED, "timestamp:1556193335\tfile:test"),
        (LEGACY, "timestamp:1555779966\tfile:test"),
    ] {
        let verdict = frank().check(b"test", Some(signature)).unwrap();
        let Verdict::Signed(signer) = verdict else {
            panic!("{verdict:?}")
        };
        assert_eq!(
            (signer.name.as_str(), signer.trusted_comment.as_str()),
            ("frank", comment)
        );
        assert_eq!(signer.key.to_string(), "E7620F1842B4E81F");
    }
    assert_eq!(frank().check(b"test", None), Ok(Verdict::Unsigned));
}

#[test]
fn the_documented_signature_is_one() {
    let page = include_str!("../../../docs/formats/signature.md");
    let key = page.split('`').find(|text| text.starts_with("RW")).unwrap();
    let signature = page
        .split("```")
        .nth(1)
        .unwrap()
        .strip_prefix("text\n")
        .unwrap();
    let list = trusting(&[("k", PublicKey::parse(key).unwrap())]);
    let verdict = list
        .check(b"{\"modelId\":\"m\"}\n", Some(signature))
        .unwrap();
    let Verdict::Signed(signer) = verdict else {
        panic!("{verdict:?}")
    };
    assert_eq!(signer.trusted_comment, "file:manifest.json\tmodel:m");
}

#[test]
fn whatever_is_altered_is_refused() {
    for signature in [PREHASHED, LEGACY] {
        let altered_comment = signature.replace("file:test", "file:best");
        for (bytes, text) in [
            (&b"Test"[..], signature),
            (b"", signature),
            (b"test", &altered_comment),
        ] {
            let error = frank().check(bytes, Some(text)).unwrap_err();
            assert!(
                matches!(&error, SignatureError::Bad { name, .. } if name == "frank"),
                "{error}"
            );
        }
        // The comment that is not signed may say anything.
        let other = signature.replace("signature from minisign", "whatever");
        assert!(frank().check(b"test", Some(&other)).is_ok());
    }
}

#[test]
fn other_keys_are_refused_by_name() {
    let theirs = SecretKey::generate().unwrap();
    let signature = theirs.sign(b"test", "model:x").unwrap();
    let id = theirs.public().id().to_string();
    let message = frank()
        .check(b"test", Some(&signature))
        .unwrap_err()
        .to_string();
    let expected = format!(
        "signed with the key {id}, which is not trusted: the trust list has E7620F1842B4E81F (\"frank\")"
    );
    assert_eq!(message, expected);
    let nobody = TrustList::default()
        .check(b"test", Some(&signature))
        .unwrap_err()
        .to_string();
    assert!(nobody.ends_with("the trust list has no keys"), "{nobody}");
}

#[test]
fn a_key_that_only_has_the_id_of_a_trusted_one_is_not_believed() {
    use base64::{Engine as _, prelude::BASE64_STANDARD};
    let (ours, theirs) = (
        SecretKey::generate().unwrap(),
        SecretKey::generate().unwrap(),
    );
    let signature = theirs.sign(b"test", "c").unwrap();
    // The id in the signature becomes ours; it is not part of what is signed.
    let mut lines: Vec<String> = signature.lines().map(str::to_owned).collect();
    let mut raw = BASE64_STANDARD.decode(&lines[1]).unwrap();
    let own = BASE64_STANDARD.decode(ours.public().to_string()).unwrap();
    raw[2..10].copy_from_slice(&own[2..10]);
    lines[1] = BASE64_STANDARD.encode(raw);
    let forged = lines.join("\n");
    let error = trusting(&[("us", ours.public())])
        .check(b"test", Some(&forged))
        .unwrap_err();
    assert!(matches!(error, SignatureError::Bad { .. }), "{error}");
    // With two keys of one id on the list, the one that made the signature is found.
    let mut key = BASE64_STANDARD.decode(theirs.public().to_string()).unwrap();
    key[2..10].copy_from_slice(&own[2..10]);
    let twin = PublicKey::parse(&BASE64_STANDARD.encode(key)).unwrap();
    let both = trusting(&[("us", ours.public()), ("twin", twin)]);
    let verdict = both.check(b"test", Some(&forged)).unwrap();
    assert!(matches!(verdict, Verdict::Signed(signer) if signer.name == "twin"));
}

#[test]
fn keys_survive_their_files() {
    let key = SecretKey::generate().unwrap();
    let file = key.to_unencrypted_file().unwrap();
    assert_eq!(SecretKey::is_encrypted(&file), Ok(false));
    assert_eq!(
        SecretKey::parse(&file, None).unwrap().public(),
        key.public()
    );
    let (key, file) = SecretKey::generate_encrypted("open sesame").unwrap();
    assert_eq!(SecretKey::is_encrypted(&file), Ok(true));
    let read = SecretKey::parse(&file, Some("open sesame")).unwrap();
    assert_eq!(read.public(), key.public());
    for (password, message) in [(Some("wrong"), "password"), (None, "encrypted")] {
        let error = SecretKey::parse(&file, password).unwrap_err().to_string();
        assert!(error.to_lowercase().contains(message), "{error}");
    }
    // What the key from the file signs, the public key from its file verifies.
    let public = PublicKey::parse(&key.public().to_file()).unwrap();
    let signature = read.sign(b"m", "model:é").unwrap();
    assert!(
        trusting(&[("k", public)])
            .check(b"m", Some(&signature))
            .is_ok()
    );
    assert!(
        !format!("{key:?}").contains(&file[40..60]),
        "secrets are not printed"
    );
}

#[test]
fn bad_text_is_an_error_and_no_panic() {
    let signature = PREHASHED;
    // Cut anywhere, or with any byte replaced.
    for end in 0..signature.len() {
        let _ = frank().check(b"test", Some(&signature[..end]));
    }
    for i in 0..signature.len() {
        for byte in [b'A', b'\n', b'=', 0x7f] {
            let mut text = signature.as_bytes().to_vec();
            text[i] = byte;
            let _ = frank().check(b"test", Some(std::str::from_utf8(&text).unwrap()));
        }
    }
    // A second signature that is too short.
    let mut lines: Vec<_> = signature.lines().collect();
    lines[3] = "AAAA";
    let error = frank().check(b"test", Some(&lines.join("\n"))).unwrap_err();
    assert!(matches!(error, SignatureError::Malformed(_)), "{error}");
    let long = format!("{signature}{}", " ".repeat(10_000));
    assert!(matches!(
        frank().check(b"test", Some(&long)),
        Err(SignatureError::Malformed(_))
    ));
    for text in [
        "",
        "untrusted comment: x\n",
        "RWQf",
        "not base64!",
        &format!("{KEY}\n{KEY}"),
    ] {
        let error = PublicKey::parse(text).unwrap_err();
        assert!(matches!(error, SignatureError::PublicKey(_)), "{error}");
    }
    for text in [
        "",
        "untrusted comment: x",
        "untrusted comment: x\nAAAA\n",
        KEY,
    ] {
        assert!(SecretKey::parse(text, Some("x")).is_err(), "{text:?}");
    }
    let key = SecretKey::generate().unwrap();
    for comment in ["two\nlines", "\r", " spaces ", "\u{1b}[2J"] {
        assert!(
            matches!(key.sign(b"", comment), Err(SignatureError::Comment(_))),
            "{comment:?}"
        );
    }
}
