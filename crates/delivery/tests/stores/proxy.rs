//! A proxy before a server, which counts requests and does something to some of them.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{Arc, Condvar, Mutex},
    thread,
    time::Duration,
};

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Act {
    /// It is answered.
    Pass,
    /// It isn't passed on until [`Proxy::release`].
    Hold,
    /// It isn't passed on, and its connection is closed.
    Cut,
    /// It is passed on, and nobody hears the answer.
    Lose,
    /// A bit of its answer's body is another.
    Lie,
}

type Rule = dyn Fn(usize, &str) -> Act + Send + Sync;

#[derive(Default)]
struct State {
    /// What was asked: method and path, decoded.
    asked: Vec<String>,
    n_held: usize,
    is_released: bool,
}

struct Shared {
    upstream: String,
    state: Mutex<State>,
    changed: Condvar,
    rule: Box<Rule>,
}

pub(crate) struct Proxy {
    pub(crate) address: String,
    shared: Arc<Shared>,
}

impl Proxy {
    /// Before the server at `upstream`; `rule` says what becomes of a request, by its number and its method and path.
    pub(crate) fn start(
        upstream: &str,
        rule: impl Fn(usize, &str) -> Act + Send + Sync + 'static,
    ) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            upstream: upstream.to_owned(),
            state: Mutex::default(),
            changed: Condvar::new(),
            rule: Box::new(rule),
        });
        let serving = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (shared, stream) = (Arc::clone(&serving), stream.unwrap());
                // A client that is killed breaks its connections.
                thread::spawn(move || shared.serve(&stream).unwrap_or_default());
            }
        });
        Proxy { address, shared }
    }

    /// What was asked so far.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.shared.state.lock().unwrap().asked.clone()
    }

    /// Waits until a request is held, or `is_over` says that there will be none; returns whether one is.
    pub(crate) fn wait_for_hold(&self, mut is_over: impl FnMut() -> bool) -> bool {
        let mut state = self.shared.state.lock().unwrap();
        while state.n_held == 0 {
            if is_over() {
                return false;
            }
            let patience = Duration::from_millis(20);
            state = self.shared.changed.wait_timeout(state, patience).unwrap().0;
        }
        true
    }

    /// Passes on what is held, and holds nothing more.
    pub(crate) fn release(&self) {
        self.shared.state.lock().unwrap().is_released = true;
        self.shared.changed.notify_all();
    }
}

impl Shared {
    /// Answers the only request of a connection.
    fn serve(&self, mut client: &TcpStream) -> std::io::Result<()> {
        let mut reader = BufReader::new(client);
        let (mut head, mut length, mut first) = (Vec::new(), 0, String::new());
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if first.is_empty() {
                let mut words = line.split(' ');
                let (method, path) = (words.next().unwrap(), words.next().unwrap());
                first = format!("{method} {}", decoded(path));
            }
            let lower = line.to_ascii_lowercase();
            if let Some(value) = lower.strip_prefix("content-length:") {
                length = value.trim().parse().unwrap();
            }
            assert!(!lower.starts_with("transfer-encoding:"), "{first}: {line}");
            if line == "\r\n" {
                break;
            }
            if !lower.starts_with("connection:") {
                head.extend_from_slice(line.as_bytes());
            }
        }
        head.extend_from_slice(b"Connection: close\r\n\r\n");
        let act = {
            let mut state = self.state.lock().unwrap();
            let n = state.asked.len();
            state.asked.push(first.clone());
            (self.rule)(n, &first)
        };
        match act {
            Act::Cut => return client.shutdown(Shutdown::Both),
            Act::Hold => self.hold(),
            Act::Pass | Act::Lose | Act::Lie => {}
        }
        let mut server = TcpStream::connect(&self.upstream)?;
        server.write_all(&head)?;
        std::io::copy(&mut (&mut reader).take(length), &mut server)?;
        let mut answer = Vec::new();
        server.read_to_end(&mut answer)?;
        match act {
            Act::Lose => return client.shutdown(Shutdown::Both),
            Act::Lie => {
                let body = answer.windows(4).position(|w| w == b"\r\n\r\n").unwrap() + 4;
                let middle = body + (answer.len() - body) / 2;
                answer[middle] ^= 4;
            }
            _ => {}
        }
        client.write_all(&answer)?;
        // As the server has said.
        client.shutdown(Shutdown::Both)
    }

    fn hold(&self) {
        let mut state = self.state.lock().unwrap();
        if !state.is_released {
            state.n_held += 1;
            self.changed.notify_all();
        }
        while !state.is_released {
            state = self.changed.wait(state).unwrap();
        }
    }
}

/// A path without percent-encoding, which some clients have where others don't.
fn decoded(path: &str) -> String {
    let mut parts = path.split('%');
    let mut text = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let (code, rest) = part.split_at(2);
        text.push(u8::from_str_radix(code, 16).unwrap().into());
        text += rest;
    }
    text
}
