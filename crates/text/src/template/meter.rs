//! What rendering may cost: units of work, and bytes held at a time.

use std::cell::Cell;
use std::rc::Rc;

use super::error::Fault;

/// Work for an empty conversation. One of a thousand messages takes some hundred thousand units.
const WORK: usize = 2_000_000;
/// Work for each byte of the conversation.
const WORK_A_BYTE: usize = 4;
/// Bytes held for an empty conversation, the prompt among them.
const HELD: usize = 32 << 20;
/// Bytes held for each byte of the conversation.
const HELD_A_BYTE: usize = 8;

/// The one budget of a rendering. Whatever makes a value or goes through one asks it first.
#[derive(Debug)]
pub(super) struct Meter {
    work_left: Cell<usize>,
    held: Cell<usize>,
    most_held: usize,
}

impl Meter {
    /// A budget for a conversation of `input` bytes.
    pub(super) fn new(input: usize) -> Rc<Self> {
        let limit = |base: usize, each: usize| base.saturating_add(input.saturating_mul(each));
        Rc::new(Self {
            work_left: Cell::new(limit(WORK, WORK_A_BYTE)),
            held: Cell::new(0),
            most_held: limit(HELD, HELD_A_BYTE),
        })
    }

    /// Pays for `units` of work, about 50 ns each.
    pub(super) fn work(&self, units: usize) -> Result<(), Fault> {
        match self.work_left.get().checked_sub(units) {
            Some(left) => {
                self.work_left.set(left);
                Ok(())
            }
            None => {
                self.work_left.set(0);
                Err(Fault::new("the template takes too long"))
            }
        }
    }

    /// Pays for looking at every character of `bytes`.
    pub(super) fn scan(&self, bytes: usize) -> Result<(), Fault> {
        self.work(bytes / 4)
    }

    /// Pays for copying `bytes`.
    pub(super) fn copy(&self, bytes: usize) -> Result<(), Fault> {
        self.work(bytes / 128)
    }

    /// Says that `bytes` more are about to be allocated.
    pub(super) fn hold(&self, bytes: usize) -> Result<(), Fault> {
        match self.held.get().checked_add(bytes) {
            Some(held) if held <= self.most_held => {
                self.held.set(held);
                Ok(())
            }
            _ => {
                let limit = self.most_held;
                let problem = format!("the template needs more than {limit} bytes at a time");
                Err(Fault::new(problem))
            }
        }
    }

    pub(super) fn release(&self, bytes: usize) {
        self.held.set(self.held.get().saturating_sub(bytes));
    }
}

/// Bytes that are held as long as this is.
#[derive(Debug)]
pub(super) struct Hold {
    meter: Rc<Meter>,
    bytes: usize,
}

impl Hold {
    pub(super) fn new(meter: &Rc<Meter>, bytes: usize) -> Result<Self, Fault> {
        meter.hold(bytes)?;
        Ok(Self {
            meter: Rc::clone(meter),
            bytes,
        })
    }

    pub(super) fn meter(&self) -> &Rc<Meter> {
        &self.meter
    }

    pub(super) fn add(&mut self, bytes: usize) -> Result<(), Fault> {
        self.meter.hold(bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// Gives back all but `bytes`.
    pub(super) fn keep(&mut self, bytes: usize) {
        self.meter.release(self.bytes.saturating_sub(bytes));
        self.bytes = self.bytes.min(bytes);
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.meter.release(self.bytes);
    }
}
