//! Who may ask: keys, of which only digests are kept, and what each may use.

use std::num::NonZero;

use axum::http::{HeaderMap, header};

use super::limits::Quota;

/// The keys that are let in; with none, everybody is.
#[derive(Debug, Clone, Default)]
pub struct Keys(Vec<Key>);

#[derive(Debug, Clone)]
struct Key {
    name: String,
    digest: blake3::Hash,
    quota: Quota,
    /// Whether it may change what is served.
    is_admin: bool,
}

/// Why a list of keys can't be read.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// A line that is no key.
    #[error(
        "line {line}: expected a name, 64 hexadecimal digits, the BLAKE3 digest of a key, and rpm=NUMBER, tpm=NUMBER \
         or admin"
    )]
    Line {
        /// Its number.
        line: usize,
    },
    /// A key that is there already, with other rights perhaps.
    #[error("line {line}: expected another key, found that of {name:?} again")]
    Twice {
        /// Its number.
        line: usize,
        /// Who has it.
        name: String,
    },
    /// A name that a list can't have.
    #[error("expected a name on one line without `#`, found {0:?}")]
    Name(String),
    /// A list without keys would let everybody in.
    #[error("expected at least one key, found none")]
    Empty,
    /// A key that could be guessed.
    #[error("expected a key of at least {MIN_LEN} characters, found {len}")]
    Short {
        /// Its length.
        len: usize,
    },
}

/// Characters of a key at least.
const MIN_LEN: usize = 16;

impl Keys {
    /// No keys: everybody is let in.
    pub fn none() -> Keys {
        Keys::default()
    }

    /// Whether everybody is let in.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Lets in who has `key`, which logs call `name`.
    ///
    /// Errors: it is too short.
    pub fn add(&mut self, name: &str, key: &str) -> Result<(), KeysError> {
        if key.len() < MIN_LEN {
            return Err(KeysError::Short { len: key.len() });
        }
        self.0.push(Key {
            name: name.to_owned(),
            digest: blake3::hash(key.as_bytes()),
            quota: Quota::default(),
            is_admin: false,
        });
        Ok(())
    }

    /// Lets in who has the keys whose digests are in `list`: a name and a digest on each line, then what the key may
    /// use in a minute (`rpm=60` requests, `tpm=100000` tokens), and `admin` if it may change what is served; `#`
    /// begins a remark.
    ///
    /// Errors: the first line that is none, or has a key again, or that there are none.
    pub fn add_list(&mut self, list: &str) -> Result<(), KeysError> {
        let before = self.0.len();
        for (index, line) in list.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let key = Key::parse(line).ok_or(KeysError::Line { line: index + 1 })?;
            if let Some(other) = self.0.iter().find(|other| other.digest == key.digest) {
                return Err(KeysError::Twice {
                    line: index + 1,
                    name: other.name.clone(),
                });
            }
            self.0.push(key);
        }
        match self.0.len() > before {
            true => Ok(()),
            false => Err(KeysError::Empty),
        }
    }

    /// What each key may use, in order.
    pub(crate) fn quotas(&self) -> impl Iterator<Item = Quota> {
        self.0.iter().map(|key| key.quota)
    }

    /// Whether the key of this number may change what is served.
    pub(crate) fn is_admin(&self, key: usize) -> bool {
        self.0.get(key).is_some_and(|key| key.is_admin)
    }

    /// A new key, and the line of a list that lets it in under `name`.
    ///
    /// Errors: no list can have that name.
    pub fn make(name: &str) -> Result<(String, String), KeysError> {
        let is_split = |c: char| c == '#' || c.is_control();
        if name.trim().is_empty() || name.contains(is_split) {
            return Err(KeysError::Name(name.to_owned()));
        }
        let key = format!("{}{}", crate::id::new("sk-"), crate::id::new(""));
        let line = format!("{name} {}", blake3::hash(key.as_bytes()).to_hex());
        Ok((key, line))
    }

    /// Which key `headers` have, by its number, and its name; `None` if it isn't let in.
    pub(crate) fn find(&self, headers: &HeaderMap) -> Option<(usize, &str)> {
        if self.is_empty() {
            return Some((0, ""));
        }
        let text = |name| headers.get(name)?.to_str().ok();
        let bearer = text(header::AUTHORIZATION.as_str()).and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
        let key = bearer.or_else(|| text("x-api-key"))?;
        // Digests are compared in constant time, and all of them.
        let digest = blake3::hash(key.as_bytes());
        let keys = self.0.iter().enumerate();
        keys.fold(None, |found, (index, key)| match key.digest == digest {
            true => Some((index, key.name.as_str())),
            false => found,
        })
    }
}

