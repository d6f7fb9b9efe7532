use proptest::prelude::*;

use super::*;

const BASE: Digest = Digest::new(Algorithm::Sha256, [1; DIGEST_BYTES]);
const TARGET: Digest = Digest::new(Algorithm::Blake3, [2; DIGEST_BYTES]);

/// What becomes of `old` by `delta`.
fn applied(delta: &[u8], mut old: &[u8]) -> Result<Vec<u8>, DeltaError> {
    let delta = Delta::parse(delta)?;
    delta.check_base(&BASE, old.len() as u64)?;
    let mut new = Vec::new();
    delta.apply(
        |bytes| {
            let (next, rest) = old.split_at(bytes.len());
            bytes.copy_from_slice(next);
            old = rest;
            Ok(())
        },
        |bytes| {
            assert!(bytes.len() <= PIECE);
            new.extend_from_slice(bytes);
            Ok::<(), DeltaError>(())
        },
    )?;
    assert!(old.is_empty(), "all of it was read");
    Ok(new)
}

fn delta_of(tensors: &[(DType, &[u8], &[u8])]) -> Vec<u8> {
    let mut writer = DeltaWriter::new(BASE, TARGET);
    for (dtype, old, new) in tensors {
        writer.tensor(&TensorType::Known(*dtype), old, new).unwrap();
    }
    writer.finish()
}

/// Numbers that are the same each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as u32
    }

    fn is_less(&mut self, share: f64) -> bool {
        f64::from(self.next()) < share * f64::from(1_u32 << 31)
    }
}

/// I2_S blocks of random trits and a scale, and the same with a share of the trits changed.
fn ternary(n_bytes: usize, share: f64, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let mut random = Random(seed);
    let (mut old, mut new) = (Vec::new(), Vec::new());
    for _ in 0..n_bytes {
        let (mut a, mut b) = (0, 0);
        for place in 0..4 {
            let was = random.next() % 3;
            // A zero becomes one of two, another a zero.
            let is = match (random.is_less(share), was) {
                (false, was) => was,
                (true, 1) => 2 * (random.next() % 2),
                (true, _) => 1,
            };
            a |= (was as u8) << (2 * place);
            b |= (is as u8) << (2 * place);
        }
        old.push(a);
        new.push(b);
    }
    for (bytes, scale) in [(&mut old, 0.5_f32), (&mut new, 0.51)] {
        bytes.extend(scale.to_le_bytes());
        bytes.extend([0; 28]);
    }
    (old, new)
}

#[test]
fn trits_take_about_their_entropy() {
    let n_bytes = 100_000;
    for share in [0.0, 0.0001, 0.001, 0.01, 0.05, 0.2] {
        let (old, new) = ternary(n_bytes, share, 7);
        let delta = delta_of(&[(DType::I2_S, &old, &new)]);
        assert_eq!(applied(&delta, &old), Ok(new));
        let entropy = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
        // One of two values where a zero was.
        let bits = entropy(share) + entropy(1.0 - share) + share / 3.0;
        let bound = bits * 4.0 * n_bytes as f64 / 8.0;
        let most = bound * 1.03 + 120.0 + (HEADER + PART) as f64;
        assert!(
            (delta.len() as f64) < most,
            "{share}: {} of {bound}",
            delta.len()
        );
    }
}

#[test]
fn floats_that_move_a_little_take_less() {
    let mut random = Random(3);
    let (mut old, mut new) = (Vec::new(), Vec::new());
    for _ in 0..20_000 {
        let bits = 0x3c00 | random.next() as u16 & 0x83ff;
        let step = random.next() as u16 % 8;
        old.extend(bits.to_le_bytes());
        new.extend((bits + step).to_le_bytes());
    }
    let delta = delta_of(&[(DType::F16, &old, &new)]);
    assert_eq!(applied(&delta, &old), Ok(new));
    // Three or four bits of sixteen.
    assert!(delta.len() < old.len() / 3, "{}", delta.len());
}

#[test]
fn what_is_not_alike_is_stored() {
    let mut random = Random(5);
    let mut bytes = || -> Vec<u8> { (0..5000).map(|_| random.next() as u8).collect() };
    let (old, new) = (bytes(), bytes());
    let delta = delta_of(&[(DType::Q8_0, &old, &new), (DType::F32, &old, &old)]);
    assert!(delta.len() < new.len() + HEADER + 2 * PART + 1);
    assert_eq!(
        applied(&delta, &[&old[..], &old].concat()),
        Ok([new, old].concat())
    );
}

