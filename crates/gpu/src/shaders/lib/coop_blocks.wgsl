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

// A run of a token.
struct Activations {
    x: array<vec4<u32>, 4>,
}

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

// Half `half` of a chunk. Rows of activations are padded to eight runs.
fn fetch_x(token: u32, chunk: u32, half: u32) -> Activations {
    let at = 2u * token * params.q_len + 8u * chunk + 4u * half;
    return Activations(array<vec4<u32>, 4>(q[at], q[at + 1u], q[at + 2u], q[at + 3u]));
}

// Eight vectors from `to` on.
fn stage_w(to: u32, f: Weights, half: u32) {
    let s = vec3<f16>(GROW * f.s);
    for (var i = 0u; i < 4u; i++) {
        tile_w[to + i] = fma(halves_of(f.w[0][i]), vec4<f16>(s.x), vec4<f16>(-s.z));
        tile_w[to + 4u + i] = fma(halves_of(f.w[1][i]), vec4<f16>(s.y), vec4<f16>(-s.z));
    }
}

// Likewise.
fn stage_x(to: u32, f: Activations) {
    for (var i = 0u; i < 4u; i++) {
        tile_x[to + 2u * i] = vec4<f16>(pair_of(f.x[i].x), pair_of(f.x[i].y));
        tile_x[to + 2u * i + 1u] = vec4<f16>(pair_of(f.x[i].z), pair_of(f.x[i].w));
    }
}
