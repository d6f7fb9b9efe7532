//! The hash that an existing RDRR implementation writes and calls BLAKE3.
//!
//! It is BLAKE3 except for two mistakes in its compression function: the last four state words are the
//! initialisation constants XORed with counter, block length and flags instead of being those values, and a
//! root's words are taken without XORing the upper half of the state into them. Packages in circulation have
//! such digests, so they are recognised; nothing here writes them.

use super::{DIGEST_BYTES, write_hex};

use std::fmt;

const BLOCK: usize = 64;
const CHUNK: usize = 1024;

const IV: [u32; 8] = [
    0x6A09_E667,
    0xBB67_AE85,
    0x3C6E_F372,
    0xA54F_F53A,
    0x510E_527F,
    0x9B05_688C,
    0x1F83_D9AB,
    0x5BE0_CD19,
];

const PERMUTATION: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];

const CHUNK_START: u32 = 1 << 0;
const CHUNK_END: u32 = 1 << 1;
const PARENT: u32 = 1 << 2;
const ROOT: u32 = 1 << 3;

/// A chaining value of the tree.
type Words = [u32; 8];

/// The variant's hasher; its digests are distinguishable from BLAKE3's only by value.
#[derive(Clone)]
pub struct Blake3Variant(Tree);

impl Blake3Variant {
    /// The state before the first byte.
    pub fn new() -> Self {
        Self(Tree::new(Rules::Variant))
    }

    /// Hashes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The digest of all bytes so far.
    pub fn finish(self) -> [u8; DIGEST_BYTES] {
        self.0.finish()
    }
}

impl Default for Blake3Variant {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Blake3Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Blake3Variant(")?;
        write_hex(&self.clone().finish(), f)?;
        f.write_str(")")
    }
}

/// Which compression function. The standard's is here to prove, against the standard's own implementation,
/// that the two mistakes are the only differences.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rules {
    Variant,
    #[cfg(test)]
    Standard,
}

/// What a node of the tree compresses.
struct Node {
    cv: Words,
    block: [u8; BLOCK],
    counter: u64,
    block_len: u32,
    flags: u32,
}

impl Rules {
    /// The chaining value of a node, or the digest's words if it is the root.
    fn compress(self, node: &Node) -> Words {
        let mut message = [0; 16];
        for (word, bytes) in message.iter_mut().zip(node.block.as_chunks().0) {
            *word = u32::from_le_bytes(*bytes);
        }
        let mut tail = [
            node.counter as u32,
            (node.counter >> 32) as u32,
            node.block_len,
            node.flags,
        ];
        if self == Self::Variant {
            for (word, iv) in tail.iter_mut().zip(&IV[4..]) {
                *word ^= iv;
            }
        }
        let mut v = [0; 16];
        v[..8].copy_from_slice(&node.cv);
        v[8..12].copy_from_slice(&IV[..4]);
        v[12..].copy_from_slice(&tail);
        for round in 0..7 {
            if round > 0 {
                message = PERMUTATION.map(|from| message[from]);
            }
            mix_all(&mut v, &message);
        }
        if self == Self::Variant && node.flags & ROOT != 0 {
            return std::array::from_fn(|i| v[i]);
        }
        std::array::from_fn(|i| v[i] ^ v[i + 8])
    }
}

/// One round: the columns, then the diagonals.
fn mix_all(v: &mut [u32; 16], m: &[u32; 16]) {
    let mut mix = |a: usize, b: usize, c: usize, d: usize, x: u32, y: u32| {
        v[a] = v[a].wrapping_add(v[b]).wrapping_add(x);
        v[d] = (v[d] ^ v[a]).rotate_right(16);
        v[c] = v[c].wrapping_add(v[d]);
        v[b] = (v[b] ^ v[c]).rotate_right(12);
        v[a] = v[a].wrapping_add(v[b]).wrapping_add(y);
        v[d] = (v[d] ^ v[a]).rotate_right(8);
        v[c] = v[c].wrapping_add(v[d]);
        v[b] = (v[b] ^ v[c]).rotate_right(7);
    };
    mix(0, 4, 8, 12, m[0], m[1]);
    mix(1, 5, 9, 13, m[2], m[3]);
    mix(2, 6, 10, 14, m[4], m[5]);
    mix(3, 7, 11, 15, m[6], m[7]);
    mix(0, 5, 10, 15, m[8], m[9]);
    mix(1, 6, 11, 12, m[10], m[11]);
    mix(2, 7, 8, 13, m[12], m[13]);
    mix(3, 4, 9, 14, m[14], m[15]);
}

