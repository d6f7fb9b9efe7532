//! The same bits on every machine: what each family of kernels makes of fixed inputs, as hashes.
//!
//! The hashes are part of what the library promises. x86-64, 64-bit Arm and WebAssembly, with every
//! instruction set they have, must all come to these; `scripts/test-emulated.sh` runs the latter two. A
//! change that alters one changes what models say, and belongs into the change log.

use crate::activation::{Activation, gate};
use crate::attention::{
    self, AttentionShape, CacheType, CachedValues, KvPage, PAGE_LEN, Queries, attention,
};
use crate::gemm::{self, BlockMatrix, Matrix, Rounding, TernaryMatrix, TernaryPacking, linear};
use crate::norm::rms_norm_into;
use crate::quant::{decode_row, encode_row, q8, ternary};
use crate::rope::{RopeLayout, rope};
use crate::vector::softcap;
use crate::{Exec, Isa, requantize};
use sterna_format::DType;

/// What is computed, and the hash of all it gives.
type Hashes = Vec<(String, u64)>;

/// A generator of numbers that are the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
}

/// `n` values within ±1, of 21 bits.
fn floats(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random(seed);
    (0..n)
        .map(|_| (random.next() >> 10) as f32 / (1 << 20) as f32 - 1.0)
        .collect()
}

/// FNV-1a with 64 bits.
struct Hash(u64);

impl Hash {
    fn new() -> Hash {
        Hash(0xcbf2_9ce4_8422_2325)
    }

    fn bytes(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }

    /// Values that are numbers: the bits of others aren't the same everywhere.
    fn floats(&mut self, values: &[f32]) {
        for value in values {
            assert!(!value.is_nan());
            self.bytes(&value.to_bits().to_le_bytes());
        }
    }
}

/// Types of stored weights.
const TYPES: [DType; 18] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::Q1_0,
    DType::Q2_0,
    DType::Q2_0_G128,
    DType::MXFP4,
    DType::TQ1_0,
];

/// Rows of weights, a few more than kernels take together, and columns, which are no whole panel.
const N: usize = 37;
const K: usize = 1280;

/// Activation rows: one, and numbers that leave rests in tiles.
const BATCHES: [usize; 3] = [1, 3, 14];

/// Random blocks: all bits are random but those of the scales of blocks and of floats, which are
/// ordinary numbers.
fn weights(dtype: DType) -> Vec<u8> {
    let n_bytes = N * K / dtype.block_len() * dtype.block_bytes();
    let mut random = Random(dtype.block_bytes() as u64);
    let mut bytes: Vec<u8> = (0..n_bytes).map(|_| random.next() as u8).collect();
    let scales: &[usize] = match dtype {
        DType::F32 | DType::F16 | DType::BF16 => {
            encode_row(dtype, &floats(N * K, 7), &mut bytes).unwrap();
            return bytes;
        }
        DType::Q2_K => &[80, 82],
        DType::Q3_K => &[108],
        DType::Q4_K | DType::Q5_K | DType::Q4_1 | DType::Q5_1 => &[0, 2],
        DType::Q6_K => &[208],
        DType::TQ1_0 => &[52],
        DType::MXFP4 => {
            for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
                block[0] = 120 + block[0] % 8;
            }
            return bytes;
        }
        _ => &[0],
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for at in scales {
            // An f16 from 2^-5 to 1, of either sign.
            block[at + 1] = block[at + 1] & 0x80 | (0x28 + block[at + 1] % 20);
        }
    }
    bytes
}

/// Packed trits; where blocks have scales, anything will do, for they aren't read.
fn trits(n_bytes: usize) -> Vec<u8> {
    let mut random = Random(3);
    let mut trit = || (random.next() % 3) as u8;
    (0..n_bytes)
        .map(|_| trit() | trit() << 2 | trit() << 4 | trit() << 6)
        .collect()
}

/// The hash of the products of a matrix with each of the [`BATCHES`].
fn products(exec: &Exec, matrix: Matrix<'_>, k: usize) -> u64 {
    let mut hash = Hash::new();
    let mut scratch = gemm::Scratch::default();
    for m in BATCHES {
        let x = floats(m * k, 11);
        let mut out = vec![f32::NAN; m * N];
        linear(exec, &x, k, &mut scratch, &mut [(matrix, &mut out[..])]).unwrap();
        hash.floats(&out);
    }
    hash.0
}

