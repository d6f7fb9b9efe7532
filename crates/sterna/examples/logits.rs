//! Logits of every position of a prompt, and what they say of its last token: `cargo run --release --example
//! logits [MODEL] [TEXT]`.

use sterna::native;
use sterna_engine::Logits;
use sterna_text::Encode;

fn main() -> sterna::Result<()> {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap_or_else(|| "builtin".into());
    let text = args.next().unwrap_or_else(|| "Once upon a time".into());
    let model = native::open(&path, &Default::default())?;
    let ids = model.tokenizer().encode(&text, Encode::TEXT)?;
    let mut sequence = model.sequence(ids.len())?;
    let logits = sequence.forward(&ids, Logits::All)?;
    let n_vocab = logits.len() / ids.len();
    for (row, id) in logits.chunks(n_vocab).zip(&ids) {
        let best = (0..n_vocab).max_by(|&a, &b| row[a].total_cmp(&row[b]));
        let best = best.and_then(|id| model.tokenizer().piece(id as u32));
        let piece = model.tokenizer().piece(*id).unwrap_or_default();
        println!("{piece:?} is followed by {:?}", best.unwrap_or_default());
    }
    Ok(())
}
