//! A chat in the terminal: `cargo run --release --example chat [MODEL]`.

use std::io::{self, BufRead, Write};

use sterna::ChatOptions;
use sterna::native::{self, Options};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args().nth(1).unwrap_or_else(|| "builtin".into());
    let options = Options {
        warn: &|warning| eprintln!("{warning}"),
        ..Options::default()
    };
    let model = native::open(&path, &options)?;
    let mut chat = model.chat(ChatOptions::default())?;
    for line in io::stdin().lock().lines() {
        for piece in chat.say(&line?)? {
            print!("{}", piece?);
            io::stdout().flush()?;
        }
        println!();
    }
    Ok(())
}