fn matrices(exec: &Exec, hashes: &mut Hashes) {
    for dtype in TYPES {
        let bytes = weights(dtype);
        for rounding in [Rounding::Blocks, Rounding::Row, Rounding::None] {
            // What floats of rounded activations are is the same for every type.
            if rounding != Rounding::Blocks && !matches!(dtype, DType::F16 | DType::Q4_K) {
                continue;
            }
            let matrix = BlockMatrix::new(dtype, N, K, rounding, &bytes).unwrap();
            let hash = products(exec, Matrix::Blocks(matrix), K);
            hashes.push((format!("product {dtype} {rounding:?}"), hash));
        }
    }
    let k = K - 28;
    let codes = trits(N * ternary::row_bytes(k));
    let matrix = TernaryMatrix::new(N, k, 0.37, &codes).unwrap();
    hashes.push((
        "product trits".into(),
        products(exec, Matrix::Ternary(matrix), k),
    ));
    let blocks = trits(N * K / 256 * 66);
    let matrix = TernaryMatrix::packed(TernaryPacking::Tq20, N, K, 0.37, &blocks).unwrap();
    hashes.push((
        "product TQ2_0".into(),
        products(exec, Matrix::Ternary(matrix), K),
    ));
}

fn attentions(exec: &Exec, hashes: &mut Hashes) {
    let shape = AttentionShape {
        n_heads: 6,
        n_kv_heads: 2,
        head_dim: 40,
        scale: 0.7,
        softcap: None,
        window: None,
    };
    let shapes = [
        ("", shape),
        (" sinks", shape),
        (
            " capped",
            AttentionShape {
                softcap: Some(3.0),
                ..shape
            },
        ),
        (
            " window",
            AttentionShape {
                window: Some(100),
                ..shape
            },
        ),
        (" keys", shape),
    ];
    // More than a span, and no whole page.
    let n = 333;
    for dtype in [CacheType::F32, CacheType::F16, CacheType::Q8_0] {
        let width = shape.n_kv_heads * shape.head_dim;
        let (k, v) = (floats(n * width, 1), floats(n * width, 2));
        let pages = |cached| -> Vec<KvPage> {
            let pages = k.chunks(PAGE_LEN * width).zip(v.chunks(PAGE_LEN * width));
            pages
                .map(|(k, v)| {
                    let mut page = KvPage::new(dtype, cached, shape.n_kv_heads, shape.head_dim);
                    let v = match cached {
                        CachedValues::Own => v,
                        CachedValues::Keys => &[],
                    };
                    page.store(exec, 0, k, v).unwrap();
                    page
                })
                .collect()
        };
        let sinks = floats(shape.n_heads, 11);
        for (name, shape) in &shapes {
            let mut hash = Hash::new();
            let pages = pages(match *name {
                " keys" => CachedValues::Keys,
                _ => CachedValues::Own,
            });
            for (pos, m) in [(n - 1, 1), (n - 3, 3), (0, 70)] {
                let q = floats(m * shape.n_heads * shape.head_dim, 3);
                let mut out = vec![f32::NAN; q.len()];
                let mut scratch = attention::Scratch::default();
                let queries = Queries {
                    shape,
                    q: &q,
                    pos,
                    sinks: (*name == " sinks").then_some(&sinks),
                    is_causal: true,
                };
                attention(exec, &queries, &pages, &mut scratch, &mut out).unwrap();
                hash.floats(&out);
            }
            hashes.push((format!("attention {dtype:?}{name}"), hash.0));
        }
    }
}

fn elements(exec: &Exec, hashes: &mut Hashes) {
    let mut add = |name: String, values: &[f32]| {
        let mut hash = Hash::new();
        hash.floats(values);
        hashes.push((name, hash.0));
    };

    let (x, weight) = (floats(3 * 100, 4), floats(100, 5));
    let mut out = vec![f32::NAN; x.len()];
    rms_norm_into(exec, &x, &weight, 1e-5, &mut out).unwrap();
    add("norm".into(), &out);

    // Angles whose cosines and sines are no matter of a platform's library.
    let (cos, sin) = (floats(3 * 16, 6), floats(3 * 16, 7));
    for layout in [RopeLayout::Halves, RopeLayout::Pairs] {
        let mut heads = floats(3 * 2 * 50, 8);
        rope(exec, &mut heads, 50, 32, &cos, &sin, layout).unwrap();
        add(format!("rope {layout:?}"), &heads);
    }

    let wide: Vec<f32> = floats(1000, 9).iter().map(|x| x * 30.0).collect();
    let up = floats(1000, 10);
    for activation in [
        Activation::Silu,
        Activation::Relu2,
        Activation::Relu,
        Activation::GeluTanh,
        Activation::GeluErf,
        Activation::ClampedSwiglu,
    ] {
        let mut gated = wide.clone();
        gate(exec, activation, &mut gated, &up).unwrap();
        add(format!("activation {activation:?}"), &gated);
    }
    let mut capped = wide;
    softcap(exec, &mut capped, 7.0);
    add("softcap".into(), &capped);
}

