//! Traces of requests: when each was taken, waited for its place, was read and was answered.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use axum::http::HeaderMap;
use serde_json::Value;

/// Takes the traces of requests, each when the request is done with. No trace has a word of a prompt or an answer.
pub type Tracer = Arc<dyn Fn(Trace) + Send + Sync>;

/// A request as it went, by the names of OpenTelemetry.
#[derive(Debug, Clone)]
pub struct Trace {
    /// What it belongs to: that of the client, or a new one.
    pub id: [u8; 16],
    /// The request, and what was done for it; it is their parent.
    pub spans: Vec<Span>,
}

/// A part of a trace.
#[derive(Debug, Clone)]
pub struct Span {
    /// Its own.
    pub id: [u8; 8],
    /// That of the span that it is in.
    pub parent: Option<[u8; 8]>,
    /// Whether it is the request.
    pub is_request: bool,
    /// What was done.
    pub name: String,
    /// From when.
    pub begin: SystemTime,
    /// Until when.
    pub end: SystemTime,
    /// Numbers, texts and lists of texts.
    pub attributes: Vec<(&'static str, Value)>,
    /// Whether it failed because of the server.
    pub is_error: bool,
}

/// A trace that is being made. When nobody has it any more, the request is done with, and the tracer gets it.
pub(crate) struct Tracing {
    tracer: Tracer,
    id: [u8; 16],
    request: [u8; 8],
    /// The client's span.
    parent: Option<[u8; 8]>,
    name: String,
    /// The same moment by both clocks: one says when, the other how long.
    begun: (SystemTime, Instant),
    made: Mutex<Made>,
}

#[derive(Default)]
struct Made {
    spans: Vec<Span>,
    attributes: Vec<(&'static str, Value)>,
    is_error: bool,
}

impl fmt::Debug for Tracing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tracing").finish_non_exhaustive()
    }
}

impl Tracing {
    /// Begins one, unless the client says that it shall not be kept.
    pub(crate) fn begin(tracer: &Tracer, name: String, headers: &HeaderMap) -> Option<Arc<Self>> {
        let given = headers.get("traceparent");
        let given = given.and_then(|value| Context::parse(value.to_str().ok()?));
        if given.as_ref().is_some_and(|context| !context.is_sampled) {
            return None;
        }
        Some(Arc::new(Tracing {
            tracer: Arc::clone(tracer),
            id: given
                .as_ref()
                .map_or_else(crate::id::random, |context| context.trace),
            request: crate::id::random(),
            parent: given.map(|context| context.parent),
            name,
            begun: (SystemTime::now(), Instant::now()),
            made: Mutex::default(),
        }))
    }

