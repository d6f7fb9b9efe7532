//! Waking the one task that waits for others.

use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use wasm_bindgen_futures::spawn_local;

use crate::js;

/// A flag that one task waits for.
#[derive(Debug, Clone, Default)]
pub(super) struct Signal(Rc<RefCell<State>>);

#[derive(Debug, Default)]
struct State {
    is_set: bool,
    waiting: Option<Waker>,
    /// Numbers what is waited for, so that late timers wake nobody.
    turn: u64,
}

impl Signal {
    /// Wakes whoever waits, or will.
    pub(super) fn wake(&self) {
        let waiting = {
            let mut state = self.0.borrow_mut();
            state.is_set = true;
            state.waiting.take()
        };
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }

    /// Waits until woken, at most for `longest`.
    pub(super) async fn wait(&self, longest: Duration) {
        let turn = {
            let mut state = self.0.borrow_mut();
            state.turn += 1;
            state.turn
        };
        let signal = self.clone();
        spawn_local(async move {
            js::sleep(longest.as_secs_f64() * 1000.0).await;
            if signal.0.borrow().turn == turn {
                signal.wake();
            }
        });
        poll_fn(|cx| {
            let mut state = self.0.borrow_mut();
            if std::mem::take(&mut state.is_set) {
                return Poll::Ready(());
            }
            state.waiting = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
