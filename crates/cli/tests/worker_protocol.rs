//! The parser of the worker's protocol: however bytes are cut, they mean the same; and what fuzzing
//! found stays mended.

use proptest::prelude::*;

#[allow(dead_code)]
#[path = "../src/worker/protocol.rs"]
mod protocol;

#[cfg(any(target_os = "linux", target_os = "macos"))]
#[allow(dead_code)]
#[path = "../src/worker/driver.rs"]
mod driver;

#[path = "../../../fuzz/checks/worker_protocol.rs"]
mod check;

use protocol::{Form, Keep, Message, Parser, Reply, Request, Sampling};

#[test]
fn fuzzing_inputs() {
    sterna_testing::fuzz::replay("worker_protocol", check::check);
}

/// The one message in `text`, which holds nothing else.
fn message(form: Form, text: &str) -> Message {
    let mut parser = Parser::new(form);
    let mut bytes = text.as_bytes();
    let mut message = parser.push(&mut bytes).unwrap().unwrap();
    if form == Form::Keyed {
        assert!(matches!(message, Message::Init(_)));
        message = parser.push(&mut bytes).unwrap().unwrap();
    }
    assert_eq!((bytes, parser.end()), (&b""[..], Ok(None)));
    message
}

#[test]
fn the_last_line_needs_no_end() {
    for (form, text) in [
        (Form::Positional, "1\n0\n0\n0\n1\n1\n0\n0\n7\n"),
        (Form::Positional, "0\n"),
        (Form::Keyed, "1\na=b\n1\ntokens=7\n"),
        (Form::Keyed, "1\na=b\n0\n"),
    ] {
        let expected = message(form, text);
        let mut parser = Parser::new(form);
        let mut bytes = text.trim_end().as_bytes();
        if form == Form::Keyed {
            assert!(matches!(
                parser.push(&mut bytes),
                Ok(Some(Message::Init(_)))
            ));
        }
        assert_eq!(parser.push(&mut bytes), Ok(None));
        assert_eq!(parser.end(), Ok(Some(expected)));
    }
    let ends = |text: &str| {
        let mut parser = Parser::new(Form::Positional);
        assert_eq!(parser.push(&mut text.as_bytes()), Ok(None));
        parser.end().unwrap_err().to_string()
    };
    assert_eq!(
        ends("1\n0"),
        "line 3: expected `temperature`, found the end of the input"
    );
    assert_eq!(
        ends("1\n2"),
        "line 2: `reset_flag`: expected 0 or 1, found `2`"
    );
}

#[test]
fn both_forms_say_the_same() {
    let sampling = Sampling {
        temperature: 0.5,
        top_k: 40,
        top_p: 0.75,
        repetition_penalty: 1.25,
        rep_penalty_lookback: 32,
    };
    let expected = |line, keep| {
        Message::Request(Request {
            line,
            keep,
            ids: vec![7, 0, 4_294_967_295],
            max_tokens: 9,
            sampling,
        })
    };
    let positional = |reset| format!("3\n{reset}\n0.5\n40\n0.75\n1.25\n32\n9\n7\n0\n4294967295\n");
    let found = message(Form::Positional, &positional(1));
    assert_eq!(found, expected(1, Keep::First(0)));
    let found = message(Form::Positional, &positional(0));
    assert_eq!(found, expected(1, Keep::All));
    let keyed = "1\na=b\n9\r\nkv_position=12\r\ntokens=7, 0,4294967295\ntemperature=5e-1\ntop_k=40\n\
                 top_p=0.75\nrepetition_penalty=1.25\nrep_penalty_lookback= 32 \nmax_tokens=9\nx==\n";
    assert_eq!(message(Form::Keyed, keyed), expected(3, Keep::First(12)));
}

#[test]
fn what_is_left_out_has_a_usual_value() {
    let expected = Message::Request(Request {
        line: 3,
        keep: Keep::First(0),
        ids: Vec::new(),
        max_tokens: 0,
        sampling: Sampling {
            temperature: 0.6,
            top_k: 50,
            top_p: 0.9,
            repetition_penalty: 1.1,
            rep_penalty_lookback: 64,
        },
    });
    assert_eq!(message(Form::Keyed, "1\na=b\n1\ntokens=\n"), expected);
}

