// Blocks of integers and quantized activations for gemm_coop*.wgsl. Needs `codes_*.wgsl` and
// `coop_sums_blocks.wgsl`.
//
// Agrees with `sterna_kernels::gemm` as block_gemm.wgsl does, except that both sides are rounded to f16, and
// the scales of weights before that, to 11 bits each.
// Shapes: weights as `codes_*.wgsl` says; steps [m, q_len / 2] of the step and the sum of each run of 32.

// A run of a row.
struct Weights {
    w: array<vec4<u32>, 2>,
    s: vec3<f32>,
}

// A run of a token.
struct Activations {
    x: array<vec4<u32>, 2>,
    step: f32,
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
    let run = token * params.q_len / 2u + 2u * chunk + half;
    return Activations(
        array<vec4<u32>, 2>(q[2u * run], q[2u * run + 1u]),
        bitcast<f32>(steps[run].x),
    );
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
    // In f32: steps of small activations would be too small for f16.
    let step = f.step / SHRINK;
    for (var i = 0u; i < 4u; i++) {
        tile_x[to + i] = vec4<f16>(step * vec4<f32>(halves_of(f.x[0][i])));
        tile_x[to + 4u + i] = vec4<f16>(step * vec4<f32>(halves_of(f.x[1][i])));
    }
}
