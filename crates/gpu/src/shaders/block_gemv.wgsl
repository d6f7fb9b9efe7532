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

// A unit of each of two rows.
struct Units {
    a: Unit,
    b: Unit,
}

// Unit `unit` of rows a and b, if they have one.
fn fetch(a: u32, b: u32, unit: u32) -> Units {
    var units = Units();
    if unit * UNIT < params.runs {
        units.a = unit_at(a, unit);
        units.b = unit_at(b, unit);
    }
    return units;
}

// A unit of two rows times one of activations.
fn products(w: Units, token: u32, unit: u32) -> vec2<f32> {
    var sums = vec2<f32>();
    for (var i = 0u; i < UNIT; i++) {
        let run = unit * UNIT + i;
        let a0 = q_at(token, run * 2u);
        let a1 = q_at(token, run * 2u + 1u);
        let step = run_step(token, run);
        let size = bitcast<f32>(step.x);
        let sum = f32(bitcast<i32>(step.y));
        sums += vec2<f32>(
            product(unit_codes(w.a, i), unit_scales(w.a, unit, i), a0, a1, size, sum),
            product(unit_codes(w.b, i), unit_scales(w.b, unit, i), a0, a1, size, sum),
        );
    }
    return sums;
}

@compute @workgroup_size(WG)
fn main(at: Invocation) {
    let thread = thread_of(at);
    let row = 2u * (group_of(at) * (WG / LANES) + thread / LANES);
    let a = stored_row(row);
    let b = stored_row(row + 1u);
    // Everything is asked for long before it is used: where there are few workgroups, what takes the time is
    // waiting for memory.
    var next: array<Units, DEPTH>;
    for (var d = 0u; d < DEPTH; d++) {
        next[d] = fetch(a, b, thread % LANES + d * LANES);
    }
    let i = params.first + row;
    let end = params.first + params.n;
    let base = params.out_offset + params.token * params.out_stride;
    var old = array<vec2<f32>, 4>();
    if thread % LANES == 0u {
        for (var t = 0u; t < TOKENS; t++) {
            old[t] = residual(base + t * params.out_stride, i, end);
        }
    }
    prepare(at);
    var sums = array<vec2<f32>, 4>();
    for (var unit = thread % LANES; unit * UNIT < params.runs; unit += DEPTH * LANES) {
        for (var d = 0u; d < DEPTH; d++) {
            let w = next[d];
            let now = unit + d * LANES;
            next[d] = fetch(a, b, now + DEPTH * LANES);
            if now * UNIT < params.runs {
                for (var t = 0u; t < TOKENS; t++) {
                    sums[t] += products(w, params.token + t, now);
                }
            }
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        let sum = segment_sum_f32(at, sums[t]);
        if thread % LANES == 0u && row < params.n {
            put_sum(base + t * params.out_stride, i, end, sum, old[t]);
        }
    }
}
