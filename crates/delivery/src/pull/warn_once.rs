//! A source whose first failure to respond is reported, so that the user knows what it is waiting for.

use std::ops::Range;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Event, Notify, Warning};
use crate::fetch::Fault;
use crate::source::{Answer, Source};

/// The underlying source, with a warning when it first doesn't respond.
pub(super) struct WarnOnce<'a, S> {
    source: S,
    once: Once,
    /// A request that was interrupted says nothing of the source.
    n_interrupts: AtomicU64,
    notify: &'a Notify<'a>,
}

impl<'a, S: Source> WarnOnce<'a, S> {
    pub(super) fn new(source: S, notify: &'a Notify<'a>) -> Self {
        Self {
            source,
            once: Once::new(),
            n_interrupts: AtomicU64::new(0),
            notify,
        }
    }
}

impl<S: Source> Source for WarnOnce<'_, S> {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        let before = self.n_interrupts.load(Ordering::SeqCst);
        let answer = self.source.open(name, range);
        if let Err(fault @ Fault::WrongBytes(_)) = &answer {
            self.lied(&format!("`{name}`: {fault}"));
        }
        let failed = match &answer {
            Ok(answer) => answer.head.check_kind(name).err(),
            Err(fault) => Some(fault.clone()),
        };
        if let Some(fault) = failed.filter(Fault::may_pass)
            && before == self.n_interrupts.load(Ordering::SeqCst)
        {
            self.once.call_once(|| {
                let source = self.name().to_owned();
                (self.notify)(Event::Warning(Warning::Silent { source, fault }));
            });
        }
        answer
    }

    fn interrupt(&self) {
        self.n_interrupts.fetch_add(1, Ordering::SeqCst);
        self.source.interrupt();
    }

    fn is_stranger(&self) -> bool {
        self.source.is_stranger()
    }

    fn lied(&self, why: &str) -> Option<String> {
        let why = self.source.lied(why)?;
        let source = self.name().to_owned();
        let forgotten = Warning::Forgotten { source, why };
        (self.notify)(Event::Warning(forgotten));
        None
    }
}
