// A cache of f16: rows of `row_len` vectors, padded with zeros.

// 0 if the keys are the values: there are no others.
override VALUES: u32 = 1u;

// Eight elements of a head, as stored.
struct Eight {
    words: vec4<u32>,
}

fn key_words(row: u32, i: u32) -> Eight {
    return Eight(keys[row * params.row_len + i]);
}

fn value_words(row: u32, i: u32) -> Eight {
    if VALUES == 0u {
        return key_words(row, i);
    }
    return Eight(values[row * params.row_len + i]);
}

fn floats(x: Eight) -> array<vec4<f32>, 2> {
    return array<vec4<f32>, 2>(
        vec4<f32>(unpack2x16float(x.words.x), unpack2x16float(x.words.y)),
        vec4<f32>(unpack2x16float(x.words.z), unpack2x16float(x.words.w)),
    );
}
