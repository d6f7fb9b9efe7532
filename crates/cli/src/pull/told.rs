//! A source whose first failure to answer is told, so that nobody wonders why nothing happens.

use std::ops::Range;
use std::sync::Once;

use sterna_delivery::fetch::Fault;
use sterna_delivery::source::{Answer, Source};

use crate::output;

/// The source it is made of, whose first silence is told.
pub(super) struct Told<S> {
    source: S,
    once: Once,
}

impl<S: Source> Told<S> {
    pub(super) fn new(source: S) -> Told<S> {
        let once = Once::new();
        Told { source, once }
    }
}

impl<S: Source> Source for Told<S> {
    fn name(&self) -> &str {
        self.source.name()
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        let answer = self.source.open(name, range);
        if let Err(fault @ (Fault::Unreachable { .. } | Fault::Stalled | Fault::Busy { .. })) =
            &answer
        {
            let from = self.name();
            self.once.call_once(|| {
                output::note(format_args!(
                    "note: {from}: {fault}; it is asked again for a while"
                ));
            });
        }
        answer
    }

    fn interrupt(&self) {
        self.source.interrupt();
    }
}
