//! Web servers.

use std::{
    io,
    ops::Range,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use ureq::{
    Agent, Body, Proxy, Timeout,
    http::{HeaderMap, Response, header},
};

use super::{Answer, Source, Url, asked_for};
use crate::fetch::{Fault, Head};

/// Options for a web server.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// A bearer token, sent to the server's own scheme, host and port only: a redirect to any other
    /// goes without it.
    pub token: Option<String>,
    /// Read timeout.
    pub silence: Duration,
    /// Connection timeout.
    pub connect: Duration,
    /// Whether to use the proxy of the environment (`HTTPS_PROXY`, `NO_PROXY` and the like).
    pub proxy_from_env: bool,
}

impl Default for HttpOptions {
    /// No token, half a minute of silence, ten seconds to connect, the environment's proxy.
    fn default() -> Self {
        Self {
            token: None,
            silence: Duration::from_secs(30),
            connect: Duration::from_secs(10),
            proxy_from_env: true,
        }
    }
}

/// A folder on a web server.
///
/// Redirects are followed, at most ten of them and never from https to http. Compression is declined.
pub struct HttpSource {
    base: Url,
    name: String,
    token: Option<String>,
    config: ureq::config::Config,
    agent: Mutex<Agent>,
}

/// Maximum redirects.
const MAX_REDIRECTS: usize = 10;

impl HttpSource {
    /// The folder at `base`.
    pub fn new(base: Url, options: HttpOptions) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            // Followed here, where they can be checked.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .accept_encoding("identity")
            .user_agent(concat!("sterna/", env!("CARGO_PKG_VERSION")))
            .proxy(options.proxy_from_env.then(Proxy::try_from_env).flatten())
            .timeout_resolve(Some(options.connect))
            .timeout_connect(Some(options.connect))
            .timeout_recv_response(Some(options.silence))
            .timeout_per_read(Some(options.silence))
            .timeout_per_write(Some(options.silence))
            .input_buffer_size(256 << 10)
            // As many as there may be parallel requests, so that connections are reused.
            .max_idle_connections_per_host(16)
            .build();
        Self {
            name: base.to_string(),
            base,
            token: options.token,
            agent: Mutex::new(Agent::new_with_config(config.clone())),
            config,
        }
    }

    /// The folder's address.
    pub fn base(&self) -> &Url {
        &self.base
    }

    /// Requests `url`, which may be outside the folder.
    pub(super) fn get(&self, url: Url, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        let bearer = self.token.as_ref().map(|token| format!("Bearer {token}"));
        self.get_as(url, range, bearer.as_deref(), None)
    }

    /// The same with these headers `Authorization`, which is sent as a token is, and `Accept`.
    pub(super) fn get_as(
        &self,
        url: Url,
        range: Option<Range<u64>>,
        authorization: Option<&str>,
        accept: Option<&str>,
    ) -> Result<Answer, Fault> {
        let agent = self
            .agent
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        let mut url = url;
        for _ in 0..=MAX_REDIRECTS {
            let mut request = agent.get(url.to_string());
            if let Some(range) = &range {
                let last = range.end.saturating_sub(1);
                request = request.header(header::RANGE, format!("bytes={}-{last}", range.start));
            }
            if let Some(authorization) = authorization.filter(|_| url.same_origin(&self.base)) {
                request = request.header(header::AUTHORIZATION, authorization);
            }
            if let Some(accept) = accept {
                request = request.header(header::ACCEPT, accept);
            }
            let response = request.call().map_err(fault)?;
            if !matches!(response.status().as_u16(), 301 | 302 | 303 | 307 | 308) {
                return Ok(answer(response));
            }
            url = redirect(&url, response.headers())?;
        }
        Err(Fault::Redirect {
            to: url.to_string(),
            why: "more than ten redirects",
        })
    }
}

impl Source for HttpSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        asked_for(name)?;
        self.get(self.base.below(name), range)
    }

    fn interrupt(&self) {
        let mut agent = self.agent.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh = Agent::new_with_config(self.config.clone());
        std::mem::replace(&mut *agent, fresh).shutdown();
    }
}

fn redirect(from: &Url, headers: &HeaderMap) -> Result<Url, Fault> {
    let location = text(headers, header::LOCATION.as_str()).unwrap_or_default();
    let refused = |why| Fault::Redirect {
        to: location
            .chars()
            .filter(|c| !c.is_control())
            .take(200)
            .collect(),
        why,
    };
    let to = from
        .resolve(&location)
        .map_err(|error| refused(error.why))?;
    if from.is_secure() && !to.is_secure() {
        return Err(refused("from https to http"));
    }
    Ok(to)
}

fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    let value = headers.get(name)?.as_bytes();
    Some(String::from_utf8_lossy(value).into_owned())
}

fn answer(response: Response<Body>) -> Answer {
    let (parts, body) = response.into_parts();
    Answer {
        head: Head::read(parts.status.as_u16(), |name| text(&parts.headers, name)),
        body: Box::new(body.into_reader()),
    }
}

/// Classifies an error before any response.
fn fault(error: ureq::Error) -> Fault {
    match error {
        ureq::Error::Timeout(Timeout::PerRead | Timeout::RecvResponse) => Fault::Stalled,
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::TimedOut => Fault::Stalled,
        ureq::Error::Tls(_) | ureq::Error::Rustls(_) | ureq::Error::TlsRequired => {
            Fault::Insecure {
                message: error.to_string(),
            }
        }
        // How the TLS library reports certificate and other protocol errors.
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::InvalidData => Fault::Insecure {
            message: error.to_string(),
        },
        ureq::Error::Io(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            Fault::Closed {
                message: error.to_string(),
            }
        }
        error => Fault::Unreachable {
            message: error.to_string(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_never_lead_from_https_to_http() {
        let to = |from: &str, location: &str| {
            let from = Url::parse(from).unwrap();
            let mut headers = HeaderMap::new();
            headers.insert(header::LOCATION, location.parse().unwrap());
            redirect(&from, &headers).map(|url| url.to_string())
        };
        assert!(to("https://a/x", "https://b/y").is_ok());
        assert!(to("http://a/x", "https://b/y").is_ok());
        assert!(to("https://a/x", "/y").is_ok());
        let fault = to("https://a/x", "http://a/x").unwrap_err();
        let message = fault.to_string();
        assert_eq!(message, "redirect to http://a/x: from https to http");
    }
}