#[test]
fn deltas_are_of_one_group() {
    let delta = delta_of(&[(DType::F32, &[0; 8], &[1; 8])]);
    let delta = Delta::parse(&delta).unwrap();
    assert_eq!(
        (delta.base(), delta.target(), delta.size()),
        (BASE, TARGET, 8)
    );
    let error = delta.check_base(&TARGET, 8).unwrap_err().to_string();
    let (ones, twos) = ("01".repeat(32), "02".repeat(32));
    assert_eq!(
        error,
        format!("delta: expected the group sha256 {ones} to apply it to, found blake3 {twos}")
    );
    let error = delta.check_base(&BASE, 9).unwrap_err().to_string();
    assert_eq!(error, "delta: size: expected 9, that of the group, found 8");
    let mut writer = DeltaWriter::new(BASE, TARGET);
    let error = writer.tensor(&TensorType::Known(DType::F32), &[0; 8], &[0; 4]);
    let error = error.unwrap_err().to_string();
    assert_eq!(
        error,
        "delta: tensor 0: expected as many bytes as before, 8, found 4"
    );
}

#[test]
fn hostile_deltas_are_refused() {
    let (old, new) = ternary(4096, 0.05, 1);
    let good = delta_of(&[(DType::I2_S, &old, &new), (DType::F16, &old, &new)]);
    let twice = [&old[..], &old].concat();
    assert!(applied(&good, &twice).is_ok());
    for len in 0..good.len() {
        assert!(applied(&good[..len], &twice).is_err(), "{len} bytes");
    }
    assert!(applied(&[&good[..], b"x"].concat(), &twice).is_err());
    let part = HEADER;
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good.clone();
        bytes[at..at + value.len()].copy_from_slice(value);
        applied(&bytes, &twice).unwrap_err().to_string()
    };
    let huge = u64::MAX.to_le_bytes();
    for (at, value, expected) in [
        (0, &b"NODELTA\x01"[..], "expected the first bytes"),
        (7, b"\x02", "expected the first bytes"),
        (8, b"\x02", "base: expected hash algorithm 0 or 1, found 2"),
        (
            74,
            &huge,
            "delta: size: expected 8256, the sum of its parts",
        ),
        (
            82,
            &[255; 4],
            "delta: number of parts: expected at most 65536, found 4294967295",
        ),
        (82, &[0, 0, 1, 0], "bytes, found"),
        (82, &[1, 0, 0, 0], "the sum of its parts"),
        (part, &[5], "part 0: coding: expected at most 4, found 5"),
        (part, &[0], "part 0: bytes of the delta: expected 0"),
        (part, &[1], "part 0: bytes of the delta: expected 4128"),
        (
            part + 1,
            &[0; 8],
            "part 0: bytes of codes: expected at least 1",
        ),
        (
            part + 1,
            &huge,
            "part 0: bytes of codes: expected at most 4128",
        ),
        (
            part + 9,
            &huge,
            "part 0: bytes beside codes: expected at most 64",
        ),
        (
            part + 17,
            &huge,
            "part 1: size: expected at most 0, found 4128",
        ),
        (
            part + PART + 17,
            &huge,
            "part 1: size: expected a multiple of 2, found 18446744073709551615",
        ),
        (
            part + PART + 17,
            &[0; 8],
            "part 1: size: expected at least 1, found 0",
        ),
        (
            part + 25,
            &huge,
            "part 0: bytes of the delta: expected at most",
        ),
        (part + 25, &[0; 8], "bytes"),
        (
            part + PART + 1,
            &[3],
            "part 1: bytes of a number: expected 1, 2 or 4, found 3",
        ),
    ] {
        let error = with(at, value);
        assert!(error.contains(expected), "{at}: {error}");
    }
}

