//! Answers as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;

use crate::answer::{Answers, Event};

/// How often something is sent while nothing happens, so that proxies keep the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// An event as it is sent.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Frame {
    pub(crate) name: Option<&'static str>,
    pub(crate) data: String,
}

impl Frame {
    /// One without a name.
    pub(crate) fn data(data: &Value) -> Frame {
        Frame {
            name: None,
            data: data.to_string(),
        }
    }

    /// One whose name is the type that `data` says, as in Anthropic's and the Responses API.
    pub(crate) fn named(name: &'static str, data: &Value) -> Frame {
        Frame {
            name: Some(name),
            data: data.to_string(),
        }
    }
}

/// What a dialect makes of events.
pub(crate) trait Encoder: Send + 'static {
    /// Of what happened to the answer `choice`, which belongs to one token.
    fn encode(&mut self, choice: usize, events: Vec<Event>, frames: &mut VecDeque<Frame>);

    /// Of the end of all answers.
    fn end(&mut self, frames: &mut VecDeque<Frame>);
}

/// `answers` as a response, encoded by `encoder`.
pub(crate) fn respond(answers: Answers, encoder: impl Encoder) -> Response {
    let begin = (answers, encoder, VecDeque::new(), false);
    let stream = stream::unfold(
        begin,
        |(mut answers, mut encoder, mut frames, mut is_over)| async move {
            loop {
                if let Some(Frame { name, data }) = frames.pop_front() {
                    // What reads line by line has to know the name before the data.
                    let sent = match name {
                        Some(name) => Sent::default().event(name),
                        None => Sent::default(),
                    };
                    let sent = sent.data(data);
                    let state = (answers, encoder, frames, is_over);
                    return Some((Ok::<_, Infallible>(sent), state));
                }
                if is_over {
                    return None;
                }
                match answers.next().await {
                    Some((choice, events)) => encoder.encode(choice, events, &mut frames),
                    None => {
                        encoder.end(&mut frames);
                        is_over = true;
                    }
                }
            }
        },
    );
    Sse::new(stream)
        .keep_alive(KeepAlive::new().interval(KEEP_ALIVE))
        .into_response()
}
