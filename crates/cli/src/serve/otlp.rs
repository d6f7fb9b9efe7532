//! Traces of requests to a collector: OTLP over HTTP, as JSON. A thread sends them; requests don't wait for it.

use std::env;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use sterna_server::{Span, Trace, Tracer};
use ureq::Agent;

use crate::output;

/// Traces that may wait to be sent; what is beyond is lost.
const QUEUE: usize = 4096;
/// Traces that are sent at once.
const BATCH: usize = 256;
/// How long others are waited for before some are sent.
const GATHER: Duration = Duration::from_secs(1);
/// How long the collector may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long the last ones may take once the server has ended.
const LAST: Duration = Duration::from_secs(5);
/// What can't be sent is told so often at most.
const TELL: Duration = Duration::from_secs(60);

/// The variable with the headers of requests.
const HEADERS: &str = "OTEL_EXPORTER_OTLP_HEADERS";

/// The path of a collector where traces go.
const PATH: &str = "/v1/traces";

/// Where traces go, and how requests to it look.
#[derive(Clone)]
pub(super) struct Collector {
    url: String,
    headers: Vec<(String, String)>,
    service: String,
}

impl Collector {
    /// The one at `endpoint`, the address of a collector without its path. `OTEL_EXPORTER_OTLP_HEADERS`
    /// (`name=value,…`) and `OTEL_SERVICE_NAME` say the rest.
    pub(super) fn new(endpoint: &str) -> Result<Collector> {
        if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
            bail!(
                "otlp-endpoint: expected an address such as http://127.0.0.1:4318, found {endpoint:?}"
            );
        }
        let given = env::var(HEADERS).unwrap_or_default();
        Ok(Collector {
            url: format!("{}{PATH}", endpoint.trim_end_matches('/')),
            headers: headers(&given).context(HEADERS)?,
            service: env::var("OTEL_SERVICE_NAME").unwrap_or_else(|_| "sterna".to_owned()),
        })
    }

    /// Starts to send.
    pub(super) fn start(self) -> Result<Exporter> {
        let (sender, receiver) = sync_channel(QUEUE);
        let n_lost = Arc::new(AtomicU64::new(0));
        let lost = Arc::clone(&n_lost);
        let work = move || self.send_all(&receiver, &lost);
        let builder = thread::Builder::new().name("traces".to_owned());
        builder
            .spawn(work)
            .context("cannot start the thread that sends traces")?;
        Ok(Exporter { sender, n_lost })
    }

    fn send_all(&self, receiver: &Receiver<Message>, n_lost: &AtomicU64) {
        let agent: Agent = Agent::config_builder()
            .timeout_global(Some(TIMEOUT))
            .user_agent(concat!("sterna/", env!("CARGO_PKG_VERSION")))
            .build()
            .into();
        let mut told: Option<Instant> = None;
        let mut is_open = true;
        while is_open {
            let (traces, flushed) = gather(receiver, &mut is_open);
            if !traces.is_empty()
                && let Err(error) = self.send(&agent, &traces)
            {
                n_lost.fetch_add(traces.len() as u64, Ordering::Relaxed);
                if told.is_none_or(|told| told.elapsed() >= TELL) {
                    told = Some(Instant::now());
                    let n_lost = n_lost.swap(0, Ordering::Relaxed);
                    output::warning(format_args!("{n_lost} traces are lost: {error}"));
                }
            }
            if let Some(flushed) = flushed {
                // Whoever waited may have given up.
                let _ = flushed.send(());
            }
        }
    }

    fn send(&self, agent: &Agent, traces: &[Trace]) -> Result<()> {
        let mut request = agent.post(&self.url).content_type("application/json");
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let body = serde_json::to_vec(&export(&self.service, traces))?;
        let sent = request.send(&body[..]);
        sent.map(drop).with_context(|| self.url.clone())
    }
}

enum Message {
    Trace(Box<Trace>),
    /// All before it shall be sent now.
    Flush(SyncSender<()>),
}

/// The next traces to be sent, and who waits for that; `is_open` is false when nobody sends any more.
fn gather(
    receiver: &Receiver<Message>,
    is_open: &mut bool,
) -> (Vec<Trace>, Option<SyncSender<()>>) {
    let mut traces = Vec::new();
    let Ok(mut message) = receiver.recv() else {
        *is_open = false;
        return (traces, None);
    };
    let until = Instant::now() + GATHER;
    loop {
        match message {
            Message::Flush(flushed) => return (traces, Some(flushed)),
            Message::Trace(trace) => traces.push(*trace),
        }
        if traces.len() >= BATCH {
            return (traces, None);
        }
        match receiver.recv_timeout(until.saturating_duration_since(Instant::now())) {
            Ok(next) => message = next,
            Err(error) => {
                *is_open = error == RecvTimeoutError::Timeout;
                return (traces, None);
            }
        }
    }
}

/// Takes traces, for the thread that sends them.
pub(super) struct Exporter {
    sender: SyncSender<Message>,
    n_lost: Arc<AtomicU64>,
}

impl Exporter {
    /// What the server gives traces to.
    pub(super) fn tracer(&self) -> Tracer {
        let (sender, n_lost) = (self.sender.clone(), Arc::clone(&self.n_lost));
        Arc::new(move |trace| {
            if sender.try_send(Message::Trace(Box::new(trace))).is_err() {
                n_lost.fetch_add(1, Ordering::Relaxed);
            }
        })
    }

