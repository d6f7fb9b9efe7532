//! A sampler of one's own: drives a generator by hand, and always takes the second-best token. `cargo run
//! --release --example custom_sampler [MODEL]`.

use sterna::generate::{Event, Generator, Given, Request};
use sterna::native;
use sterna::sampling::SamplingOptions;
use sterna_engine::Logits;
use sterna_text::Encode;

fn main() -> sterna::Result<()> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "builtin".into());
    let model = native::open(&path, &Default::default())?;
    let prompt = model.tokenizer().encode("Once upon a time", Encode::TEXT)?;
    let mut sequence = model.sequence(256)?;
    let request = Request {
        max_tokens: 40,
        ..model.request(prompt, &SamplingOptions::default())?
    };
    let mut generator = Generator::new(request, sequence.ids(), sequence.ctx_len())?;
    while let Some(wanted) = generator.wanted(64) {
        sequence.truncate(wanted.keep);
        // All of them: the generator's own sampler may need only the largest.
        let logits = match wanted.logits {
            Logits::None => Logits::None,
            _ => Logits::Last,
        };
        let logits = sequence.forward(wanted.ids, logits)?;
        generator.give(match logits.is_empty() {
            true => Given::Nothing,
            false => Given::Token(second_best(&logits).into()),
        });
        while let Some(event) = generator.next_event() {
            match event {
                Event::Token(token) => print!("{}", token.text),
                Event::Ended { text, .. } => println!("{text}"),
                Event::Failed(error) => return Err(error),
                _ => {}
            }
        }
    }
    Ok(())
}

fn second_best(logits: &[f32]) -> u32 {
    let mut ids: Vec<usize> = (0..logits.len()).collect();
    ids.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    ids[1] as u32
}
