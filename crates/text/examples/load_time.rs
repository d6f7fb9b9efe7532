//! Prints how long tokenizers take to load and to encode: `cargo run --release --example load_time -- FILES`.

use std::time::Instant;

use sterna_text::{Encode, Tokenizer};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for path in std::env::args().skip(1) {
        let file = std::fs::read(&path)?;
        let start = Instant::now();
        let tokenizer = match path.rsplit('.').next() {
            Some("json") => Tokenizer::from_hf_json(&file, None)?,
            Some("model") => Tokenizer::from_sentencepiece(&file, None)?,
            _ => Tokenizer::from_tiktoken(&file, None, None)?,
        };
        let loaded = start.elapsed();
        let text =
            "The quick brown fox jumps over the lazy dog, 1234 times; isn't it?\n".repeat(4000);
        let start = Instant::now();
        let n_tokens = tokenizer.encode(&text, Encode::PLAIN)?.len();
        let seconds = start.elapsed().as_secs_f64();
        let rate = text.len() as f64 / 1e6 / seconds;
        println!(
            "{path}: {} ids, loaded in {loaded:?}; {n_tokens} tokens at {rate:.1} MB/s",
            tokenizer.n_vocab()
        );
    }
    Ok(())
}
