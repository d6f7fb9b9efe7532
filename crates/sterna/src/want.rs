//! State machines that request bytes of files, and are given them.
//!
//! Opening and loading a model is written once, as a coroutine; its driver has the files: a mapped folder, a
//! download in progress, the storage of a browser, a peer.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context as TaskContext, Poll, Waker};

use bytes::{Bytes, BytesMut};

use crate::error::{Error, ErrorCode, Result, bail};

/// What a [`Machine`] requests next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Want {
    /// The length of a file: [`Machine::give_len`].
    Len {
        /// Its name in its folder.
        name: String,
    },
    /// Bytes of an existing file: [`Machine::give_bytes`].
    Bytes {
        /// Its name in its folder.
        name: String,
        /// The requested bytes, never none.
        range: Range<u64>,
    },
}

/// Work that needs files without having access to them: ask what it [wants](Machine::wanted), give it that,
/// and [finish](Machine::finish) once it wants nothing more.
///
/// ```
/// # fn drive(mut opening: sterna::Machine<'_, sterna::ModelFiles>, files: &std::collections::HashMap<String, bytes::Bytes>) -> sterna::Result<sterna::ModelFiles> {
/// use sterna::Want;
/// while let Some(want) = opening.wanted() {
///     match want {
///         Want::Len { name } => opening.give_len(files.get(&name).map(|file| file.len() as u64))?,
///         Want::Bytes { name, range } => {
///             let range = range.start as usize..range.end as usize;
///             opening.give_bytes(files[&name].slice(range))?;
///         }
///     }
/// }
/// opening.finish()
/// # }
/// ```
pub struct Machine<'a, T> {
    state: State<'a, T>,
    exchange: Exchange,
}

enum State<'a, T> {
    Working(Pin<Box<dyn Future<Output = Result<T>> + 'a>>),
    Done(Result<T>),
}

/// The exchange between a coroutine and its driver.
#[derive(Clone, Default)]
struct Exchange(Rc<RefCell<Slot>>);

#[derive(Default)]
struct Slot {
    want: Option<Want>,
    given: Option<Given>,
}

enum Given {
    Len(Option<u64>),
    Bytes(Bytes),
}

impl<'a, T> Machine<'a, T> {
    /// The machine running `work`, which is given access to files.
    pub(crate) fn new<F: Future<Output = Result<T>> + 'a>(
        work: impl FnOnce(Files) -> F,
    ) -> Machine<'a, T> {
        let exchange = Exchange::default();
        let work = work(Files(exchange.clone()));
        Machine {
            state: State::Working(Box::pin(work)),
            exchange,
        }
    }

    /// The current request; `None` once it is done, or has failed.
    pub fn wanted(&mut self) -> Option<Want> {
        let waiting = {
            let slot = self.exchange.0.borrow();
            slot.given.is_none().then(|| slot.want.clone()).flatten()
        };
        if waiting.is_some() {
            return waiting;
        }
        if let State::Working(work) = &mut self.state {
            // Only the exchange wakes it, and that is checked right here.
            let mut context = TaskContext::from_waker(Waker::noop());
            if let Poll::Ready(result) = work.as_mut().poll(&mut context) {
                self.state = State::Done(result);
                self.exchange.0.borrow_mut().want = None;
            }
        }
        self.exchange.0.borrow().want.clone()
    }

    /// Gives the length of the requested file; `None` if there is no such file.
    ///
    /// Errors: [`ErrorCode::InvalidRequest`] if no length is requested.
    pub fn give_len(&mut self, len: Option<u64>) -> Result<()> {
        match self.wanted() {
            Some(Want::Len { .. }) => self.give(Given::Len(len)),
            other => Err(unwanted("the length of a file", other.as_ref())),
        }
    }

    /// Gives bytes from the start of the requested range: at least one; what is missing of the range is
    /// requested again, and extra bytes are welcome.
    ///
    /// Errors: [`ErrorCode::InvalidRequest`] if no bytes are requested, or `bytes` is empty.
    pub fn give_bytes(&mut self, bytes: Bytes) -> Result<()> {
        match self.wanted() {
            Some(Want::Bytes { name, range }) if bytes.is_empty() => Err(Error::new(
                ErrorCode::InvalidRequest,
                format!(
                    "{name}: wanted bytes {} to {}, was given none",
                    range.start, range.end
                ),
            )),
            Some(Want::Bytes { .. }) => self.give(Given::Bytes(bytes)),
            other => Err(unwanted("bytes", other.as_ref())),
        }
    }

    fn give(&mut self, given: Given) -> Result<()> {
        let mut slot = self.exchange.0.borrow_mut();
        slot.want = None;
        slot.given = Some(given);
        Ok(())
    }

    /// The result.
    ///
    /// Errors: what was wrong with the files; [`ErrorCode::InvalidRequest`] if a request is pending.
    pub fn finish(mut self) -> Result<T> {
        match (self.wanted(), self.state) {
            (None, State::Done(result)) => result,
            (Some(Want::Len { name } | Want::Bytes { name, .. }), _) => {
                bail!(InvalidRequest, "{name}: wanted, was not given")
            }
            (None, State::Working(_)) => bail!(InvalidRequest, "it waits for no file"),
        }
    }
}

