//! Progress and warnings of conversions on a terminal.

use std::cell::RefCell;
use std::fmt;

use sterna_convert::{Event, Warning};

use crate::progress::Progress;
use crate::{model, output};

/// Shows the progress of a conversion, and prints its warnings.
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
            // Not in the middle of a bar.
            bar.take();
            say(&warning);
        }
        _ => {}
    }
}

/// Explains a warning in terms of the flags.
fn say(warning: &Warning) {
    let no_head = "the model has no separate output head: it uses its embedding table";
    let say = |text: fmt::Arguments<'_>| output::remark(warning.is_warning(), text);
    match warning {
        Warning::Model(warning) => model::tell(warning),
        Warning::NoHead { is_ignored: false } => {
            say(format_args!("{no_head}, and --head is for the table"));
        }
        Warning::NoHead { is_ignored: true } => say(format_args!(
            "{no_head}; --head is ignored, as --embeddings gives the type of the table"
        )),
        Warning::Described { .. } => say(format_args!(
            "{warning}; --arch qwen3 leaves the weights as they are"
        )),
        warning => say(format_args!("{warning}")),
    }
}
