//! A source whose first failure to respond is reported, so that the user knows what it is waiting for.

use std::ops::Range;
use std::sync::Once;

use super::{Event, Notify, Warning};
use crate::fetch::Fault;
use crate::source::{Answer, Source};

/// The underlying source, with a warning when it first doesn't respond.
pub(super) struct WarnOnce<'a, S> {
    source: S,
    once: Once,
    notify: &'a Notify<'a>,
}

impl<'a, S: Source> WarnOnce<'a, S> {
    pub(super) fn new(source: S, notify: &'a Notify<'a>) -> Self {
        Self {
            source,
            once: Once::new(),
            notify,
        }
    }
}

impl<S: Source> Source for WarnOnce<'_, S> {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        let answer = self.source.open(name, range);
        if let Err(fault @ (Fault::Unreachable { .. } | Fault::Stalled | Fault::Busy { .. })) =
            &answer
        {
            self.once.call_once(|| {
                (self.notify)(Event::Warning(Warning::Silent {
                    source: self.name().to_owned(),
                    fault: fault.clone(),
                }));
            });
        }
        answer
    }

    fn interrupt(&self) {
        self.source.interrupt();
    }
}