/// The hash tree so far.
#[derive(Clone)]
struct Tree {
    rules: Rules,
    /// The current chunk: its chaining value, its last block, and the length of both so far.
    cv: Words,
    block: [u8; BLOCK],
    block_len: usize,
    /// Bytes of the chunk in blocks before the last.
    compressed: usize,
    /// Chunks that are complete.
    n_chunks: u64,
    /// Complete subtrees, the largest first: one for every bit set in `n_chunks`.
    subtrees: Vec<Words>,
}

impl Tree {
    fn new(rules: Rules) -> Self {
        Self {
            rules,
            cv: IV,
            block: [0; BLOCK],
            block_len: 0,
            compressed: 0,
            n_chunks: 0,
            subtrees: Vec::new(),
        }
    }

    fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            // A full block waits until more bytes show that it isn't the last one.
            if self.block_len == BLOCK {
                if self.compressed + BLOCK == CHUNK {
                    let node = self.last_block();
                    self.push_chunk(&node);
                } else {
                    self.cv = self.rules.compress(&Node {
                        flags: self.start_flag(),
                        ..self.last_block()
                    });
                    self.compressed += BLOCK;
                }
                self.block = [0; BLOCK];
                self.block_len = 0;
            }
            let n = bytes.len().min(BLOCK - self.block_len);
            let (taken, rest) = bytes.split_at(n);
            self.block[self.block_len..][..n].copy_from_slice(taken);
            self.block_len += n;
            bytes = rest;
        }
    }

    fn start_flag(&self) -> u32 {
        if self.compressed == 0 { CHUNK_START } else { 0 }
    }

    /// The chunk's last block, if no more bytes belong to the chunk.
    fn last_block(&self) -> Node {
        Node {
            cv: self.cv,
            block: self.block,
            counter: self.n_chunks,
            // At most 64.
            block_len: self.block_len as u32,
            flags: self.start_flag() | CHUNK_END,
        }
    }

    /// Ends a chunk, and every subtree that it completes.
    fn push_chunk(&mut self, last: &Node) {
        let mut cv = self.rules.compress(last);
        self.n_chunks += 1;
        for _ in 0..self.n_chunks.trailing_zeros() {
            let left = (self.subtrees.pop()).expect("a subtree for every bit set in `n_chunks`");
            cv = self.rules.compress(&parent(&left, &cv));
        }
        self.subtrees.push(cv);
        self.cv = IV;
        self.compressed = 0;
    }

    fn finish(&self) -> [u8; DIGEST_BYTES] {
        let mut node = self.last_block();
        for left in self.subtrees.iter().rev() {
            node = parent(left, &self.rules.compress(&node));
        }
        node.flags |= ROOT;
        // Of all output blocks of a root only the first is needed; the counter numbers them.
        node.counter = 0;
        let words = self.rules.compress(&node);
        let mut digest = [0; DIGEST_BYTES];
        for (bytes, word) in digest.as_chunks_mut().0.iter_mut().zip(words) {
            *bytes = word.to_le_bytes();
        }
        digest
    }
}

fn parent(left: &Words, right: &Words) -> Node {
    let mut block = [0; BLOCK];
    for (bytes, word) in block
        .as_chunks_mut()
        .0
        .iter_mut()
        .zip(left.iter().chain(right))
    {
        *bytes = word.to_le_bytes();
    }
    Node {
        cv: IV,
        block,
        counter: 0,
        block_len: BLOCK as u32,
        flags: PARENT,
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::counting, *};

    fn digest(rules: Rules, bytes: &[u8], piece: usize) -> [u8; DIGEST_BYTES] {
        let mut tree = Tree::new(rules);
        bytes.chunks(piece).for_each(|part| tree.update(part));
        tree.finish()
    }

    const LENGTHS: [usize; 14] = [
        0, 1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 3072, 5120, 31744, 102_400,
    ];

    #[test]
    fn without_the_two_slips_it_is_blake3() {
        for len in LENGTHS {
            let bytes = counting(len);
            let standard = blake3::hash(&bytes);
            for piece in [1, 64, 1000, usize::MAX] {
                assert_eq!(
                    &digest(Rules::Standard, &bytes, piece),
                    standard.as_bytes(),
                    "{len} bytes in pieces of {piece}"
                );
            }
        }
    }

    #[test]
    fn with_them_it_is_never_blake3_and_any_pieces_give_one_digest() {
        for len in LENGTHS {
            let bytes = counting(len);
            let whole = digest(Rules::Variant, &bytes, usize::MAX);
            assert_ne!(&whole, blake3::hash(&bytes).as_bytes());
            assert_eq!(whole, digest(Rules::Variant, &bytes, 77));
        }
    }

    #[test]
    fn the_digest_of_nothing_begins_as_the_other_implementation_says() {
        let empty = Blake3Variant::new().finish();
        assert_eq!(empty[..4], [0xfd, 0xa1, 0x20, 0x0e]);
        assert!(format!("{:?}", Blake3Variant::default()).starts_with("Blake3Variant(fda1200e"));
    }
}
