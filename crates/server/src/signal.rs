//! Signalling: tabs that may share a package are told of each other, so that they can connect.
//!
//! A WebSocket at `/signal/ROOM` is a member of a room, which is the SHA-256 of a package's manifest. It is told its id,
//! `{"id":"…"}`. What it says, `{"to":"ID","message":…}` or without `to`, comes to the member of that id or to all others as
//! `{"from":"ID","message":…}`, and to nobody else. Nothing is kept, and no message is understood.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use futures_util::{SinkExt, StreamExt};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha1_smol::Sha1;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::time;
use tokio_websockets::{CloseCode, Limits, Message, ServerBuilder, WebSocketStream};

use crate::{Hosts, Keys};

/// What the protocol is called when a WebSocket is opened.
const PROTOCOL: &str = "sterna-signal-1";

/// What stands before a key, in base64url, among the names of protocols: pages can send no other header.
const KEY_PROTOCOL: &str = "sterna-key.";

/// Messages that wait for a member; one that lets more wait is put out.
const QUEUE: usize = 32;

/// Sockets for each member that there may be: some are of those who are refused or put out, until they are closed.
const SOCKETS_PER_MEMBER: usize = 2;

/// How long a member may take to take a message.
const SEND_WITHIN: Duration = Duration::from_secs(10);

/// How much may be asked of a [`Signal`].
#[derive(Debug, Clone)]
pub struct SignalLimits {
    /// Rooms at a time.
    pub rooms: usize,
    /// Members of all rooms.
    pub members: usize,
    /// Members of a room.
    pub members_of_room: usize,
    /// Bytes of a message to one member.
    pub message_bytes: usize,
    /// Bytes of a message to all others.
    pub message_bytes_to_all: usize,
    /// Messages that a member may send at once, pings and the like among them.
    pub burst: u32,
    /// Messages a second that it may send for long.
    pub rate: u32,
    /// How long a member may be silent; it is pinged before.
    pub idle: Duration,
}

impl Default for SignalLimits {
    /// 64 rooms and 256 members, 32 in a room; messages of 16 KiB, and to all others of 1 KiB, 100 at once and 20 a second;
    /// a minute of silence.
    fn default() -> SignalLimits {
        SignalLimits {
            rooms: 64,
            members: 256,
            members_of_room: 32,
            message_bytes: 16 << 10,
            message_bytes_to_all: 1 << 10,
            burst: 100,
            rate: 20,
            idle: Duration::from_secs(60),
        }
    }
}

/// Rooms in which tabs find each other.
#[derive(Clone)]
pub struct Signal(Arc<Rooms>);

struct Rooms {
    keys: Keys,
    hosts: Hosts,
    origins: Vec<String>,
    limits: SignalLimits,
    sockets: Arc<Semaphore>,
    /// The members of each room by their ids; no room is empty.
    rooms: Mutex<HashMap<String, HashMap<String, Post>>>,
}

/// Where messages for a member go.
struct Post {
    letters: mpsc::Sender<Arc<str>>,
    /// The member is to be put out, as it took none.
    is_full: Arc<Notify>,
}

/// What a member says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Said<'a> {
    to: Option<String>,
    #[serde(borrow)]
    message: &'a RawValue,
}

/// What a member hears.
#[derive(Serialize)]
#[serde(rename_all = "snake_case", untagged)]
enum Heard<'a> {
    Joined {
        id: &'a str,
    },
    Message {
        from: &'a str,
        message: &'a RawValue,
    },
}

/// Why a member is put out: the code of its WebSocket's end, and words.
type Reason = (CloseCode, &'static str);

impl Signal {
    /// Rooms for who has one of `keys`, if there are any, and for pages of the server's own origin, by one of `hosts`, and of
    /// `origins`, where `*` are all.
    pub fn new(keys: Keys, hosts: Hosts, origins: Vec<String>, limits: SignalLimits) -> Signal {
        let sockets = limits.members.saturating_mul(SOCKETS_PER_MEMBER);
        Signal(Arc::new(Rooms {
            keys,
            hosts,
            origins,
            sockets: Arc::new(Semaphore::new(sockets.min(Semaphore::MAX_PERMITS))),
            limits,
            rooms: Mutex::default(),
        }))
    }

    /// The route, `/signal/{room}`. Connections have to be served with upgrades.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/signal/{room}", get(open))
            .with_state(Arc::clone(&self.0))
    }
}

