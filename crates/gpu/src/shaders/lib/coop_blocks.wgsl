// Blocks of integers and quantized activations for gemm_coop*.wgsl. Needs `codes_*.wgsl` and
// `half_range.wgsl`.
//
// Agrees with `sterna_kernels::gemm` as block_gemm.wgsl does, except that both sides are rounded to f16, and
// the scales of weights before that, to 11 bits each.
// Shapes: weights as `codes_*.wgsl` says; instead of q, activations [m, 2 · q_len] of eight f16, as quantize.wgsl stores
// them.

// A run of a row.
struct Weights {
    w: array<vec4<u32>, 2>,
    s: vec3<f32>,
}

// Vectors of a token's 64 columns.
const X_PARTS: u32 = 8u;

// How many times 64 columns a row has.
fn chunks() -> u32 {
    return (params.runs + 1u) / 2u;
}

// Half `half` of a chunk; zeros beyond the row's end.
fn fetch_w(row: u32, chunk: u32, half: u32) -> Weights {
    let run = 2u * chunk + half;
    if run >= params.runs {
        return Weights();
    }
    let stored = matrix_begin() + stored_row(row);
    return Weights(run_codes(stored, run), run_scales(stored, run));
}

// Where one of the parts of a token's first chunk is, and how much further that of another chunk. Rows of activations are
// padded to eight runs.
fn x_begin(token: u32, part: u32) -> u32 {
    return 2u * token * params.q_len + part;
}

fn x_of_chunk(chunk: u32) -> u32 {
    return 8u * chunk;
}

// Eight vectors from `to` on.
fn stage_w(to: u32, f: Weights, half: u32) {
    let s = vec3<f16>(GROW * f.s);
    for (var i = 0u; i < 4u; i++) {
        tile_w[to + i] = fma(halves_of(f.w[0][i]), vec4<f16>(s.x), vec4<f16>(-s.z));
        tile_w[to + 4u + i] = fma(halves_of(f.w[1][i]), vec4<f16>(s.y), vec4<f16>(-s.z));
    }
}

// Two vectors, of the line that begins at `first`.
fn stage_x(first: u32, part: u32, x: vec4<u32>) {
    tile_x[first + 2u * part] = vec4<f16>(pair_of(x.x), pair_of(x.y));
    tile_x[first + 2u * part + 1u] = vec4<f16>(pair_of(x.z), pair_of(x.w));
}
