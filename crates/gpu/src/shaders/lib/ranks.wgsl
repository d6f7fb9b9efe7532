// Scores of experts as numbers that are compared. Of equal scores that of the lower expert is better, and NaN is the least.

const LEAST: u32 = 0x007fffffu;

// A number that is larger for a better score.
fn rank_of(bits: u32) -> u32 {
    let number = select(bits, 0xff800000u, (bits & 0x7fffffffu) > 0x7f800000u);
    return select(number | 0x80000000u, ~number, number >> 31u == 1u);
}

// The score that is ranked so.
fn score_of(rank: u32) -> f32 {
    return bitcast<f32>(select(~rank, rank & 0x7fffffffu, rank >> 31u == 1u));
}

fn sigmoid(x: f32) -> f32 {
    return 1.0 / (1.0 + exp(-x));
}
