// A cache of f32: rows of `row_len` vectors, zeros behind the head's end.

fn key_eight(row: u32, i: u32) -> array<vec4<f32>, 2> {
    let at = row * params.row_len + 2u * i;
    return array<vec4<f32>, 2>(bitcast<vec4<f32>>(keys[at]), bitcast<vec4<f32>>(keys[at + 1u]));
}

fn value_at(row: u32, e: u32) -> f32 {
    return bitcast<f32>(values[row * params.row_len + e / 4u][e % 4u]);
}
