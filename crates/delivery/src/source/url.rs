//! Addresses of web servers.

use std::fmt;

use http::Uri;

/// An `http` or `https` address, without a fragment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Url {
    scheme: &'static str,
    /// Host and port, in lower case.
    authority: String,
    /// Path and query; begins with `/`.
    path: String,
}

/// Why text is not an address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("address {text:?}: {why}")]
pub struct UrlError {
    /// The text, truncated to 200 characters.
    pub text: String,
    /// What is wrong with it.
    pub why: &'static str,
}

impl Url {
    /// Reads an absolute address.
    ///
    /// Errors: [`UrlError`], also for one that carries a user name or password.
    pub fn parse(text: &str) -> Result<Self, UrlError> {
        let error = |why| UrlError {
            text: text.chars().take(200).collect(),
            why,
        };
        let text = text.split('#').next().unwrap_or(text);
        let scheme = match text.split_once("://") {
            Some((scheme, _)) if scheme.eq_ignore_ascii_case("http") => "http",
            Some((scheme, _)) if scheme.eq_ignore_ascii_case("https") => "https",
            _ => return Err(error("expected http:// or https://")),
        };
        let uri: Uri = text.parse().map_err(|_| error("it is no valid address"))?;
        let authority = uri.authority().ok_or_else(|| error("it names no host"))?;
        if authority.as_str().contains('@') {
            return Err(error("it has a user name or password, which are not sent"));
        }
        if authority.host().is_empty() {
            return Err(error("it names no host"));
        }
        let path = uri.path_and_query().map_or("/", |path| path.as_str());
        let slash = if path.starts_with('/') { "" } else { "/" };
        Ok(Self {
            scheme,
            authority: authority.as_str().to_ascii_lowercase(),
            path: format!("{slash}{path}"),
        })
    }

    /// True for `https`.
    pub fn is_secure(&self) -> bool {
        self.scheme == "https"
    }

    /// Host and port, verbatim.
    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// The path, without a query.
    pub fn path(&self) -> &str {
        self.path.split('?').next().unwrap_or(&self.path)
    }

    /// Whether both have one scheme, host and port.
    pub fn same_origin(&self, other: &Self) -> bool {
        self.scheme == other.scheme && self.authority == other.authority
    }

    /// The address of the file `name` below this one, with the same query.
    pub fn below(&self, name: &str) -> Self {
        let (path, query) = match self.path.split_once('?') {
            Some((path, query)) => (path, format!("?{query}")),
            None => (self.path.as_str(), String::new()),
        };
        let slash = if path.ends_with('/') { "" } else { "/" };
        Self {
            path: format!("{path}{slash}{}{query}", encoded(name)),
            ..self.clone()
        }
    }

    /// The address of `path` below this folder, whose characters are those of addresses.
    #[cfg(all(feature = "oci", not(target_family = "wasm")))]
    pub(super) fn below_verbatim(&self, path: &str) -> Self {
        Self {
            path: format!("{}{path}", self.path),
            ..self.clone()
        }
    }

    /// The folder that contains it, without the query; a folder, whose path ends in `/`, is its own.
    pub fn folder(&self) -> Self {
        let path = self.path();
        Self {
            path: path.rfind('/').map_or("/", |end| &path[..=end]).to_owned(),
            ..self.clone()
        }
    }

    /// The name of the file that this is the address of, without percent-encoding, and the folder that contains
    /// it, with the same query. `None` for a folder, and for a name that isn't UTF-8.
    pub fn split_file(&self) -> Option<(Self, String)> {
        let (folder, name) = self.path().rsplit_once('/')?;
        let name = percent_decoded(name).filter(|name| !name.is_empty())?;
        let query = &self.path[self.path().len()..];
        let folder = Self {
            path: format!("{folder}/{query}"),
            ..self.clone()
        };
        Some((folder, name))
    }

