//! What constraints cost, with a vocabulary of 200,000 tokens: making them, and each token.

use std::fs;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use sterna_constraint::{Constraint, Grammar, Vocabulary};
use sterna_testing::schemas;
use sterna_text::{Encode, TiktokenEncoding, Tokenizer};

const SCHEMA: &str = r#"{"type": "object", "properties": {
    "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0},
    "email": {"type": "string", "format": "email"},
    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
    "address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        "required": ["street", "city"], "additionalProperties": false}},
    "required": ["name", "age", "email", "tags", "address"], "additionalProperties": false}"#;

const ANSWER: &str = r#"{"name": "Ruby the fox", "age": 3, "email": "ruby@example.org", "tags": ["red", "blue"],
    "address": {"street": "12 Hollow Lane, behind the old mill", "city": "Zürich"}}"#;

fn tokens(criterion: &mut Criterion) {
    let file = "../../testdata/tokenizers/kitoken/tiktoken/o200k_base.tiktoken";
    let file = fs::read(file).expect("the vocabulary is in the repository");
    let tokenizer = Tokenizer::from_tiktoken(&file, Some(TiktokenEncoding::O200k), None);
    let tokenizer = tokenizer.expect("it is a vocabulary");
    let spelling = |id| tokenizer.token_bytes(id).unwrap_or_default();
    let spellings: Vec<Vec<u8>> = (0..tokenizer.n_vocab() as u32).map(spelling).collect();
    let mut group = criterion.benchmark_group("constraint");
    group.sample_size(10);
    group.bench_function("vocabulary", |bencher| {
        bencher.iter(|| Vocabulary::new(black_box(spellings.clone())).map(|_| ()));
    });
    let vocabulary = Vocabulary::new(spellings).expect("ids fit");
    for (name, grammar, answer) in [
        (
            "schema",
            Grammar::JsonSchema(SCHEMA.into()),
            ANSWER.replace("\n    ", " "),
        ),
        ("object", Grammar::JsonObject, ANSWER.replace("\n    ", " ")),
        (
            "regex",
            Grammar::Regex("([a-zäöü]+ ){40}".into()),
            "one fox and two terns ".repeat(8),
        ),
    ] {
        group.throughput(Throughput::Elements(1));
        group.bench_function(format!("{name}/made"), |bencher| {
            bencher.iter(|| Constraint::new(&vocabulary, black_box(&grammar)).map(|_| ()));
        });
        let ids = tokenizer.encode(&answer, Encode::RAW).expect("it is text");
        group.throughput(Throughput::Elements(ids.len() as u64));
        let fresh = Constraint::new(&vocabulary, &grammar).expect("it is valid");
        group.bench_function(format!("{name}/tokens"), |bencher| {
            bencher.iter(|| {
                let mut constraint = fresh.clone();
                for &id in &ids {
                    black_box(constraint.allowed().expect("within the limits"));
                    constraint.accept(id).expect("the answer matches");
                }
            });
        });
    }
    group.finish();
    random_schemas(&vocabulary);
}

/// Prints how long making constraints of random schemas takes: of many, what matters is the slowest.
fn random_schemas(vocabulary: &Vocabulary) {
    const N: u64 = 1000;
    let made = (0..N).map(|seed| {
        let grammar = Grammar::JsonSchema(schemas::random(seed).to_string());
        let begun = Instant::now();
        let constraint = Constraint::new(vocabulary, black_box(&grammar));
        black_box(constraint.expect("it is a schema that some values match"));
        begun.elapsed()
    });
    let mut took: Vec<Duration> = made.collect();
    took.sort();
    let at = |share: f64| took[(share * (N - 1) as f64) as usize];
    let (median, p99, most) = (at(0.5), at(0.99), at(1.0));
    println!(
        "{N} random schemas made: median {median:.1?}, 99th percentile {p99:.1?}, most {most:.1?}"
    );
}

criterion_group!(benches, tokens);
criterion_main!(benches);
