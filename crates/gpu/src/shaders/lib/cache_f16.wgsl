// A cache of f16: rows of `row_len` vectors, zeros behind the head's end.

fn key_eight(row: u32, i: u32) -> array<vec4<f32>, 2> {
    let w = keys[row * params.row_len + i];
    return array<vec4<f32>, 2>(
        vec4<f32>(unpack2x16float(w.x), unpack2x16float(w.y)),
        vec4<f32>(unpack2x16float(w.z), unpack2x16float(w.w)),
    );
}

fn value_at(row: u32, e: u32) -> f32 {
    let pair = unpack2x16float(values[row * params.row_len + e / 8u][e % 8u / 2u]);
    return select(pair.x, pair.y, e % 2u == 1u);
}