    /// Resolves a `Location` of a response from this address.
    ///
    /// Errors: [`UrlError`].
    pub fn resolve(&self, location: &str) -> Result<Self, UrlError> {
        let location = location.trim();
        let here = self.path();
        let has_scheme =
            (location.split_once(':')).is_some_and(|(scheme, _)| !scheme.contains(['/', '?', '#']));
        if has_scheme {
            Self::parse(location)
        } else if location.starts_with("//") {
            Self::parse(&format!("{}:{location}", self.scheme))
        } else if location.starts_with('/') {
            Self::parse(&format!("{}://{}{location}", self.scheme, self.authority))
        } else if location.starts_with('?') {
            Self::parse(&format!(
                "{}://{}{here}{location}",
                self.scheme, self.authority
            ))
        } else {
            Self::parse(&format!("{}{location}", self.folder()))
        }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.path)
    }
}

/// Whether an address is one of this machine.
#[cfg(all(feature = "object-store", not(target_family = "wasm")))]
pub(super) fn is_loopback(address: &str) -> bool {
    Url::parse(address).is_ok_and(|url| is_loopback_host(&url.authority))
}

/// Whether a host, perhaps with a port, is this machine.
#[cfg(all(feature = "stores", not(target_family = "wasm")))]
pub(super) fn is_loopback_host(authority: &str) -> bool {
    let host = match authority.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or(rest),
        None => authority.split(':').next().unwrap_or(authority),
    };
    let address = host.parse::<std::net::IpAddr>();
    host.eq_ignore_ascii_case("localhost") || address.is_ok_and(|address| address.is_loopback())
}

/// A path with all reserved characters percent-encoded.
pub(super) fn encoded(path: &str) -> String {
    let mut text = String::with_capacity(path.len());
    for byte in path.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                text.push(char::from(byte));
            }
            _ => text.push_str(&format!("%{byte:02X}")),
        }
    }
    text
}

/// The text after percent-decoding, if it is UTF-8.
pub(crate) fn percent_decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let mut digit = || char::from(rest.next()?).to_digit(16);
            // Two digits are below 256.
            bytes.push((digit()? * 16 + digit()?) as u8);
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_joined() {
        let url = Url::parse("https://Example.org:8443/a/b?key=1#part").unwrap();
        assert_eq!(url.to_string(), "https://example.org:8443/a/b?key=1");
        assert_eq!((url.path(), url.authority()), ("/a/b", "example.org:8443"));
        assert_eq!(
            url.below("x y/é?.bin").to_string(),
            "https://example.org:8443/a/b/x%20y/%C3%A9%3F.bin?key=1"
        );
        assert_eq!(url.folder().to_string(), "https://example.org:8443/a/");
        assert_eq!(url.folder().folder(), url.folder());
        let file = |url: &str| {
            let (folder, name) = Url::parse(url).unwrap().split_file()?;
            Some((folder.below(&name).to_string(), name))
        };
        let signed = "https://host/a/x%20y.gguf?key=1";
        assert_eq!(file(signed), Some((signed.into(), "x y.gguf".into())));
        assert_eq!(file("https://host/a/?b.gguf"), None);
        let bare = Url::parse("http://host").unwrap();
        assert_eq!(bare.below("m.json").to_string(), "http://host/m.json");
        for bad in [
            "",
            "host/a",
            "ftp://host/a",
            "file:///etc/passwd",
            "http://",
            "http://u:p@host/",
            "http://a b/",
        ] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn redirects_lead_where_they_say() {
        let url = Url::parse("https://host/a/b?q").unwrap();
        for (location, target) in [
            ("http://other/x", "http://other/x"),
            ("//other/x", "https://other/x"),
            ("/x?y", "https://host/x?y"),
            ("x", "https://host/a/x"),
            ("?z", "https://host/a/b?z"),
            ("x?to=http://c/", "https://host/a/x?to=http://c/"),
            ("/x?to=http://c/", "https://host/x?to=http://c/"),
        ] {
            assert_eq!(url.resolve(location).unwrap().to_string(), target);
        }
        assert!(url.resolve("file:///x").is_err());
        let target = url.resolve("http://host/x").unwrap();
        assert!(!target.same_origin(&url) && !target.is_secure());
    }
}