#[test]
fn sizes_of_any_number_end_in_errors() {
    let (old, new) = ternary(4096, 0.05, 1);
    let mut delta = delta_of(&[(DType::I2_S, &old, &new)]);
    let huge = u64::MAX.to_le_bytes();
    // The group's, and those of the part: its bytes with codes, and all.
    for at in [74, HEADER + 1, HEADER + 17] {
        delta[at..at + 8].copy_from_slice(&huge);
    }
    let error = Delta::parse(&delta).unwrap_err().to_string();
    assert_eq!(
        error,
        "delta: part 0: bytes of codes: expected at most 18446744073709551583, found 18446744073709551615"
    );
    // One block, which never ends.
    delta[HEADER + 9..HEADER + 17].fill(0);
    let error = Delta::parse(&delta).unwrap().apply(
        |bytes| {
            bytes.fill(0);
            Ok(())
        },
        |_| Ok::<(), DeltaError>(()),
    );
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("part 0: its bytes: expected more"),
        "{error}"
    );
}

#[test]
fn parts_are_not_too_many() {
    let mut writer = DeltaWriter::new(BASE, TARGET);
    for _ in 0..MAX_PARTS {
        let dtype = TensorType::Known(DType::F16);
        writer.tensor(&dtype, &[], &[]).unwrap();
    }
    let error = writer.tensor(&TensorType::Known(DType::F16), &[], &[]);
    let error = error.unwrap_err().to_string();
    assert_eq!(
        error,
        "delta: number of parts: expected at most 65536, found 65537"
    );
    assert_eq!(applied(&writer.finish(), &[]), Ok(Vec::new()));
}

#[test]
fn trits_that_are_none_are_refused() {
    for byte in 0..=255 {
        let is_usual = (0..243_u16).any(|v| (v * 256).div_ceil(243) == u16::from(byte));
        assert_eq!(Codes::Five.is_usual(byte), is_usual);
        assert!(Codes::Four.is_usual(byte));
    }
    // Bytes that no coder wrote: one new code in four is 3.
    let mut random = Random(2);
    let (old, new) = ternary(5400 - 32, 0.1, 1);
    let mut delta = delta_of(&[(DType::TQ2_0, &old[..66], &new[..66])]);
    delta[HEADER] = 3;
    for byte in &mut delta[HEADER + PART..] {
        *byte = random.next() as u8;
    }
    let error = applied(&delta, &old[..66]).unwrap_err().to_string();
    assert_eq!(error, "delta: part 0: a code: expected at most 2, found 3");
}

/// Any type that is coded in a way of its own, and one that isn't.
fn any_type() -> impl Strategy<Value = DType> {
    use DType::{BF16, F16, F32, I2_S, Q4_K, TQ1_0, TQ2_0};
    prop::sample::select(vec![I2_S, TQ1_0, TQ2_0, F32, F16, BF16, Q4_K])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn trits_come_back(n in 1..70_000_usize, share in 0.0..1.0_f64, seed: u64, dtype in any_type()) {
        let (old, new) = ternary(n, share * share, seed);
        let delta = delta_of(&[(dtype, &old, &new)]);
        prop_assert_eq!(applied(&delta, &old), Ok(new));
    }

    #[test]
    fn any_bytes_come_back(
        tensors in prop::collection::vec((any_type(), prop::collection::vec(any::<(u8, u8)>(), 0..400)), 0..5),
    ) {
        let split = |pairs: &[(u8, u8)]| -> (Vec<u8>, Vec<u8>) { pairs.iter().copied().unzip() };
        let tensors: Vec<_> = tensors.iter().map(|(dtype, pairs)| (*dtype, split(pairs))).collect();
        let parts: Vec<_> = tensors.iter().map(|(dtype, (old, new))| (*dtype, &old[..], &new[..])).collect();
        let delta = delta_of(&parts);
        let old: Vec<u8> = tensors.iter().flat_map(|(_, (old, _))| old.clone()).collect();
        let new: Vec<u8> = tensors.iter().flat_map(|(_, (_, new))| new.clone()).collect();
        prop_assert!(delta.len() <= new.len() + HEADER + parts.len() * PART);
        prop_assert_eq!(applied(&delta, &old), Ok(new));
    }

    #[test]
    fn broken_deltas_end_in_errors_or_other_bytes(at in any::<prop::sample::Index>(), xor in 1..=255_u8, share in 0.0..0.3_f64) {
        let (old, new) = ternary(3000, share, 9);
        let mut delta = delta_of(&[(DType::TQ1_0, &old, &new), (DType::I2_S, &old, &new)]);
        let at = at.index(delta.len());
        delta[at] ^= xor;
        let twice = [&old[..], &old].concat();
        if let Ok(made) = applied(&delta, &twice) {
            prop_assert_eq!(made.len(), twice.len());
        }
    }
}