    fn made<T>(&self, change: impl FnOnce(&mut Made) -> T) -> T {
        change(&mut self.made.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Says something of the request.
    pub(crate) fn say(&self, name: &'static str, value: impl Into<Value>) {
        self.made(|made| made.attributes.push((name, value.into())));
    }

    /// The request failed because of the server.
    pub(crate) fn fail(&self) {
        self.made(|made| made.is_error = true);
    }

    /// Adds what was done for the request in this time.
    pub(crate) fn add(
        &self,
        name: &str,
        (begin, end): (Instant, Instant),
        attributes: Vec<(&'static str, Value)>,
    ) {
        let (time, instant) = self.begun;
        let at = |moment: Instant| time + moment.saturating_duration_since(instant);
        let span = Span {
            id: crate::id::random(),
            parent: Some(self.request),
            is_request: false,
            name: name.to_owned(),
            begin: at(begin),
            end: at(end),
            attributes,
            is_error: false,
        };
        self.made(|made| made.spans.push(span));
    }
}

impl Drop for Tracing {
    fn drop(&mut self) {
        let made = std::mem::take(self.made.get_mut().unwrap_or_else(PoisonError::into_inner));
        let (time, instant) = self.begun;
        let request = Span {
            id: self.request,
            parent: self.parent,
            is_request: true,
            name: std::mem::take(&mut self.name),
            begin: time,
            end: time + instant.elapsed(),
            attributes: made.attributes,
            is_error: made.is_error,
        };
        let mut spans = vec![request];
        spans.extend(made.spans);
        (self.tracer)(Trace { id: self.id, spans });
    }
}

/// What a client says of the trace that its request belongs to: `traceparent`, as W3C has it.
#[derive(Debug, PartialEq)]
struct Context {
    trace: [u8; 16],
    parent: [u8; 8],
    is_sampled: bool,
}

impl Context {
    /// `None` if it is none: then the request begins a trace.
    fn parse(text: &str) -> Option<Context> {
        let mut parts = text.trim().split('-');
        let [version] = hex(parts.next()?)?;
        let trace = hex(parts.next()?)?;
        let parent = hex(parts.next()?)?;
        let [flags] = hex(parts.next()?)?;
        // Later versions may have more.
        let fits = version != 0xff && (version > 0 || parts.next().is_none());
        (fits && trace != [0; 16] && parent != [0; 8]).then_some(Context {
            trace,
            parent,
            is_sampled: flags & 1 == 1,
        })
    }
}

/// Bytes in lowercase hexadecimal digits, and nothing else.
fn hex<const N: usize>(text: &str) -> Option<[u8; N]> {
    let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 2 * N || !text.bytes().all(is_digit) {
        return None;
    }
    let mut bytes = [0; N];
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const PARENT: &str = "00f067aa0ba902b7";

    #[test]
    fn contexts_are_read_as_w3c_has_them() {
        let context = Context::parse(&format!("00-{TRACE}-{PARENT}-01")).unwrap();
        assert_eq!((context.trace[0], context.parent[1]), (0x4b, 0xf0));
        assert!(context.is_sampled);
        let context = Context::parse(&format!("00-{TRACE}-{PARENT}-02")).unwrap();
        assert!(!context.is_sampled);
        // A later version has more.
        assert!(Context::parse(&format!("01-{TRACE}-{PARENT}-01-x")).is_some());
        for text in [
            String::new(),
            "00".to_owned(),
            format!("00-{TRACE}-{PARENT}"),
            format!("ff-{TRACE}-{PARENT}-01"),
            format!("00-{TRACE}-{PARENT}-01-x"),
            format!("00-{}-{PARENT}-01", TRACE.to_uppercase()),
            format!("00-{}-{PARENT}-01", &TRACE[1..]),
            format!("00-{}-{PARENT}-01", "0".repeat(32)),
            format!("00-{TRACE}-{}-01", "0".repeat(16)),
            format!("00-{TRACE}-{PARENT}-1"),
            format!("+0-{TRACE}-{PARENT}-01"),
        ] {
            assert_eq!(Context::parse(&text), None, "{text}");
        }
    }

    #[test]
    fn the_tracer_gets_a_trace_when_nobody_has_it() {
        let (sender, traces) = mpsc::channel();
        let sender = Mutex::new(sender);
        let tracer: Tracer = Arc::new(move |trace| sender.lock().unwrap().send(trace).unwrap());
        let mut headers = HeaderMap::new();
        let given = format!("00-{TRACE}-{PARENT}-01");
        headers.insert("traceparent", given.parse().unwrap());
        let tracing = Tracing::begin(&tracer, "GET /".to_owned(), &headers).unwrap();
        let other = Arc::clone(&tracing);
        let (_, begun) = tracing.begun;
        let end = begun + Duration::from_millis(5);
        tracing.add("queue", (begun, end), vec![("n", 3.into())]);
        tracing.say("status", 200);
        drop(tracing);
        assert!(traces.try_recv().is_err());
        other.fail();
        drop(other);
        let trace = traces.try_recv().unwrap();
        let [request, queue] = &trace.spans[..] else {
            panic!("{trace:?}");
        };
        assert_eq!(hex(TRACE), Some(trace.id));
        assert_eq!((request.parent, request.is_request), (hex(PARENT), true));
        assert!(request.is_error && request.end >= request.begin);
        assert_eq!(request.attributes, [("status", Value::from(200))]);
        assert_eq!((queue.parent, &*queue.name), (Some(request.id), "queue"));
        let took = queue.end.duration_since(queue.begin).unwrap();
        assert_eq!(took, Duration::from_millis(5));

        headers.insert("traceparent", given.replace("-01", "-00").parse().unwrap());
        assert!(Tracing::begin(&tracer, String::new(), &headers).is_none());
        let fresh = Tracing::begin(&tracer, String::new(), &HeaderMap::new()).unwrap();
        assert!(fresh.parent.is_none() && fresh.id != [0; 16]);
    }
}