fn requantized(exec: &Exec, hashes: &mut Hashes) {
    let from = DType::Q8_0;
    let bytes = weights(from);
    for to in [
        DType::F16,
        DType::Q4_0,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ] {
        let mut hash = Hash::new();
        hash.bytes(&requantize(exec, N, K, from, &bytes, to).unwrap());
        hashes.push((format!("requantise {to}"), hash.0));
    }
}

/// What doesn't depend on the instruction set.
fn formats(hashes: &mut Hashes) {
    let values = floats(1024, 12);
    for dtype in TYPES {
        let bytes = weights(dtype);
        let mut decoded = vec![f32::NAN; N * K];
        decode_row(dtype, &bytes, &mut decoded).unwrap();
        let mut hash = Hash::new();
        hash.floats(&decoded);
        hashes.push((format!("decode {dtype}"), hash.0));

        let mut encoded = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
        encode_row(dtype, &values, &mut encoded).unwrap();
        let mut hash = Hash::new();
        hash.bytes(&encoded);
        hashes.push((format!("encode {dtype}"), hash.0));
    }
    let mut q = vec![0; values.len()];
    let (scale, sum) = q8::quantize_row(&values, &mut q);
    let mut hash = Hash::new();
    hash.floats(&[scale]);
    hash.bytes(&sum.to_le_bytes());
    hash.bytes(&q.iter().map(|&q| q as u8).collect::<Vec<u8>>());
    hashes.push(("round".into(), hash.0));
}

/// Panics with what the table should be if it is another.
fn check(found: &Hashes, expected: &[(&str, u64)], on: &str) {
    let same = found.len() == expected.len()
        && found
            .iter()
            .zip(expected)
            .all(|((name, hash), (as_name, as_hash))| name == as_name && hash == as_hash);
    if same {
        return;
    }
    let mut table = String::new();
    for (name, hash) in found {
        let known = expected.contains(&(name.as_str(), *hash));
        let mark = if known { "" } else { " // other" };
        table += &format!("    (\"{name}\", 0x{hash:016x}),{mark}\n");
    }
    panic!("other bits with {on}:\n{table}");
}

#[test]
fn kernels_give_these_bits_with_every_instruction_set() {
    // Emulators are slow, and how threads share work doesn't depend on instructions.
    let n_threads = if cfg!(target_arch = "x86_64") { 2 } else { 1 };
    for isa in Isa::available() {
        let exec = Exec::new(n_threads, isa);
        let mut hashes = Hashes::new();
        matrices(&exec, &mut hashes);
        attentions(&exec, &mut hashes);
        elements(&exec, &mut hashes);
        requantized(&exec, &mut hashes);
        check(&hashes, KERNELS, isa.name());
    }
}

#[test]
fn formats_give_these_bits() {
    let mut hashes = Hashes::new();
    formats(&mut hashes);
    check(&hashes, FORMATS, "this machine");
}

