// out[t, i] ← Σ_b (weights of block b) · (activations of block b), for few rows t
//
// Agrees with `sterna_kernels::gemm` for weights that are blocks of integers: integers within half a
// run, floats from there on, whose order differs.
// Shapes: weights as `codes_*.wgsl` says; activations as `input_*.wgsl` says; out f32. LANES
// invocations to two rows; workgroups of WG.

// Rows of activations, at most 4.
override TOKENS: u32 = 1u;

@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

fn dot16(w: vec4<u32>, a: vec4<u32>, c: i32) -> i32 {
    return dot4(w.w, a.w, dot4(w.z, a.z, dot4(w.y, a.y, dot4(w.x, a.x, c))));
}

// One run of one row times one of activations.
fn product(
    w: array<vec4<u32>, 2>,
    s: vec3<f32>,
    a0: vec4<u32>,
    a1: vec4<u32>,
    step: f32,
    sum: f32,
) -> f32 {
    if HALVES {
        let first = f32(dot16(w[0], a0, 0));
        let second = f32(dot16(w[1], a1, 0));
        return step * (first * s.x + second * s.y);
    }
    return step * (f32(dot16(w[1], a1, dot16(w[0], a0, 0))) * s.x - sum * s.z);
}

// One run of two rows times one of activations.
fn products(
    w0: array<vec4<u32>, 2>,
    w1: array<vec4<u32>, 2>,
    s0: vec3<f32>,
    s1: vec3<f32>,
    token: u32,
    run: u32,
) -> vec2<f32> {
    let a0 = q_at(token, run * 2u);
    let a1 = q_at(token, run * 2u + 1u);
    let step = run_step(token, run);
    let size = bitcast<f32>(step.x);
    let sum = f32(bitcast<i32>(step.y));
    return vec2<f32>(
        product(w0, s0, a0, a1, size, sum),
        product(w1, s1, a0, a1, size, sum),
    );
}

@compute @workgroup_size(WG)
fn main(at: Invocation) {
    prepare(at);
    let thread = thread_of(at);
    let row = 2u * (group_of(at) * (WG / LANES) + thread / LANES);
    let a = min(row, params.n - 1u);
    let b = min(row + 1u, params.n - 1u);
    var sums = array<vec2<f32>, 4>();
    // Two runs at a time, their weights asked for together: where there are few workgroups, what takes the
    // time is waiting for memory.
    for (var run0 = thread % LANES; run0 < params.runs; run0 += 2u * LANES) {
        // Where there is no second, the first again, which isn't used.
        let both = run0 + LANES < params.runs;
        let run1 = select(run0, run0 + LANES, both);
        let wa0 = run_codes(a, run0);
        let wb0 = run_codes(b, run0);
        let wa1 = run_codes(a, run1);
        let wb1 = run_codes(b, run1);
        let sa0 = run_scales(a, run0);
        let sb0 = run_scales(b, run0);
        let sa1 = run_scales(a, run1);
        let sb1 = run_scales(b, run1);
        for (var t = 0u; t < TOKENS; t++) {
            let token = params.token + t;
            var sum = sums[t] + products(wa0, wb0, sa0, sb0, token, run0);
            if both {
                sum += products(wa1, wb1, sa1, sb1, token, run1);
            }
            sums[t] = sum;
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        let sum = segment_sum_f32(at, sums[t]);
        if thread % LANES == 0u && row < params.n {
            let base = params.out_offset + (params.token + t) * params.out_stride;
            put(base, params.first + row, params.first + params.n, sum);
        }
    }
}
