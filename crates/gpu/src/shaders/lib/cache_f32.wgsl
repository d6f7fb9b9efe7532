// A cache of f32: rows of `row_len` vectors, padded with zeros.

// 0 if the keys are the values: there are no others.
override VALUES: u32 = 1u;

// Eight elements of a head, as stored.
struct Eight {
    low: vec4<u32>,
    high: vec4<u32>,
}

fn key_words(row: u32, i: u32) -> Eight {
    let at = row * params.row_len + 2u * i;
    return Eight(keys[at], keys[at + 1u]);
}

fn value_words(row: u32, i: u32) -> Eight {
    if VALUES == 0u {
        return key_words(row, i);
    }
    let at = row * params.row_len + 2u * i;
    return Eight(values[at], values[at + 1u]);
}

fn floats(x: Eight) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(bitcast<vec4<f32>>(x.low), bitcast<vec4<f32>>(x.high));
}
