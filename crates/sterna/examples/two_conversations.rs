//! Two answers at once, in steps that they share: `cargo run --release --example two_conversations [MODEL]`.

use sterna::generate::Event;
use sterna::native;
use sterna::sampling::SamplingOptions;
use sterna::scheduler::{Scheduler, SchedulerOptions};
use sterna_text::Encode;

fn main() -> sterna::Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "builtin".into());
    let model = native::open(&path, &Default::default())?;
    let mut scheduler = Scheduler::new(SchedulerOptions::default());
    let mut answers = Vec::new();
    for start in ["Once upon a time", "The little fox"] {
        let prompt = model.tokenizer().encode(start, Encode::TEXT)?;
        let id = scheduler.add(model.sequence(256)?);
        scheduler.start(id, model.request(prompt, &SamplingOptions::default())?)?;
        answers.push((id, start.to_owned()));
    }
    while !scheduler.is_idle() {
        for (id, event) in scheduler.step()? {
            let answer = answers.iter_mut().find(|(of, _)| *of == id);
            let Some((_, text)) = answer else { continue };
            match event {
                Event::Token(token) => *text += &token.text,
                Event::Ended { text: held, .. } => *text += &held,
                Event::Failed(error) => return Err(error),
                _ => {}
            }
        }
    }
    for (_, text) in answers {
        println!("{text}\n");
    }
    Ok(())
}
