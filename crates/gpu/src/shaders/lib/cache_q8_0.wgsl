// A cache of int8 with an f32 scale for every 32 elements of a head: rows of `row_len` vectors of codes,
// and from `scales` on (in words) rows of `row_scales` scales.

// 0 if the keys are the values: there are no others.
override VALUES: u32 = 1u;

// Eight elements of a head, as stored.
struct Eight {
    words: vec2<u32>,
    scale: u32,
}

fn bytes_of(word: u32) -> vec4<f32> {
    let shifted = bitcast<vec4<i32>>(vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u));
    return vec4<f32>(shifted >> vec4<u32>(24u));
}

fn key_words(row: u32, i: u32) -> Eight {
    let w = keys[row * params.row_len + i / 2u];
    let at = params.scales + row * params.row_scales + i / 4u;
    return Eight(select(w.xy, w.zw, i % 2u == 1u), keys[at / 4u][at % 4u]);
}

fn value_words(row: u32, i: u32) -> Eight {
    if VALUES == 0u {
        return key_words(row, i);
    }
    let w = values[row * params.row_len + i / 2u];
    let at = params.scales + row * params.row_scales + i / 4u;
    return Eight(select(w.xy, w.zw, i % 2u == 1u), values[at / 4u][at % 4u]);
}

fn floats(x: Eight) -> array<vec4<f32>, 2> {
    let scale = bitcast<f32>(x.scale);
    return array<vec4<f32>, 2>(scale * bytes_of(x.words.x), scale * bytes_of(x.words.y));
}
