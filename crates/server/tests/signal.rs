//! Signalling: who hears what, and its limits.

use std::net::SocketAddr;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use sterna_server::{Hosts, Keys, Signal, SignalLimits};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_websockets::{ClientBuilder, Message, WebSocketStream};

/// How long anything may take that has to happen.
const PATIENCE: Duration = Duration::from_secs(60);
const ROOM: &str = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8";
const OTHER_ROOM: &str = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b";

async fn start(keys: Keys, origins: &[&str], limits: SignalLimits) -> SocketAddr {
    let origins = origins.iter().map(|&origin| origin.to_owned()).collect();
    let router = Signal::new(keys, Hosts::any(), origins, limits).router();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    address
}

async fn start_with(limits: SignalLimits) -> SocketAddr {
    start(Keys::none(), &[], limits).await
}

/// A member of a room.
struct Member(WebSocketStream<TcpStream>);

impl Member {
    /// Opens a WebSocket; what is said first is not read.
    async fn open(address: SocketAddr, room: &str) -> Member {
        let uri = format!("ws://{address}/signal/{room}").parse().unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let opened = ClientBuilder::from_uri(uri).connect_on(stream).await;
        Member(opened.unwrap().0)
    }

    /// Joins a room; with the id that it has there.
    async fn join(address: SocketAddr, room: &str) -> (Member, String) {
        let mut member = Member::open(address, room).await;
        let id = member.hear().await["id"].as_str().unwrap().to_owned();
        (member, id)
    }

    async fn say(&mut self, said: Value) {
        self.0.send(Message::text(said.to_string())).await.unwrap();
    }

    async fn next(&mut self) -> Message {
        let next = timeout(PATIENCE, self.0.next()).await;
        next.expect("a message").expect("no end").unwrap()
    }

    async fn hear(&mut self) -> Value {
        loop {
            let message = self.next().await;
            if let Some(text) = message.as_text() {
                return serde_json::from_str(text).unwrap();
            }
            assert!(message.is_ping(), "{message:?}");
        }
    }

    /// The code and the words of its end.
    async fn end(&mut self) -> (u16, String) {
        loop {
            let message = self.next().await;
            if let Some((code, words)) = message.as_close() {
                return (code.into(), words.to_owned());
            }
        }
    }
}

/// The answer to a request without its body.
async fn ask(address: SocketAddr, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = timeout(PATIENCE, stream.read_u8()).await.unwrap();
        head.push(byte.unwrap());
    }
    String::from_utf8(head).unwrap()
}

const UPGRADE: &str = "Connection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
     Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";

#[tokio::test]
async fn members_of_a_room_hear_each_other_and_nobody_else_does() {
    let address = start_with(SignalLimits::default()).await;
    let (mut ann, ann_id) = Member::join(address, ROOM).await;
    let (mut bob, bob_id) = Member::join(address, ROOM).await;
    let (mut eve, eve_id) = Member::join(address, OTHER_ROOM).await;
    assert!(ann_id != bob_id && bob_id != eve_id);
    ann.say(json!({"message": {"ask": 1}})).await;
    assert_eq!(
        bob.hear().await,
        json!({"from": ann_id, "message": {"ask": 1}})
    );
    // Of another room, and of nobody: both go nowhere.
    bob.say(json!({"to": eve_id, "message": "for eve"})).await;
    bob.say(json!({"to": "nobody", "message": 0})).await;
    bob.say(json!({"to": ann_id, "message": "for ann"})).await;
    assert_eq!(
        ann.hear().await,
        json!({"from": bob_id, "message": "for ann"})
    );
    let (mut mallory, mallory_id) = Member::join(address, OTHER_ROOM).await;
    mallory.say(json!({"message": "hello"})).await;
    assert_eq!(
        eve.hear().await,
        json!({"from": mallory_id, "message": "hello"})
    );
    // Who is gone is no member.
    bob.0.close().await.unwrap();
    drop(bob);
    let (mut carol, carol_id) = Member::join(address, ROOM).await;
    ann.say(json!({"to": bob_id, "message": 1})).await;
    ann.say(json!({"to": carol_id, "message": 2})).await;
    assert_eq!(carol.hear().await, json!({"from": ann_id, "message": 2}));
}