#[test]
fn lines_and_lists_have_limits() {
    let refusal = |form, mut bytes: &[u8]| {
        let mut parser = Parser::new(form);
        loop {
            match parser.push(&mut bytes) {
                Ok(message) => assert!(message.is_some(), "taken"),
                Err(error) => return error.to_string(),
            }
        }
    };
    let long = vec![b'1'; (32 << 20) + 1];
    assert_eq!(
        refusal(Form::Positional, &long),
        "line 1: expected at most 33554432 bytes, found more"
    );
    let many = [
        b"1\na=b\n1\ntokens=".to_vec(),
        b"1,".repeat(5 << 20),
        b"1\n".to_vec(),
    ]
    .concat();
    assert_eq!(
        refusal(Form::Keyed, &many),
        "line 4: `tokens`, id 4194304: expected at most 4194304, found more"
    );
    let settings = [
        b"1000\n".to_vec(),
        b"key=".to_vec(),
        b"x".repeat(70_000),
        b"\n".to_vec(),
    ];
    assert_eq!(
        refusal(Form::Keyed, &settings.concat()),
        "line 2: expected at most 65536 bytes of settings, found more"
    );
}

/// Lines that are likely to mean something.
fn lines() -> impl Strategy<Value = Vec<u8>> {
    let line = prop_oneof![
        4 => (0u32..12).prop_map(|n| n.to_string()),
        1 => any::<u32>().prop_map(|n| n.to_string()),
        1 => Just("0.5".to_owned()),
        2 => "(kv_position|tokens|temperature|top_k|max_tokens|arch_type|x)=[0-9,.]{0,6}",
        1 => "\\PC{0,8}",
    ];
    prop::collection::vec(line, 0..60).prop_map(|lines| lines.join("\n").into_bytes())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn promises_are_kept(form in any::<bool>(), lines in lines()) {
        check::check(&[vec![u8::from(form)], lines].concat());
    }
}

#[test]
fn replies_are_lines_that_are_out_at_once() {
    /// Takes note of every piece, and of whether it was flushed.
    #[derive(Default)]
    struct Pieces(Vec<String>);
    impl std::io::Write for Pieces {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.push(String::from_utf8(bytes.to_vec()).unwrap());
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            self.0.push("flushed".to_owned());
            Ok(())
        }
    }
    let mut pieces = Pieces::default();
    let mut reply = Reply::new(&mut pieces);
    reply.line(17).unwrap();
    reply.line(4_294_967_295_u32).unwrap();
    assert_eq!(pieces.0, ["17\n", "flushed", "4294967295\n", "flushed"]);
}

/// What a worker does for every token besides computing it, towards a reader who waits at the other end
/// of a pipe: it gets every token. `-- --nocapture` shows the time of one, which was below 50 microseconds.
#[cfg(any(target_os = "linux", target_os = "macos"))]
#[test]
fn tokens_reach_a_reader_that_sleeps_in_between() {
    use std::io::{BufRead, BufReader};
    use std::time::{Duration, Instant};

    let (reader, writer) = std::io::pipe().unwrap();
    let reading = std::thread::spawn(move || {
        let lines = BufReader::new(reader).lines();
        lines
            .map(|line| line.unwrap().parse::<u64>().unwrap())
            .sum::<u64>()
    });
    let driver = driver::Driver::current();
    let mut reply = Reply::new(writer);
    let mut times = Vec::new();
    for id in 126_000..128_000_u64 {
        // As long as the reader needs to fall asleep.
        std::thread::sleep(Duration::from_micros(200));
        let start = Instant::now();
        reply.line(id).unwrap();
        assert!(!driver.is_gone());
        times.push(start.elapsed());
    }
    drop(reply);
    assert_eq!(reading.join().unwrap(), (126_000..128_000).sum::<u64>());
    times.sort();
    let (median, most) = (times[times.len() / 2], times[times.len() * 99 / 100]);
    println!("a token: {median:?} (median), {most:?} (99 % take no longer)");
}
