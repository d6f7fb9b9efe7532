//! What conversions have to say, on a terminal.

use std::cell::RefCell;

use sterna_convert::{Event, Warning};

use crate::progress::Progress;
use crate::{model, output};

/// Shows how far a conversion is, and says what it warns of.
pub(crate) fn notify() -> impl Fn(Event) {
    let bar: RefCell<Option<Progress>> = RefCell::new(None);
    move |event| match event {
        Event::Started { step, n_bytes } => {
            bar.replace(Some(Progress::bytes(step.name(), n_bytes)));
        }
        Event::Advanced { n_bytes } => {
            if let Some(bar) = &*bar.borrow() {
                bar.add(n_bytes);
            }
        }
        Event::Warning(warning) => {
            // Not into a bar.
            bar.take();
            say(&warning);
        }
        _ => {}
    }
}

/// Says what a warning means for whoever gave the flags.
fn say(warning: &Warning) {
    let kind = if warning.is_warning() {
        "warning"
    } else {
        "note"
    };
    let no_head = "the model has no output head of its own: its embedding table serves as one";
    match warning {
        Warning::Model(warning) => model::tell(warning),
        Warning::NoHead { is_ignored: false } => {
            output::note(format_args!(
                "{kind}: {no_head}, and --head is for the table"
            ));
        }
        Warning::NoHead { is_ignored: true } => output::note(format_args!(
            "{kind}: {no_head}; --head is ignored, as --embeddings says what the table is"
        )),
        Warning::Described { .. } => output::note(format_args!(
            "{kind}: {warning}; --arch qwen3 leaves the weights as they are"
        )),
        warning => output::note(format_args!("{kind}: {warning}")),
    }
}
