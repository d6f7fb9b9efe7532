//! A small web server that misbehaves as it is told.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

/// What a client asked for.
#[derive(Debug, Clone)]
pub(crate) struct Asked {
    /// How many requests came before this one.
    pub(crate) index: u64,
    pub(crate) path: String,
    pub(crate) range: Option<Range<u64>>,
    pub(crate) headers: BTreeMap<String, String>,
}

/// What it gets.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
    /// Bytes of the body that are sent before the connection ends.
    pub(crate) cut: Option<usize>,
    /// A pause in the middle of what is sent of the body, and at its end.
    pub(crate) pause: Duration,
    /// A pause after every piece of 64 KiB.
    pub(crate) piece_pause: Duration,
    /// Whether a byte comes at a time, fifty a second.
    pub(crate) drip: bool,
}

impl Reply {
    pub(crate) fn status(status: u16) -> Self {
        Self {
            status,
            headers: vec![("Content-Length".into(), "0".into())],
            ..Self::default()
        }
    }

    pub(crate) fn set(&mut self, name: &str, value: impl ToString) {
        self.headers.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
        self.headers.push((name.into(), value.to_string()));
    }

    pub(crate) fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.set(name, value);
        self
    }
}

pub(crate) type Files = Arc<BTreeMap<String, Vec<u8>>>;
type Behaviour = dyn Fn(&Asked, Reply) -> Reply + Send + Sync;

pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    /// Bytes of bodies sent.
    pub(crate) sent: Arc<AtomicU64>,
    /// Everything asked so far.
    pub(crate) log: Arc<Mutex<Vec<Asked>>>,
    stop: Arc<AtomicBool>,
}

impl Server {
    /// Serves `files`; `behave` may change every honest reply.
    pub(crate) fn start(
        files: &Files,
        behave: impl Fn(&Asked, Reply) -> Reply + Send + Sync + 'static,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            sent: Arc::default(),
            log: Arc::default(),
            stop: Arc::default(),
        };
        let (sent, log, stop) = (server.sent.clone(), server.log.clone(), server.stop.clone());
        let (files, behave): (_, Arc<Behaviour>) = (files.clone(), Arc::new(behave));
        thread::spawn(move || {
            for stream in listener.incoming() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let Ok(stream) = stream else { continue };
                let (files, behave) = (files.clone(), behave.clone());
                let (sent, log) = (sent.clone(), log.clone());
                thread::spawn(move || serve(&stream, &files, &*behave, &sent, &log));
            }
        });
        server
    }

    pub(crate) fn honest(files: &Files) -> Self {
        Self::start(files, |_, reply| reply)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn n_requests(&self) -> usize {
        self.log.lock().unwrap().len()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the listener.
        let _ = TcpStream::connect(self.address);
    }
}

fn serve(
    stream: &TcpStream,
    files: &Files,
    behave: &Behaviour,
    sent: &AtomicU64,
    log: &Mutex<Vec<Asked>>,
) -> Option<()> {
    let mut lines = BufReader::new(stream);
    loop {
        let mut line = String::new();
        lines.read_line(&mut line).ok().filter(|n| *n > 0)?;
        let path = line.split(' ').nth(1)?.to_owned();
        let mut headers = BTreeMap::new();
        loop {
            let mut line = String::new();
            lines.read_line(&mut line).ok()?;
            let Some((name, value)) = line.trim().split_once(':') else {
                break;
            };
            headers.insert(name.to_lowercase(), value.trim().to_owned());
        }
        let range = headers.get("range").and_then(|range| {
            let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
            Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
        });
        let asked = {
            let mut log = log.lock().unwrap();
            let index = log.len() as u64;
            log.push(Asked {
                index,
                path,
                range,
                headers,
            });
            log[index as usize].clone()
        };
        let reply = behave(&asked, honest(files, &asked));
        send(stream, &reply, sent)?;
        if reply.cut.is_some() {
            let _ = stream.shutdown(Shutdown::Both);
            return None;
        }
    }
}

/// What a good server answers.
fn honest(files: &Files, asked: &Asked) -> Reply {
    let name = asked
        .path
        .split('?')
        .next()
        .unwrap()
        .trim_start_matches('/')
        .replace("%20", " ");
    let Some(file) = files.get(&name) else {
        return Reply::status(404);
    };
    let size = file.len() as u64;
    let etag = format!(
        "\"{size}-{}\"",
        file.iter().map(|b| u64::from(*b)).sum::<u64>()
    );
    let reply = match &asked.range {
        Some(range) if range.start < size => {
            let end = range.end.min(size);
            let body = file[range.start as usize..end as usize].to_vec();
            let part = format!("bytes {}-{}/{size}", range.start, end - 1);
            Reply {
                status: 206,
                body,
                ..Reply::default()
            }
            .with("Content-Range", part)
        }
        Some(_) => return Reply::status(416),
        None => Reply {
            status: 200,
            body: file.clone(),
            ..Reply::default()
        },
    };
    let len = reply.body.len();
    reply.with("Content-Length", len).with("ETag", etag)
}

fn send(mut stream: &TcpStream, reply: &Reply, sent: &AtomicU64) -> Option<()> {
    let mut head = format!("HTTP/1.1 {} Status\r\n", reply.status);
    for (name, value) in &reply.headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).ok()?;
    let body = &reply.body[..reply.cut.unwrap_or(usize::MAX).min(reply.body.len())];
    if reply.drip {
        for byte in body.chunks(1) {
            stream.write_all(byte).ok()?;
            thread::sleep(Duration::from_millis(20));
        }
        return Some(());
    }
    let (first, second) = body.split_at(body.len() / 2);
    for part in [first, second] {
        for piece in part.chunks(64 << 10) {
            stream.write_all(piece).ok()?;
            sent.fetch_add(piece.len() as u64, Ordering::Relaxed);
            if !reply.piece_pause.is_zero() {
                thread::sleep(reply.piece_pause);
            }
        }
        if !reply.pause.is_zero() {
            thread::sleep(reply.pause);
        }
    }
    Some(())
}

/// Bytes that look like nothing else.
pub(crate) fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

pub(crate) fn files(sizes: &[(&str, usize)]) -> Files {
    let file =
        |(i, (name, len)): (usize, &(&str, usize))| ((*name).to_owned(), bytes(i as u64 + 1, *len));
    Arc::new(sizes.iter().enumerate().map(file).collect())
}