/// Opens the WebSocket of a member.
async fn open(
    State(rooms): State<Arc<Rooms>>,
    Path(room): Path<String>,
    mut request: Request,
) -> Response {
    let refuse =
        |status: StatusCode, message: &str| (status, format!("{message}\n")).into_response();
    if !is_digest(&room) {
        return refuse(
            StatusCode::BAD_REQUEST,
            "expected a room of 64 hexadecimal digits in lower case, the SHA-256 of a package's manifest",
        );
    }
    let headers = request.headers();
    if rooms.hosts.check(headers, request.uri()).is_err() {
        return refuse(
            StatusCode::FORBIDDEN,
            "expected a name of this server in `Host`, such as localhost or one of --allow-host",
        );
    }
    if !rooms.lets_in(headers) {
        return refuse(
            StatusCode::FORBIDDEN,
            "expected a page of this server, or of an origin that it lets in (--cors)",
        );
    }
    if rooms.keys.find(&with_key(headers)).is_none() {
        return refuse(
            StatusCode::UNAUTHORIZED,
            "expected a key that is let in, as `Authorization: Bearer KEY` or as the protocol `sterna-key.` and the key in base64url",
        );
    }
    let Some(accept) = accept_key(headers) else {
        let upgrade = [
            (header::UPGRADE, "websocket"),
            (header::SEC_WEBSOCKET_VERSION, "13"),
        ];
        return (
            upgrade,
            refuse(StatusCode::UPGRADE_REQUIRED, "expected a WebSocket"),
        )
            .into_response();
    };
    let Ok(place) = Arc::clone(&rooms.sockets).try_acquire_owned() else {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, "too many WebSockets");
    };
    let is_named = protocols(headers).any(|name| name == PROTOCOL);
    let upgrade = hyper::upgrade::on(&mut request);
    tokio::spawn(async move {
        // What fails concerns only the member, which is gone then.
        if let Ok(upgraded) = upgrade.await {
            rooms.serve(room, upgraded).await;
        }
        drop(place);
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let mut say = |name: HeaderName, value: HeaderValue| response.headers_mut().insert(name, value);
    say(header::CONNECTION, HeaderValue::from_static("upgrade"));
    say(header::UPGRADE, HeaderValue::from_static("websocket"));
    say(header::SEC_WEBSOCKET_ACCEPT, accept);
    if is_named {
        say(
            header::SEC_WEBSOCKET_PROTOCOL,
            HeaderValue::from_static(PROTOCOL),
        );
    }
    response
}

/// Whether it is a SHA-256 as the members of a room all write it.
fn is_digest(room: &str) -> bool {
    room.len() == 64 && room.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// The names of protocols that a client offers.
fn protocols(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let lines = headers.get_all(header::SEC_WEBSOCKET_PROTOCOL).iter();
    let lines = lines.filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim)
}

/// `headers`, with the key that is among the protocols where every client sends it.
fn with_key(headers: &HeaderMap) -> HeaderMap {
    let mut all = headers.clone();
    let encoded = protocols(headers).find_map(|name| name.strip_prefix(KEY_PROTOCOL));
    let key = encoded.and_then(|text| URL_SAFE_NO_PAD.decode(text).ok());
    if let Some(value) = key.and_then(|key| HeaderValue::from_bytes(&key).ok()) {
        all.insert("x-api-key", value);
    }
    all
}

/// What proves to a client that its request for a WebSocket was understood; `None` if it is no such request.
fn accept_key(headers: &HeaderMap) -> Option<HeaderValue> {
    const GUID: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    let has = |name: HeaderName, word: &str| {
        let lines = headers
            .get_all(name)
            .iter()
            .filter_map(|line| line.to_str().ok());
        let mut words = lines.flat_map(|line| line.split(','));
        words.any(|found| found.trim().eq_ignore_ascii_case(word))
    };
    let is_upgrade = has(header::CONNECTION, "upgrade")
        && has(header::UPGRADE, "websocket")
        && has(header::SEC_WEBSOCKET_VERSION, "13");
    let key = headers
        .get(header::SEC_WEBSOCKET_KEY)
        .filter(|_| is_upgrade)?;
    let mut digest = Sha1::new();
    digest.update(key.as_bytes());
    digest.update(GUID.as_bytes());
    STANDARD.encode(digest.digest().bytes()).parse().ok()
}

impl Rooms {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, Post>>> {
        // Consistent at any moment, even if a thread panicked while holding it.
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the page that asks may: browsers ask for WebSockets of any server, and leave it to that.
    fn lets_in(&self, headers: &HeaderMap) -> bool {
        let Some(origin) = headers.get(header::ORIGIN) else {
            return true;
        };
        let Ok(origin) = origin.to_str() else {
            return false;
        };
        let host = headers
            .get(header::HOST)
            .and_then(|host| host.to_str().ok());
        let is_own = origin
            .split_once("://")
            .is_some_and(|(_, own)| Some(own) == host);
        is_own
            || self
                .origins
                .iter()
                .any(|known| known == "*" || known == origin)
    }

    /// What a member is until it goes, or is put out.
    async fn serve(&self, room: String, upgraded: Upgraded) {
        let limits = Limits::default().max_payload_len(Some(self.limits.message_bytes));
        let mut socket = ServerBuilder::new()
            .limits(limits)
            .serve(TokioIo::new(upgraded));
        let reason = match self.join(&room) {
            Ok(mut member) => member.stay(&mut socket).await,
            Err(reason) => Some(reason),
        };
        if let Some((code, words)) = reason {
            // Who is gone needn't be told.
            let _ =
                time::timeout(SEND_WITHIN, socket.send(Message::close(Some(code), words))).await;
        }
        let _ = time::timeout(SEND_WITHIN, socket.close()).await;
    }

    fn join<'a>(&'a self, room: &'a str) -> Result<Member<'a>, Reason> {
        let full = |words| Err((CloseCode::SERVICE_OVERLOAD, words));
        let mut rooms = self.lock();
        if rooms.values().map(HashMap::len).sum::<usize>() >= self.limits.members {
            return full("too many members");
        }
        if !rooms.contains_key(room) && rooms.len() >= self.limits.rooms {
            return full("too many rooms");
        }
        let members = rooms.get(room).map_or(0, HashMap::len);
        if members >= self.limits.members_of_room {
            return full("the room is full");
        }
        let (letters, inbox) = mpsc::channel(QUEUE);
        let is_full = Arc::new(Notify::new());
        let id = crate::id::new("");
        let post = Post {
            letters,
            is_full: Arc::clone(&is_full),
        };
        let members = rooms.entry(room.to_owned()).or_default();
        members.insert(id.clone(), post);
        Ok(Member {
            rooms: self,
            room,
            id,
            inbox,
            is_full,
            allowance: f64::from(self.limits.burst),
            counted: Instant::now(),
        })
    }
}

/// A member of a room, as long as this lives.
struct Member<'a> {
    rooms: &'a Rooms,
    room: &'a str,
    id: String,
    inbox: mpsc::Receiver<Arc<str>>,
    is_full: Arc<Notify>,
    /// Messages that it may send now.
    allowance: f64,
    /// When that was so.
    counted: Instant,
}

impl Member<'_> {
    /// Passes on what it says and what is said to it; why it is put out, `None` if it is gone.
    async fn stay(&mut self, socket: &mut WebSocketStream<TokioIo<Upgraded>>) -> Option<Reason> {
        const SLOW: Reason = (
            CloseCode::POLICY_VIOLATION,
            "it takes its messages too slowly",
        );
        let idle = self.rooms.limits.idle;
        let is_full = Arc::clone(&self.is_full);
        let mut next = text(&Heard::Joined { id: &self.id });
        let mut heard = Instant::now();
        let mut is_pinged = false;
        loop {
            tokio::select! {
                sent = time::timeout(SEND_WITHIN, socket.send(next)) => match sent {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return None,
                    Err(_) => return Some(SLOW),
                },
                () = is_full.notified() => return Some(SLOW),
            }
            next = loop {
                let patience = if is_pinged { idle } else { idle / 2 };
                tokio::select! {
                    said = socket.next() => {
                        let message = said?.ok()?;
                        heard = Instant::now();
                        is_pinged = false;
                        if message.is_close() {
                            return None;
                        }
                        if let Err(reason) = self.spend() {
                            return Some(reason);
                        }
                        // The answer to a ping waits in the socket.
                        if message.is_ping() {
                            match time::timeout(SEND_WITHIN, socket.flush()).await {
                                Ok(Ok(())) => {}
                                Ok(Err(_)) => return None,
                                Err(_) => return Some(SLOW),
                            }
                        }
                        if let Some(said) = message.as_text() {
                            if let Err(reason) = self.say(said) {
                                return Some(reason);
                            }
                        } else if message.is_binary() {
                            return Some((CloseCode::UNSUPPORTED_DATA, "expected text"));
                        }
                    }
                    Some(told) = self.inbox.recv() => break Message::text(told.to_string()),
                    () = is_full.notified() => return Some(SLOW),
                    () = time::sleep_until((heard + patience).into()) => {
                        if is_pinged {
                            return Some((CloseCode::POLICY_VIOLATION, "it was silent too long"));
                        }
                        is_pinged = true;
                        break Message::ping("");
                    }
                }
            };
        }
    }

    /// Counts a message.
    fn spend(&mut self) -> Result<(), Reason> {
        let limits = &self.rooms.limits;
        let now = Instant::now();
        let earned = (now - self.counted).as_secs_f64() * f64::from(limits.rate);
        self.allowance = (self.allowance + earned).min(f64::from(limits.burst)) - 1.0;
        self.counted = now;
        if self.allowance < 0.0 {
            return Err((CloseCode::POLICY_VIOLATION, "too many messages"));
        }
        Ok(())
    }

    /// Passes `said` on.
    fn say(&self, said: &str) -> Result<(), Reason> {
        let limits = &self.rooms.limits;
        let Ok(Said { to, message }) = serde_json::from_str(said) else {
            let words = r#"expected {"to":ID,"message":ANY}"#;
            return Err((CloseCode::INVALID_FRAME_PAYLOAD_DATA, words));
        };
        if to.is_none() && said.len() > limits.message_bytes_to_all {
            return Err((CloseCode::MESSAGE_TOO_BIG, "too long a message for all"));
        }
        let from = &self.id;
        let told: Arc<str> = json(&Heard::Message { from, message }).into();
        let rooms = self.rooms.lock();
        let members = rooms.get(self.room).into_iter().flatten();
        let meant = members.filter(|&(id, _)| to.as_ref().map_or(id != from, |to| to == id));
        for (_, post) in meant {
            if let Err(TrySendError::Full(_)) = post.letters.try_send(Arc::clone(&told)) {
                post.is_full.notify_one();
            }
        }
        Ok(())
    }
}

impl Drop for Member<'_> {
    fn drop(&mut self) {
        let mut rooms = self.rooms.lock();
        if let Some(members) = rooms.get_mut(self.room) {
            members.remove(&self.id);
            if members.is_empty() {
                rooms.remove(self.room);
            }
        }
    }
}

fn json(heard: &Heard<'_>) -> String {
    serde_json::to_string(heard).expect("its keys are text")
}

fn text(heard: &Heard<'_>) -> Message {
    Message::text(json(heard))
}