    /// Waits until the last ones are sent.
    ///
    /// Errors: the collector takes too long.
    pub(super) fn finish(&self) -> io::Result<()> {
        let (flushed, is_flushed) = sync_channel(1);
        let sent = self.sender.try_send(Message::Flush(flushed)).is_ok();
        match sent && is_flushed.recv_timeout(LAST).is_ok() {
            true => Ok(()),
            false => Err(io::Error::from(io::ErrorKind::TimedOut)),
        }
    }
}

/// The headers that `text` (`name=value,…`) says, whose values are percent-encoded.
fn headers(text: &str) -> Result<Vec<(String, String)>> {
    let pairs = text.split(',').filter(|pair| !pair.trim().is_empty());
    let pairs = pairs.map(|pair| {
        let Some((name, value)) = pair.split_once('=') else {
            // What is there may be a secret.
            bail!("expected name=value, found something without =");
        };
        let name = name.trim().to_owned();
        let value = decoded(value.trim()).with_context(|| name.clone())?;
        Ok((name, value))
    });
    pairs.collect()
}

/// `text` with what is written as `%` and two hexadecimal digits.
fn decoded(text: &str) -> Result<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let digits = after.split_at_checked(2).and_then(|(digits, after)| {
            let digits = digits.iter().map(|digit| char::from(*digit).to_digit(16));
            let digits: Vec<u32> = digits.collect::<Option<_>>()?;
            Some((digits, after))
        });
        let Some((digits, after)) = digits else {
            bail!("expected two hexadecimal digits after each %, found something else");
        };
        bytes.push((digits[0] * 16 + digits[1]) as u8);
        rest = after;
    }
    String::from_utf8(bytes).context("expected UTF-8, percent-encoded")
}

/// Traces as OTLP has them in JSON.
fn export(service: &str, traces: &[Trace]) -> Value {
    let spans = traces
        .iter()
        .flat_map(|trace| trace.spans.iter().map(|span| one(trace, span)));
    let scope = json!({"name": "sterna", "version": env!("CARGO_PKG_VERSION")});
    let resource = [
        attribute("service.name", &service.into()),
        attribute("service.version", &env!("CARGO_PKG_VERSION").into()),
    ];
    json!({"resourceSpans": [{
        "resource": {"attributes": resource},
        "scopeSpans": [{"scope": scope, "spans": spans.collect::<Vec<_>>()}],
    }]})
}

fn one(trace: &Trace, span: &Span) -> Value {
    const INTERNAL: u8 = 1;
    const SERVER: u8 = 2;
    const ERROR: u8 = 2;
    let attributes = span.attributes.iter();
    let attributes = attributes.map(|(name, value)| attribute(name, value));
    let mut record = json!({
        "traceId": hex(&trace.id),
        "spanId": hex(&span.id),
        "name": span.name,
        "kind": if span.is_request { SERVER } else { INTERNAL },
        "startTimeUnixNano": nanoseconds(span.begin),
        "endTimeUnixNano": nanoseconds(span.end),
        "attributes": attributes.collect::<Vec<_>>(),
        "status": if span.is_error { json!({"code": ERROR}) } else { json!({}) },
    });
    if let Some(parent) = span.parent {
        record["parentSpanId"] = hex(&parent).into();
    }
    record
}

fn attribute(name: &str, value: &Value) -> Value {
    json!({"key": name, "value": any_value(value)})
}

/// A value with its type. Whole numbers are texts, since JSON's are no more exact than floats.
fn any_value(value: &Value) -> Value {
    match value {
        Value::Number(number) if number.is_f64() => json!({"doubleValue": number}),
        Value::Number(number) => json!({"intValue": number.to_string()}),
        Value::Bool(flag) => json!({"boolValue": flag}),
        Value::Array(values) => {
            let values: Vec<Value> = values.iter().map(any_value).collect();
            json!({"arrayValue": {"values": values}})
        }
        Value::String(text) => json!({"stringValue": text}),
        other => json!({"stringValue": other.to_string()}),
    }
}

fn nanoseconds(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_nanos().to_string()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_their_types() {
        assert_eq!(any_value(&json!(3)), json!({"intValue": "3"}));
        assert_eq!(any_value(&json!(0.5)), json!({"doubleValue": 0.5}));
        assert_eq!(any_value(&json!("a")), json!({"stringValue": "a"}));
        let list = json!({"arrayValue": {"values": [{"boolValue": true}]}});
        assert_eq!(any_value(&json!([true])), list);
    }

    #[test]
    fn values_of_headers_are_percent_encoded() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let found = headers("authorization=Bearer%20a%2Cb%3d, x-tenant = caf%C3%A9 ,,plain=a=b");
        let expected = [
            pair("authorization", "Bearer a,b="),
            pair("x-tenant", "café"),
            pair("plain", "a=b"),
        ];
        assert_eq!(found.unwrap(), expected);
        assert_eq!(headers("").unwrap(), []);
        for (text, says) in [
            ("secret", "expected name=value"),
            ("a=100%", "a: expected two hexadecimal digits"),
            ("a=%2", "a: expected two hexadecimal digits"),
            ("a=%+1", "a: expected two hexadecimal digits"),
            ("a=%é", "a: expected two hexadecimal digits"),
            ("a=%ff", "a: expected UTF-8"),
        ] {
            let message = format!("{:#}", headers(text).unwrap_err());
            assert!(message.contains(says), "{text}: {message}");
            assert!(!message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn an_endpoint_is_an_address() {
        let collector = Collector::new("http://127.0.0.1:4318/").unwrap();
        assert_eq!(collector.url, "http://127.0.0.1:4318/v1/traces");
        assert!(Collector::new("127.0.0.1:4318").is_err());
    }
}
