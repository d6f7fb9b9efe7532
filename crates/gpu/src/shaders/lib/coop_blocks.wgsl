// Blocks of integers and quantized activations for gemm_coop*.wgsl. Needs `codes_*.wgsl`.
//
// Agrees with `sterna_kernels::gemm` as block_gemm.wgsl does, except that both sides are rounded to f16, and
// the scales of weights before that, to 11 bits each.
// Shapes: weights as `codes_*.wgsl` says; steps [m, q_len / 2] of the step and the sum of each run of 32.

// Weights times the one and activations over the other are f16 over the whole range of either: weights from
// 2^-22 on and up to 255, activations up to 4 million.
const GROW: f32 = 256.0;
const SHRINK: f32 = 64.0;

// 64 columns of a row: two runs.
struct Weights {
    w0: array<vec4<u32>, 2>,
    w1: array<vec4<u32>, 2>,
    s0: vec3<f32>,
    s1: vec3<f32>,
}

// 32 columns of a token: a run.
struct Activations {
    x: array<vec4<u32>, 2>,
    step: f32,
}

// How many times 64 columns a row has.
fn chunks() -> u32 {
    return (params.runs + 1u) / 2u;
}

// Zeros beyond the row's end.
fn fetch_w(row: u32, chunk: u32) -> Weights {
    let stored = stored_row(row);
    var f = Weights();
    if 2u * chunk < params.runs {
        f.w0 = run_codes(stored, 2u * chunk);
        f.s0 = run_scales(stored, 2u * chunk);
    }
    if 2u * chunk + 1u < params.runs {
        f.w1 = run_codes(stored, 2u * chunk + 1u);
        f.s1 = run_scales(stored, 2u * chunk + 1u);
    }
    return f;
}

// Half `half` of a chunk. Rows of activations are padded to eight runs.
fn fetch_x(token: u32, chunk: u32, half: u32) -> Activations {
    let run = min(token, params.m - 1u) * params.q_len / 2u + 2u * chunk + half;
    return Activations(
        array<vec4<u32>, 2>(q[2u * run], q[2u * run + 1u]),
        bitcast<f32>(steps[run].x),
    );
}

// Sixteen vectors from `to` on.
fn stage_w(to: u32, f: Weights) {
    let s0 = vec3<f16>(GROW * f.s0);
    let s1 = vec3<f16>(GROW * f.s1);
    for (var i = 0u; i < 4u; i++) {
        tile_w[to + i] = fma(halves_of(f.w0[0][i]), vec4<f16>(s0.x), vec4<f16>(-s0.z));
        tile_w[to + 4u + i] = fma(halves_of(f.w0[1][i]), vec4<f16>(s0.y), vec4<f16>(-s0.z));
        tile_w[to + 8u + i] = fma(halves_of(f.w1[0][i]), vec4<f16>(s1.x), vec4<f16>(-s1.z));
        tile_w[to + 12u + i] = fma(halves_of(f.w1[1][i]), vec4<f16>(s1.y), vec4<f16>(-s1.z));
    }
}

// Eight.
fn stage_x(to: u32, f: Activations) {
    // In f32: steps of small activations would be too small for f16.
    let step = f.step / SHRINK;
    for (var i = 0u; i < 4u; i++) {
        tile_x[to + i] = vec4<f16>(step * vec4<f32>(halves_of(f.x[0][i])));
        tile_x[to + 4u + i] = vec4<f16>(step * vec4<f32>(halves_of(f.x[1][i])));
    }
}

// The products of two rows with a token.
fn result_of(row: u32, token: u32, sums: vec2<f32>) -> vec2<f32> {
    return sums * (SHRINK / GROW);
}
