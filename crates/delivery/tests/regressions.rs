//! Replays what fuzzing found, and its corpora, against the same checks, and mutations of these inputs:
//! `STERNA_MUTATIONS=N` makes N of each target instead of a few.

use std::env;

#[path = "../../../fuzz/checks/http_head.rs"]
mod http_head;
#[path = "../../../fuzz/checks/minisign.rs"]
mod minisign;
#[path = "../../../fuzz/checks/store_index.rs"]
mod store_index;

fn replay(target: &str, check: fn(&[u8])) {
    sterna_testing::fuzz::replay(target, check);
    let inputs = sterna_testing::fuzz::inputs(target).into_iter();
    let inputs: Vec<Vec<u8>> = inputs.map(|(_, input)| input).collect();
    let n = env::var("STERNA_MUTATIONS").map_or(2000, |n| n.parse().unwrap());
    let mut numbers = Numbers(1);
    for i in 0..n {
        let input = numbers.mutated(&inputs);
        let outcome = std::panic::catch_unwind(|| check(&input));
        assert!(
            outcome.is_ok(),
            "mutation {i} of {target}: {:?}",
            input.escape_ascii().to_string()
        );
    }
}

/// A generator of pseudo-random numbers (xorshift64*).
struct Numbers(u64);

impl Numbers {
    /// A number below `end`, or 0 if that is 0.
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33;
        number as usize % end.max(1)
    }

    /// One of `inputs` with some of its bytes changed, removed, or exchanged for parts of another.
    fn mutated(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        const DIGITS: [&str; 5] = ["0", "-1", "255", "18446744073709551615", "1e400"];
        let mut input = inputs[self.below(inputs.len())].clone();
        for _ in 0..1 + self.below(5) {
            let at = self.below(input.len() + 1);
            let end = at + self.below((input.len() - at).min(24) + 1);
            let new = match self.below(5) {
                0 => vec![self.below(256) as u8],
                1 => Vec::new(),
                2 => DIGITS[self.below(DIGITS.len())].into(),
                3 => input[at..end].repeat(2),
                _ => {
                    let other = &inputs[self.below(inputs.len())];
                    let at = self.below(other.len() + 1);
                    other[at..at + self.below((other.len() - at).min(48) + 1)].to_vec()
                }
            };
            input.splice(at..end, new);
        }
        input
    }
}

#[test]
fn http_head_inputs() {
    replay("http_head", http_head::check);
}

#[test]
fn store_index_inputs() {
    replay("store_index", store_index::check);
}

#[test]
fn minisign_inputs() {
    replay("minisign", minisign::check);
}