const KERNELS: &[(&str, u64)] = &[
    ("product F32 Blocks", 0x53ad85b23150d417),
    ("product F16 Blocks", 0xf9f80049573fa04d),
    ("product F16 Row", 0x203aeb71b12e4edc),
    ("product F16 None", 0x62cbd7df8f93f0f4),
    ("product BF16 Blocks", 0x3cba2ad6081062ea),
    ("product Q4_0 Blocks", 0x2aa3c9e6a29c09a1),
    ("product Q4_1 Blocks", 0xdbe4c66476c36522),
    ("product Q5_0 Blocks", 0x23ff1721cad8fe12),
    ("product Q5_1 Blocks", 0x4d85b8304e4d1c94),
    ("product Q8_0 Blocks", 0xd98fecc8cc6083da),
    ("product Q2_K Blocks", 0xf1652fbfd460cb14),
    ("product Q3_K Blocks", 0x75a6c74fa3f82caf),
    ("product Q4_K Blocks", 0x1a39d885e85a481c),
    ("product Q4_K Row", 0x771cc7c6d0373d12),
    ("product Q4_K None", 0x3b274b4c5b349768),
    ("product Q5_K Blocks", 0x49c6202767da105f),
    ("product Q6_K Blocks", 0x59a91394ad811d55),
    ("product Q1_0 Blocks", 0x6cde695ce4a0beb5),
    ("product Q2_0 Blocks", 0x7361e863fcd6dae9),
    ("product Q2_0_G128 Blocks", 0x647940db8fb41a73),
    ("product MXFP4 Blocks", 0x77dee17f6dbc4e64),
    ("product TQ1_0 Blocks", 0xcc8e38d7429b9e6c),
    ("product trits", 0x3870b75dd7a1203a),
    ("product TQ2_0", 0x3f4b6d192b6649fd),
    ("attention F32", 0xef26279e09e3ff1f),
    ("attention F32 sinks", 0x482f6a18f5c02cc1),
    ("attention F32 capped", 0x02e88faf2ee5e9e3),
    ("attention F32 window", 0xf416084c49b9b9e5),
    ("attention F32 keys", 0xe1686be752c2d463),
    ("attention F16", 0x1d0473241dfc094b),
    ("attention F16 sinks", 0xbc3cf491184a5529),
    ("attention F16 capped", 0xecdf081073dc835e),
    ("attention F16 window", 0xe3068824bea92e1a),
    ("attention F16 keys", 0xaafd2aaa0d424a81),
    ("attention Q8_0", 0x26d9a123aeb62a23),
    ("attention Q8_0 sinks", 0x5fdb61b8b69f8a1f),
    ("attention Q8_0 capped", 0x0f2add1c988b2143),
    ("attention Q8_0 window", 0xb0e1f6bddd9c0e7d),
    ("attention Q8_0 keys", 0x3b9ad2bf23b4dbec),
    ("norm", 0x3baa02090826c35f),
    ("rope Halves", 0x20120b0a67d4d00d),
    ("rope Pairs", 0xc8ec58033fa42ba3),
    ("activation Silu", 0x8bbf873aa7be8dae),
    ("activation Relu2", 0xfee8d87540fc6803),
    ("activation Relu", 0x8280728fdd4ce09e),
    ("activation GeluTanh", 0x36913816b397a3a5),
    ("activation GeluErf", 0x01399acdd2f426c5),
    ("activation ClampedSwiglu", 0xb4ba8da01862703d),
    ("softcap", 0xfed416c780485108),
    ("requantise F16", 0x2d018599c07ec5ef),
    ("requantise Q4_0", 0x42260f68f126a338),
    ("requantise Q4_K", 0x25d6f39639784f3d),
    ("requantise Q5_K", 0x886723ab14e20be1),
    ("requantise Q6_K", 0x92a1c940a6752e9a),
];

const FORMATS: &[(&str, u64)] = &[
    ("decode F32", 0xae8a71f47a238659),
    ("encode F32", 0x96ccbdca24fa5c59),
    ("decode F16", 0x3ecab9a70d94475f),
    ("encode F16", 0xc38aab61b8b40ff8),
    ("decode BF16", 0x926d8d2916a033ec),
    ("encode BF16", 0xb4da96f7f741e85f),
    ("decode Q4_0", 0x6d396d986713ad5f),
    ("encode Q4_0", 0x8a404fac47ec9626),
    ("decode Q4_1", 0xb7920c11420db9b2),
    ("encode Q4_1", 0x4e8d07de8831eb4e),
    ("decode Q5_0", 0x85107b82f2455987),
    ("encode Q5_0", 0x39c2c509884b3be9),
    ("decode Q5_1", 0x6fadc5e4dcf1f1b0),
    ("encode Q5_1", 0xeafe3c08da402f84),
    ("decode Q8_0", 0x05906c43b32bb69f),
    ("encode Q8_0", 0xa4f1c262f13fd14b),
    ("decode Q2_K", 0x36a04069516681ab),
    ("encode Q2_K", 0x4696cf7d4f0d30a4),
    ("decode Q3_K", 0x6bb7361088ff60dc),
    ("encode Q3_K", 0x47f5e631fcdf508c),
    ("decode Q4_K", 0x2ac180fb4fd5780f),
    ("encode Q4_K", 0x65a4eb7aafd2f815),
    ("decode Q5_K", 0x87403309d03e4173),
    ("encode Q5_K", 0x1c50c9cc93a996fe),
    ("decode Q6_K", 0xe05ab839e332f783),
    ("encode Q6_K", 0x415bc0f9f46af081),
    ("decode Q1_0", 0x14773b795c4211a5),
    ("encode Q1_0", 0x1893e11b07c46422),
    ("decode Q2_0", 0xf25834e59c58673f),
    ("encode Q2_0", 0xba0cd66d56a00b59),
    ("decode Q2_0_G128", 0x37761eaf4ab67fc4),
    ("encode Q2_0_G128", 0x82718d3f6a745225),
    ("decode MXFP4", 0x8afb787e3a0341e4),
    ("encode MXFP4", 0x6ac7f704fdbfd39c),
    ("decode TQ1_0", 0x16c0be44f7e39f5a),
    ("encode TQ1_0", 0x382e1c57fd24da34),
    ("round", 0x8e37f7488b0b5216),
];
