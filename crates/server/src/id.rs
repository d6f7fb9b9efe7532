//! Names that nothing else has.

/// Letters and digits of an id.
const LEN: usize = 24;

/// A new id that begins with `prefix`. It can't be guessed.
pub(crate) fn new(prefix: &str) -> String {
    const ALPHABET: &[u8; 32] = b"abcdefghijklmnopqrstuvwxyz234567";
    let letters = random::<LEN>().map(|byte| char::from(ALPHABET[usize::from(byte % 32)]));
    prefix.chars().chain(letters).collect()
}

/// Random bytes.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Without random numbers from the system there are those that seed hash maps.
    if getrandom::fill(&mut bytes).is_err() {
        for chunk in bytes.chunks_mut(4) {
            let seed = sterna::sampling::random_seed().to_le_bytes();
            chunk.copy_from_slice(&seed[..chunk.len()]);
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    #[test]
    fn no_two_are_alike() {
        let (a, b) = (super::new("x-"), super::new("x-"));
        assert_ne!(a, b);
        assert!(a.starts_with("x-") && a.len() == 26);
    }
}
