//! What a driver says to a worker. The first byte chooses the form of the protocol.

use super::protocol::{Form, Keep, Message, Parser, ProtocolError, Request};

/// Messages up to the end or the first error.
fn read<'a>(
    form: Form,
    pieces: impl Iterator<Item = &'a [u8]>,
) -> (Vec<Message>, Option<ProtocolError>) {
    let mut parser = Parser::new(form);
    let mut messages = Vec::new();
    for mut piece in pieces {
        while !piece.is_empty() {
            match parser.push(&mut piece) {
                Ok(message) => messages.extend(message),
                Err(error) => return (messages, Some(error)),
            }
        }
    }
    match parser.end() {
        Ok(message) => {
            messages.extend(message);
            (messages, None)
        }
        Err(error) => (messages, Some(error)),
    }
}

/// A request in the keyed form, after an empty block.
fn written(request: &Request) -> String {
    let ids: Vec<String> = request.ids.iter().map(u32::to_string).collect();
    let position = match request.keep {
        Keep::All => usize::MAX,
        Keep::First(n) => n,
    };
    let sampling = &request.sampling;
    format!(
        "1\na=\n8\nkv_position={position}\ntokens={}\ntemperature={}\ntop_k={}\ntop_p={}\n\
         repetition_penalty={}\nrep_penalty_lookback={}\nmax_tokens={}\n",
        ids.join(","),
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.repetition_penalty,
        sampling.rep_penalty_lookback,
        request.max_tokens,
    )
}

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    let Some((&form, bytes)) = data.split_first() else {
        return;
    };
    let form = match form % 2 {
        0 => Form::Positional,
        _ => Form::Keyed,
    };
    let (messages, error) = read(form, std::iter::once(bytes));
    // However the bytes are cut, they mean the same.
    assert_eq!(
        read(form, bytes.chunks(1)),
        (messages.clone(), error.clone())
    );
    if let Some(error) = error {
        // One line, and a short one.
        let text = error.to_string();
        assert!(
            text.len() < 500 && !text.contains(char::is_control),
            "{text}"
        );
    }
    for message in messages {
        let Message::Request(request) = message else {
            continue;
        };
        let sampling = &request.sampling;
        assert!(sampling.temperature >= 0.0 && sampling.temperature.is_finite());
        assert!((0.0..=1.0).contains(&sampling.top_p));
        assert!(sampling.repetition_penalty > 0.0 && sampling.repetition_penalty.is_finite());
        let keep = match request.keep {
            Keep::All => Keep::First(usize::MAX),
            keep => keep,
        };
        let expected = Request {
            keep,
            line: 3,
            ..request.clone()
        };
        let text = written(&request);
        let (again, error) = read(Form::Keyed, std::iter::once(text.as_bytes()));
        assert_eq!(
            (&again[1..], error),
            (&[Message::Request(expected)][..], None)
        );
    }
}
