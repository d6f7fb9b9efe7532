// Blocks of integers and quantized activations for gemm_coop.wgsl. Needs `codes_*.wgsl`.
//
// Agrees with `sterna_kernels::gemm` as block_gemm.wgsl does, except that both sides are rounded to f16, and
// the scales of weights before that, to 11 bits each.
// Shapes: weights as `codes_*.wgsl` says; steps [m, q_len / 2] of the step and the sum of each run of 32.

// Weights times the one and activations over the other are f16 over the whole range of either: weights from
// 2^-22 on and up to 255, activations up to 4 million.
const GROW: f32 = 256.0;
const SHRINK: f32 = 64.0;

// Two runs of a row, and one of a token.
struct Fetched {
    w0: array<vec4<u32>, 2>,
    w1: array<vec4<u32>, 2>,
    s0: vec3<f32>,
    s1: vec3<f32>,
    x: array<vec4<u32>, 2>,
    step: f32,
}

// An iteration takes two runs.
fn turns() -> u32 {
    return (params.runs + 1u) / 2u;
}

fn fetch(thread: u32, row0: u32, token0: u32, turn: u32) -> Fetched {
    let row = stored_row(row0 + thread);
    var f = Fetched();
    f.w0 = run_codes(row, 2u * turn);
    f.s0 = run_scales(row, 2u * turn);
    if 2u * turn + 1u < params.runs {
        f.w1 = run_codes(row, 2u * turn + 1u);
        f.s1 = run_scales(row, 2u * turn + 1u);
    }
    // Rows of activations are padded to eight runs.
    let run = min(token0 + thread / 2u, params.m - 1u) * params.q_len / 2u + 2u * turn + thread % 2u;
    f.x = array<vec4<u32>, 2>(q[2u * run], q[2u * run + 1u]);
    f.step = bitcast<f32>(steps[run].x);
    return f;
}

fn stage(thread: u32, f: Fetched) {
    let w = thread * 18u;
    let s0 = vec3<f16>(GROW * f.s0);
    let s1 = vec3<f16>(GROW * f.s1);
    let x = thread / 2u * 18u + thread % 2u * 8u;
    // In f32: steps of small activations would be too small for f16.
    let step = f.step / SHRINK;
    for (var i = 0u; i < 4u; i++) {
        tile_w[w + i] = fma(halves_of(f.w0[0][i]), vec4<f16>(s0.x), vec4<f16>(-s0.z));
        tile_w[w + 4u + i] = fma(halves_of(f.w0[1][i]), vec4<f16>(s0.y), vec4<f16>(-s0.z));
        tile_w[w + 8u + i] = fma(halves_of(f.w1[0][i]), vec4<f16>(s1.x), vec4<f16>(-s1.z));
        tile_w[w + 12u + i] = fma(halves_of(f.w1[1][i]), vec4<f16>(s1.y), vec4<f16>(-s1.z));
        tile_x[x + i] = vec4<f16>(step * vec4<f32>(halves_of(f.x[0][i])));
        tile_x[x + 4u + i] = vec4<f16>(step * vec4<f32>(halves_of(f.x[1][i])));
    }
}

// The products of two rows with a token.
fn result_of(row: u32, token: u32, sums: vec2<f32>) -> vec2<f32> {
    return sums * (SHRINK / GROW);
}
