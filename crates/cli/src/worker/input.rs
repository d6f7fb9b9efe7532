//! Standard input, read by a separate thread.
//!
//! The driver may write a request while a model is being loaded or computed, and may end meanwhile.

use std::io::{self, Read};
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;

use anyhow::{Context, Result};

use super::driver::Driver;
use super::protocol::{Form, Message, Parser};

/// Messages from standard input, as they come.
pub(crate) struct Input {
    messages: Receiver<Result<Message>>,
}

/// Bytes read at once.
const CHUNK: usize = 64 << 10;

impl Input {
    /// Begins to read messages of `form` from `driver`.
    pub(crate) fn begin(form: Form, driver: Driver) -> Result<Input> {
        // One may be queued. With more, the input would determine how much memory is used.
        let (sender, messages) = mpsc::sync_channel(1);
        thread::Builder::new()
            .name("input".to_owned())
            .spawn(move || {
                if let Err(error) = forward(form, &driver, &sender) {
                    // It is not joined where the process is about to end.
                    let _ = sender.send(Err(error));
                }
            })
            .context("cannot start a thread")?;
        Ok(Input { messages })
    }

    /// The next message; `None` if none will come.
    pub(crate) fn next(&self) -> Result<Option<Message>> {
        self.messages.recv().ok().transpose()
    }
}

/// Sends messages until the input or the driver ends, or the receiver is gone.
fn forward(form: Form, driver: &Driver, to: &SyncSender<Result<Message>>) -> Result<()> {
    let mut parser = Parser::new(form);
    let mut buffer = vec![0; CHUNK];
    let mut input = io::stdin().lock();
    while driver.wait_for_input() {
        let n = match input.read(&mut buffer) {
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context("cannot read from standard input"),
        };
        if n == 0 {
            if let Some(message) = parser.end()? {
                // It is not joined where the process is about to end.
                let _ = to.send(Ok(message));
            }
            return Ok(());
        }
        let mut bytes = &buffer[..n];
        while let Some(message) = parser.push(&mut bytes)? {
            let is_last = message == Message::Quit;
            if to.send(Ok(message)).is_err() || is_last {
                return Ok(());
            }
        }
    }
    Ok(())
}