fn unwanted(given: &str, wanted: Option<&Want>) -> Error {
    let wanted = match wanted {
        None => "nothing".to_owned(),
        Some(Want::Len { name }) => format!("the length of {name}"),
        Some(Want::Bytes { name, range }) => {
            format!("bytes {} to {} of {name}", range.start, range.end)
        }
    };
    let message = format!("wanted {wanted}, was given {given}");
    Error::new(ErrorCode::InvalidRequest, message)
}

/// Access to files from within a [`Machine`].
#[derive(Clone)]
pub(crate) struct Files(Exchange);

impl Files {
    async fn ask(&self, want: Want) -> Given {
        self.0.0.borrow_mut().want = Some(want);
        poll_fn(|_| match self.0.0.borrow_mut().given.take() {
            Some(given) => Poll::Ready(given),
            None => Poll::Pending,
        })
        .await
    }

    /// Bytes in the file called `name`; `None` if there is none.
    pub(crate) async fn len(&self, name: &str) -> Option<u64> {
        let name = name.to_owned();
        match self.ask(Want::Len { name }).await {
            Given::Len(len) => len,
            Given::Bytes(_) => unreachable!("checked where it is given"),
        }
    }

    /// At least the bytes `range` of the file called `name`, of which `have` are the first.
    async fn at_least(&self, name: &str, range: Range<u64>, have: Bytes) -> Bytes {
        let mut at = range.start + have.len() as u64;
        if at >= range.end {
            return have;
        }
        let mut joined = BytesMut::from(have);
        loop {
            let want = Want::Bytes {
                name: name.to_owned(),
                range: at..range.end,
            };
            let Given::Bytes(bytes) = self.ask(want).await else {
                unreachable!("checked where it is given");
            };
            at += bytes.len() as u64;
            // In one piece, nothing is copied.
            if joined.is_empty() && at >= range.end {
                return bytes;
            }
            joined.extend_from_slice(&bytes);
            if at >= range.end {
                return joined.freeze();
            }
        }
    }

    /// The bytes `range` of the file called `name`.
    pub(crate) async fn bytes(&self, name: &str, range: Range<u64>) -> Bytes {
        let len = range.end - range.start;
        let bytes = self.at_least(name, range, Bytes::new()).await;
        bytes.slice(..usize::try_from(len).map_or(bytes.len(), |len| len.min(bytes.len())))
    }

    /// The result of `parse` on the beginning of a file of `len` bytes: it is given more as long as
    /// `needs_more` says how many bytes an error asks for.
    pub(crate) async fn header<T, E>(
        &self,
        name: &str,
        len: u64,
        parse: impl Fn(&[u8], u64) -> Result<T, E>,
        needs_more: impl Fn(&E) -> Option<u64>,
    ) -> Result<T, E> {
        let mut want = len.min(FIRST_PIECE);
        let mut bytes = Bytes::new();
        loop {
            bytes = self.at_least(name, 0..want, bytes).await;
            match parse(&bytes, len) {
                Ok(parsed) => return Ok(parsed),
                Err(error) => match needs_more(&error) {
                    // Doubling each time, so that little is parsed again.
                    Some(least) if (bytes.len() as u64) < len => {
                        want = least.max(2 * bytes.len() as u64).min(len);
                    }
                    _ => return Err(error),
                },
            }
        }
    }
}

