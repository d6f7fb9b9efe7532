//! By which names a server may be asked.

use std::net::IpAddr;

use axum::http::header::HOST;
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Uri};

/// By which names a server may be asked.
///
/// A page of any site can lead its own name to the address of this machine, and browsers then let it read what is
/// there. But they say by which name they ask.
#[derive(Debug, Clone, Default)]
pub struct Hosts(Option<Vec<String>>);

impl Hosts {
    /// By any.
    pub fn any() -> Hosts {
        Hosts(None)
    }

    /// By those of this machine (`localhost` and its loopback addresses) and by `names`.
    pub fn local(names: Vec<String>) -> Hosts {
        Hosts(Some(names))
    }

    /// Errors: the name by which a request with `headers` asks for `uri`, if it isn't one of them.
    pub(crate) fn check(&self, headers: &HeaderMap, uri: &Uri) -> Result<(), String> {
        let Some(names) = &self.0 else {
            return Ok(());
        };
        let lines = headers.get_all(HOST).iter();
        let lines = lines.map(|line| String::from_utf8_lossy(line.as_bytes()));
        // Who writes the whole address of what is asked for means that one.
        let whole = uri.authority().map(|own| own.as_str().into());
        for line in lines.chain(whole) {
            let authority: Option<Authority> = line.parse().ok();
            let host = authority.as_ref().map_or("", Authority::host);
            if !is_of_this_machine(host) && !names.iter().any(|name| is_same(name, host)) {
                return Err(line.into_owned());
            }
        }
        Ok(())
    }
}

/// Whether nobody but this machine answers to the name or address `host`.
fn is_of_this_machine(host: &str) -> bool {
    let literal = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    match literal.unwrap_or(host).parse::<IpAddr>() {
        Ok(ip) => ip.to_canonical().is_loopback(),
        Err(_) => is_same("localhost", host),
    }
}

fn is_same(name: &str, host: &str) -> bool {
    let [name, host] = [name, host].map(|name| name.strip_suffix('.').unwrap_or(name));
    name.eq_ignore_ascii_case(host)
}

#[cfg(test)]
mod tests {
    use axum::http::Request;

    use super::*;

    /// Whether a server of this machine that is also called `sterna.example` is asked by a request with these.
    fn is_asked(uri: &str, hosts: &[&str]) -> bool {
        let request = Request::builder().uri(uri);
        let request = hosts
            .iter()
            .fold(request, |request, host| request.header(HOST, *host));
        let request = request.body(()).unwrap();
        let is_asked = |hosts: Hosts| hosts.check(request.headers(), request.uri()).is_ok();
        assert!(is_asked(Hosts::any()));
        is_asked(Hosts::local(vec!["sterna.example".to_owned()]))
    }

    #[test]
    fn other_names_are_refused() {
        for host in [
            "localhost",
            "localhost:8765",
            "LocalHost.:80",
            "127.0.0.1",
            "127.0.0.2:8765",
            "[::1]:8765",
            "[::ffff:127.0.0.1]",
            "sterna.example",
            "Sterna.example:443",
        ] {
            assert!(is_asked("/", &[host]), "{host}");
        }
        for host in [
            "",
            "example.org",
            "localhost.example.org",
            "127.0.0.1.example.org:8765",
            "a.sterna.example",
            "192.0.2.1:8765",
            "0.0.0.0:8765",
            "[::]:8765",
            "[2001:db8::1]",
            "local host",
        ] {
            assert!(!is_asked("/", &[host]), "{host}");
        }
        // Programs of HTTP/1.0 say none.
        assert!(is_asked("/", &[]));
        assert!(!is_asked("/", &["localhost", "example.org"]));
        assert!(is_asked("http://localhost:8765/", &["localhost"]));
        assert!(!is_asked("http://example.org/", &["localhost"]));
    }
}
