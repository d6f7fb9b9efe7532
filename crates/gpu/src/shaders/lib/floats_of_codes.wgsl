// Weights that are blocks of integers, as floats.

fn unpack_bytes(word: u32) -> vec4<f32> {
    let shifted = bitcast<vec4<i32>>(vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u));
    return vec4<f32>(shifted >> vec4<u32>(24u));
}

// Eight consecutive weights.
fn eight_floats(row: u32, eighth: u32) -> array<vec4<f32>, 2> {
    let run = eighth / 4u;
    let words = run_codes(row, run);
    let s = run_scales(row, run);
    // Half a run is four words, an eighth of the row two of them.
    let half = select(words[0], words[1], eighth % 4u >= 2u);
    let scale = select(s.x, s.y, eighth % 4u >= 2u);
    let two = select(half.xy, half.zw, eighth % 2u == 1u);
    return array<vec4<f32>, 2>(
        scale * unpack_bytes(two.x) - s.z,
        scale * unpack_bytes(two.y) - s.z,
    );
}