/// Parts of files, joined in order; a single one isn't copied.
#[derive(Debug)]
pub(crate) struct Joined {
    n_bytes: u64,
    first: Bytes,
    all: Vec<u8>,
}

impl Joined {
    /// Of the `parts`, by file and range.
    pub(crate) fn new(parts: &[(usize, Range<u64>)]) -> Joined {
        Joined {
            n_bytes: parts.iter().map(|(_, range)| range.end - range.start).sum(),
            first: Bytes::new(),
            all: Vec::new(),
        }
    }

    /// Appends the next part.
    ///
    /// Errors: there is no memory for all of them.
    pub(crate) fn push(&mut self, part: Bytes) -> Result<()> {
        if self.all.is_empty() && self.first.is_empty() {
            self.first = part;
            return Ok(());
        }
        if self.all.is_empty() {
            let n_bytes = usize::try_from(self.n_bytes).unwrap_or(usize::MAX);
            self.all.try_reserve_exact(n_bytes)?;
            self.all.extend_from_slice(&std::mem::take(&mut self.first));
        }
        self.all.extend_from_slice(&part);
        Ok(())
    }

    pub(crate) fn finish(self) -> Bytes {
        match self.all.is_empty() {
            true => self.first,
            false => self.all.into(),
        }
    }
}

/// How much of a file is requested at first: all of most headers.
const FIRST_PIECE: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_joined_in_order() {
        let parts = [(0, 5..7), (1, 0..1), (2, 0..2)];
        let mut joined = Joined::new(&parts);
        for part in ["ab", "c", "de"] {
            joined.push(Bytes::from_static(part.as_bytes())).unwrap();
        }
        assert_eq!(&joined.finish()[..], b"abcde");
        let (mut one, only) = (Joined::new(&parts[..1]), Bytes::from_static(b"ab"));
        one.push(only.clone()).unwrap();
        assert_eq!(one.finish().as_ptr(), only.as_ptr());
        let mut huge = Joined::new(&[(0, 0..u64::MAX / 2), (1, 0..1)]);
        huge.push(only.clone()).unwrap();
        assert!(huge.push(only).is_err());
    }

    async fn first_and_last(files: Files) -> Result<(Bytes, Bytes)> {
        let Some(len) = files.len("a").await else {
            bail!(NotFound, "a: expected a file, found none");
        };
        Ok((
            files.bytes("a", 0..2).await,
            files.bytes("a", len - 2..len).await,
        ))
    }

    #[test]
    fn bytes_come_in_pieces_of_any_size() {
        for piece in [1, 2, 5] {
            let file = Bytes::from_static(b"abcde");
            let mut machine = Machine::new(first_and_last);
            while let Some(want) = machine.wanted() {
                match want {
                    Want::Len { .. } => machine.give_len(Some(5)).unwrap(),
                    Want::Bytes { range, .. } => {
                        let start = range.start as usize;
                        let end = (start + piece).min(5);
                        machine.give_bytes(file.slice(start..end)).unwrap();
                    }
                }
            }
            let (first, last) = machine.finish().unwrap();
            assert_eq!((&first[..], &last[..]), (&b"ab"[..], &b"de"[..]));
        }
    }

    #[test]
    fn only_what_is_wanted_is_taken() {
        let mut machine = Machine::new(first_and_last);
        assert!(machine.give_bytes(Bytes::from_static(b"x")).is_err());
        machine.give_len(Some(5)).unwrap();
        assert!(machine.give_len(Some(5)).is_err());
        assert!(machine.give_bytes(Bytes::new()).is_err());
        assert_eq!(
            machine.finish().unwrap_err().to_string(),
            "a: wanted, was not given"
        );
        let mut machine = Machine::new(first_and_last);
        machine.give_len(None).unwrap();
        assert_eq!(machine.wanted(), None);
        assert_eq!(machine.finish().unwrap_err().code(), ErrorCode::NotFound);
    }
}
