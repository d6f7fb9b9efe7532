//! The end of standard input, with which a server ends that was told to.

use std::io;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::sync::oneshot;

/// How long to wait for what can't be read just now.
const AGAIN: Duration = Duration::from_millis(200);

/// Who is told that standard input has closed. While there is nobody, the program exits by that: it has no answers yet
/// that could be waited for.
#[derive(Clone, Default)]
pub(super) struct Stdin(Arc<Mutex<Option<oneshot::Sender<()>>>>);

/// Reads until there is no more. What can't be read any more says nothing more, either; what can't be read just now, as a
/// terminal that others made non-blocking, is asked again.
fn pass_over(mut from: impl io::Read) {
    let mut passed = [0; 1024];
    loop {
        match from.read(&mut passed) {
            Ok(0) => return,
            Ok(_) => {}
            Err(error) => match error.kind() {
                io::ErrorKind::Interrupted => {}
                io::ErrorKind::WouldBlock => thread::sleep(AGAIN),
                _ => return,
            },
        }
    }
}

impl Stdin {
    /// Reads it, on a thread of its own, and passes over what is in it.
    pub(super) fn watch() -> Result<Stdin> {
        let stdin = Stdin::default();
        let told = stdin.clone();
        let read = move || {
            pass_over(io::stdin().lock());
            let waiting = told.0.lock().unwrap_or_else(PoisonError::into_inner).take();
            match waiting {
                // Whoever is gone needn't be told.
                Some(waiting) => drop(waiting.send(())),
                None => process::exit(0),
            }
        };
        thread::Builder::new()
            .name("stdin".to_owned())
            .spawn(read)
            .context("cannot watch standard input")?;
        Ok(stdin)
    }

    /// Waits until it has closed; from now on the program doesn't exit by that.
    pub(super) async fn closed(self) {
        let (sender, closed) = oneshot::channel();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        // The sender lives until it is told.
        let _ = closed.await;
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Error, ErrorKind, Read, Result};

    use super::pass_over;

    /// Gives each of these once, then the end.
    struct Answers(Vec<Result<usize>>);

    impl Read for Answers {
        fn read(&mut self, _: &mut [u8]) -> Result<usize> {
            self.0.pop().unwrap_or(Ok(0))
        }
    }

    #[test]
    fn what_cant_be_read_just_now_is_no_end() {
        let mut answers = Answers(vec![
            Err(ErrorKind::WouldBlock.into()),
            Ok(7),
            Err(ErrorKind::Interrupted.into()),
        ]);
        pass_over(&mut answers);
        assert!(answers.0.is_empty());
        let mut gone = Answers(vec![Ok(1), Err(Error::other("gone"))]);
        pass_over(&mut gone);
        assert_eq!(gone.0.len(), 1);
    }
}
