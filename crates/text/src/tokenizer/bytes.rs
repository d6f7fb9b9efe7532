//! The alphabet of byte-level tokenizers: one printable character for each byte.
//!
//! Printable Latin-1 bytes stand for themselves; the other 68 are the characters from U+0100 on, in order (GPT-2).

/// The character that spells each byte.
const SPELLING: [char; 256] = {
    let mut table = ['\0'; 256];
    let mut next = 0x100;
    let mut byte = 0;
    while byte < 256 {
        let code = if is_printable(byte as u8) {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        table[byte] = match char::from_u32(code) {
            Some(c) => c,
            None => panic!("no code point below 0x200 is a surrogate"),
        };
        byte += 1;
    }
    table
};

/// The byte each character below U+0144 spells, plus one; 0 for none.
const BYTE: [u16; 0x144] = {
    let mut table = [0; 0x144];
    let mut byte = 0;
    while byte < 256 {
        table[SPELLING[byte] as usize] = byte as u16 + 1;
        byte += 1;
    }
    table
};

const fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character that spells `byte`.
pub(crate) fn spell(byte: u8) -> char {
    SPELLING[byte as usize]
}

/// `text`, one character for each of its bytes.
pub(crate) fn spell_all(text: &[u8]) -> String {
    text.iter().map(|&byte| spell(byte)).collect()
}

/// The bytes that `piece` spells, appended to `out`; nothing is appended and `false` returned if a character of it
/// spells none.
pub(crate) fn unspell(piece: &str, out: &mut Vec<u8>) -> bool {
    let start = out.len();
    for c in piece.chars() {
        match BYTE.get(c as usize) {
            Some(&byte) if byte > 0 => out.push((byte - 1) as u8),
            _ => {
                out.truncate(start);
                return false;
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let all: Vec<u8> = (0..=255).collect();
        let mut back = Vec::new();
        assert!(unspell(&spell_all(&all), &mut back));
        assert_eq!(back, all);
        assert_eq!(
            (spell(b' '), spell(b'\n'), spell(b'a'), spell(0)),
            ('Ġ', 'Ċ', 'a', 'Ā')
        );
        assert!(!unspell("a▁", &mut back));
        assert_eq!(back, all);
    }
}