impl Key {
    /// The key of a line.
    fn parse(line: &str) -> Option<Key> {
        let mut words: Vec<&str> = line.split_whitespace().collect();
        let mut quota = Quota::default();
        let mut is_admin = false;
        let digest = loop {
            let word = words.pop()?;
            let number = |text: &str| text.parse::<NonZero<u64>>().ok().map(Some);
            match word.split_once('=') {
                Some(("rpm", text)) => quota.requests = number(text)?,
                Some(("tpm", text)) => quota.tokens = number(text)?,
                None if word == "admin" => is_admin = true,
                _ => break word,
            }
        };
        Some(Key {
            digest: blake3::Hash::from_hex(digest).ok()?,
            name: match words.is_empty() {
                true => return None,
                false => words.join(" "),
            },
            quota,
            is_admin,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        let mut headers = HeaderMap::new();
        headers.insert(name, value.parse().unwrap());
        headers
    }

    #[test]
    fn only_who_has_a_key_is_let_in() {
        let (key, line) = Keys::make("ann").unwrap();
        let mut keys = Keys::none();
        assert!(keys.find(&HeaderMap::new()).is_some());
        keys.add_list(&format!("# who\n\n{line} # since May\n"))
            .unwrap();
        keys.add("bob", "a key of bob's own").unwrap();
        let found = |name, value: &str| keys.find(&headers(name, value)).map(|(_, name)| name);
        assert_eq!(
            found("authorization", &format!("Bearer {key}")),
            Some("ann")
        );
        assert_eq!(
            found("authorization", &format!("bearer  {key}")),
            Some("ann")
        );
        assert_eq!(found("x-api-key", "a key of bob's own"), Some("bob"));
        assert_eq!(found("authorization", &key), None);
        assert_eq!(found("authorization", "Bearer a key of bob's owm"), None);
        assert_eq!(keys.find(&HeaderMap::new()), None);
    }

    #[test]
    fn lines_say_what_keys_may_use() {
        let [digest, bob, other] = [b"x", b"y", b"z"].map(|key| blake3::hash(key).to_hex());
        let list = format!(
            "ann of ops {digest} rpm=60  tpm=1000 admin # all\nbob {bob} tpm=5\n admin {other}"
        );
        let mut keys = Keys::none();
        keys.add_list(&list).unwrap();
        let quota = |requests, tokens| Quota {
            requests: NonZero::new(requests),
            tokens: NonZero::new(tokens),
        };
        let quotas: Vec<Quota> = keys.quotas().collect();
        assert_eq!(quotas, [quota(60, 1000), quota(0, 5), quota(0, 0)]);
        assert_eq!(
            [0, 1, 2, 3].map(|key| keys.is_admin(key)),
            [true, false, false, false]
        );
        assert_eq!(keys.0[0].name, "ann of ops");
        assert_eq!(keys.0[2].name, "admin");
        for rest in ["rpm=0", "rpm=x", "tpm=-1", "rps=4", "4"] {
            let list = format!("ann {digest} {rest}");
            assert!(Keys::none().add_list(&list).is_err(), "{rest}");
        }
    }

    #[test]
    fn lists_that_let_nobody_or_anybody_in_are_refused() {
        let refused = |list: &str| Keys::none().add_list(list).unwrap_err().to_string();
        assert_eq!(refused("# none\n"), "expected at least one key, found none");
        assert!(refused("ann 1234").starts_with("line 1: expected a name"));
        assert!(Keys::none().add("x", "short").is_err());
        let digest = blake3::hash(b"key").to_hex();
        let again = refused(&format!("ann {digest} rpm=1\nbob {digest}"));
        assert_eq!(
            again,
            "line 2: expected another key, found that of \"ann\" again"
        );
        for name in ["", " ", "a#b", "a\nb"] {
            assert!(Keys::make(name).is_err(), "{name}");
        }
    }
}