#[tokio::test]
async fn what_is_no_message_puts_its_sender_out_and_nobody_else() {
    let limits = SignalLimits {
        message_bytes: 1000,
        message_bytes_to_all: 100,
        ..SignalLimits::default()
    };
    let address = start_with(limits).await;
    let (mut ann, ann_id) = Member::join(address, ROOM).await;
    let long = "x".repeat(200);
    let cases = [
        ("{".to_owned(), 1007),
        (r#"{"to":"x"}"#.to_owned(), 1007),
        (r#"{"to":"x","message":1,"more":1}"#.to_owned(), 1007),
        (r#"{"message":[[}"#.to_owned(), 1007),
        (json!({"message": long}).to_string(), 1009),
        (
            json!({"to": ann_id, "message": long.repeat(5)}).to_string(),
            1009,
        ),
    ];
    for (said, code) in cases {
        let (mut bob, _) = Member::join(address, ROOM).await;
        bob.0.send(Message::text(said.clone())).await.unwrap();
        assert_eq!(bob.end().await.0, code, "{said}");
    }
    let (mut bob, _) = Member::join(address, ROOM).await;
    bob.0.send(Message::binary(vec![1, 2, 3])).await.unwrap();
    assert_eq!(bob.end().await, (1003, "expected text".to_owned()));
    // One that fits arrives, as the first that does.
    let (mut bob, bob_id) = Member::join(address, ROOM).await;
    bob.say(json!({"to": ann_id, "message": long})).await;
    assert_eq!(ann.hear().await, json!({"from": bob_id, "message": long}));
}

#[tokio::test]
async fn rooms_and_members_are_bounded() {
    let limits = SignalLimits {
        rooms: 2,
        members: 4,
        members_of_room: 2,
        ..SignalLimits::default()
    };
    let address = start_with(limits).await;
    let rooms = ["a", "b", "c"].map(|digit| digit.repeat(64));
    let refused = async |room: &str| Member::open(address, room).await.end().await;
    let (first, _) = Member::join(address, &rooms[0]).await;
    let (_second, _) = Member::join(address, &rooms[0]).await;
    assert_eq!(
        refused(&rooms[0]).await,
        (1013, "the room is full".to_owned())
    );
    let (third, _) = Member::join(address, &rooms[1]).await;
    assert_eq!(
        refused(&rooms[2]).await,
        (1013, "too many rooms".to_owned())
    );
    let (_fourth, _) = Member::join(address, &rooms[1]).await;
    assert_eq!(
        refused(&rooms[1]).await,
        (1013, "too many members".to_owned())
    );
    // Who goes makes room, once it is seen to be gone.
    drop(first);
    timeout(PATIENCE, async {
        loop {
            let message = Member::open(address, &rooms[0]).await.next().await;
            if message.is_text() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
    drop(third);
}

#[tokio::test]
async fn sockets_of_those_who_are_refused_are_bounded() {
    let limits = SignalLimits {
        members: 1,
        ..SignalLimits::default()
    };
    let address = start_with(limits).await;
    let (_ann, _) = Member::join(address, ROOM).await;
    // It is refused, and doesn't go.
    let mut stays = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /signal/{ROOM} HTTP/1.1\r\nHost: {address}\r\n{UPGRADE}\r\n");
    stays.write_all(request.as_bytes()).await.unwrap();
    timeout(PATIENCE, stays.read_u8()).await.unwrap().unwrap();
    let head = ask(address, &format!("/signal/{ROOM}"), UPGRADE).await;
    assert!(head.starts_with("HTTP/1.1 503"), "{head}");
    drop(stays);
    timeout(PATIENCE, async {
        while !ask(address, &format!("/signal/{ROOM}"), UPGRADE)
            .await
            .starts_with("HTTP/1.1 101")
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn pings_count_as_messages() {
    let limits = SignalLimits {
        burst: 5,
        rate: 0,
        ..SignalLimits::default()
    };
    let address = start_with(limits).await;
    let (mut ann, _) = Member::join(address, ROOM).await;
    for _ in 0..6 {
        ann.0.send(Message::ping("")).await.unwrap();
    }
    assert_eq!(ann.end().await, (1008, "too many messages".to_owned()));
}

#[tokio::test]
async fn who_says_too_much_is_put_out() {
    let limits = SignalLimits {
        burst: 5,
        rate: 0,
        ..SignalLimits::default()
    };
    let address = start_with(limits).await;
    let (mut ann, ann_id) = Member::join(address, ROOM).await;
    let (mut bob, bob_id) = Member::join(address, ROOM).await;
    for i in 0..6 {
        bob.say(json!({"to": ann_id, "message": i})).await;
    }
    assert_eq!(bob.end().await, (1008, "too many messages".to_owned()));
    for i in 0..5 {
        assert_eq!(ann.hear().await, json!({"from": bob_id, "message": i}));
    }
}

#[tokio::test]
async fn who_listens_to_nothing_is_put_out() {
    let limits = SignalLimits {
        burst: u32::MAX,
        ..SignalLimits::default()
    };
    let address = start_with(limits).await;
    let (mut ann, _) = Member::join(address, ROOM).await;
    let (mut deaf, deaf_id) = Member::join(address, ROOM).await;
    let message = "x".repeat(15_000);
    // What the system holds between them, and what waits, is some MiB.
    for _ in 0..4000 {
        ann.say(json!({"to": deaf_id, "message": message})).await;
    }
    // It isn't a member any more: nothing of this comes after what it was told.
    ann.say(json!({"to": deaf_id, "message": "last"})).await;
    let mut n_heard = 0;
    loop {
        match timeout(PATIENCE, deaf.0.next()).await.expect("an end") {
            Some(Ok(message)) if message.is_close() => break,
            Some(Ok(heard)) => {
                assert!(!heard.as_text().is_some_and(|text| text.contains("last")));
                n_heard += 1;
            }
            Some(Err(_)) | None => break,
        }
    }
    assert!(n_heard < 4000, "{n_heard}");
}

#[tokio::test]
async fn who_is_silent_is_pinged_and_then_put_out() {
    let limits = SignalLimits {
        idle: Duration::from_secs(1),
        ..SignalLimits::default()
    };
    let address = start_with(limits).await;
    // A client that answers no ping, as it doesn't read frames.
    let mut silent = TcpStream::connect(address).await.unwrap();
    let request = format!("GET /signal/{ROOM} HTTP/1.1\r\nHost: {address}\r\n{UPGRADE}\r\n");
    silent.write_all(request.as_bytes()).await.unwrap();
    let mut all = Vec::new();
    let read = timeout(PATIENCE, silent.read_to_end(&mut all)).await;
    read.expect("an end").unwrap();
    let text = String::from_utf8_lossy(&all);
    assert!(text.contains("it was silent too long"), "{text}");
    // One that does stays, as long as it likes.
    let limits = SignalLimits {
        idle: Duration::from_secs(10),
        ..SignalLimits::default()
    };
    let address = start_with(limits).await;
    let (mut ann, _) = Member::join(address, ROOM).await;
    for _ in 0..3 {
        assert!(ann.next().await.is_ping());
    }
    let (mut bob, _) = Member::join(address, ROOM).await;
    bob.say(json!({"message": "still there"})).await;
    assert_eq!(ann.hear().await["message"], "still there");
}

#[tokio::test]
async fn only_who_may_is_let_in() {
    let mut keys = Keys::none();
    keys.add("ann", "a key of ann's own").unwrap();
    let address = start(keys, &["https://example.org"], SignalLimits::default()).await;
    let path = format!("/signal/{ROOM}");
    let key = "Authorization: Bearer a key of ann's own\r\n";
    let encoded = URL_SAFE_NO_PAD.encode("a key of ann's own");
    let named = format!("Sec-WebSocket-Protocol: sterna-signal-1, sterna-key.{encoded}\r\n");
    let wrong = "Sec-WebSocket-Protocol: sterna-key.d3Jvbmc\r\n".to_owned();
    let own = format!("{key}Origin: http://{address}\r\n");
    let cases = [
        (String::new(), "401 Unauthorized"),
        (wrong, "401 Unauthorized"),
        (key.to_owned(), "101 Switching Protocols"),
        (named.clone(), "101 Switching Protocols"),
        (own, "101 Switching Protocols"),
        (
            format!("{key}Origin: https://example.org\r\n"),
            "101 Switching Protocols",
        ),
        (
            format!("{key}Origin: https://example.com\r\n"),
            "403 Forbidden",
        ),
        (format!("{key}Origin: null\r\n"), "403 Forbidden"),
    ];
    for (headers, status) in cases {
        let head = ask(address, &path, &format!("{UPGRADE}{headers}")).await;
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status}")),
            "{headers}{head}"
        );
    }
    let head = ask(address, &path, &format!("{UPGRADE}{named}"))
        .await
        .to_lowercase();
    assert!(
        head.contains("sec-websocket-protocol: sterna-signal-1\r\n"),
        "{head}"
    );
    // The example of RFC 6455.
    assert!(
        head.contains("sec-websocket-accept: s3pplmbitxaq9kygzzhzrbk+xoo=\r\n"),
        "{head}"
    );
    for (path, headers, status) in [
        (&*path, key.to_owned(), "426 Upgrade Required"),
        ("/signal/x", format!("{UPGRADE}{key}"), "400 Bad Request"),
        (
            &*path.to_uppercase().replace("SIGNAL", "signal"),
            format!("{UPGRADE}{key}"),
            "400 Bad Request",
        ),
        ("/signal/", format!("{UPGRADE}{key}"), "404 Not Found"),
    ] {
        let head = ask(address, path, &headers).await;
        assert!(
            head.starts_with(&format!("HTTP/1.1 {status}")),
            "{path}: {head}"
        );
    }
    let all = start(Keys::none(), &["*"], SignalLimits::default()).await;
    let head = ask(
        all,
        &path,
        &format!("{UPGRADE}Origin: https://example.com\r\n"),
    )
    .await;
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
}
