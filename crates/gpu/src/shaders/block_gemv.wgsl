// out[t, i] ← Σ_b (weights of block b) · (activations of block b), for few rows t
//
// Agrees with `sterna_kernels::gemm` for weights that are blocks of integers: integers within half a run,
// floats from there on, in a different order.
// Shapes: weights as `codes_*.wgsl` says; activations as `input_*.wgsl` says; out f32. LANES invocations per
// two rows; workgroups of WG.

// Rows of activations, at most 8.
override TOKENS: u32 = 1u;

@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

// Vectors of activations that adjacent lanes read together: the same half of the same run of units in a row.
const PARTS: u32 = 2u * UNIT;

// The part that contains vector i, and its index there.
fn part_of(i: u32) -> vec2<u32> {
    return vec2<u32>(i % 2u * UNIT + place_in_unit(i / 2u), unit_of(i / 2u));
}

// One run of one row times one of activations, whose sum is `sum`. Codes are too large by an offset whose
// share is `excess` in the halves, or in all of the run.
fn product(
    w: array<vec4<u32>, 2>,
    s: vec3<f32>,
    a: array<vec4<u32>, 2>,
    step: f32,
    sum: f32,
    excess: vec2<i32>,
) -> f32 {
    if HALVES {
        let first = f32(dot16(w[0], a[0], 0) - excess.x);
        let second = f32(dot16(w[1], a[1], 0) - excess.y);
        return step * (first * s.x + second * s.y);
    }
    return step * (f32(dot16(w[1], a[1], dot16(w[0], a[0], 0)) - excess.x) * s.x - sum * s.z);
}

// A unit of each of two rows.
struct Units {
    a: Unit,
    b: Unit,
}

// Unit `unit` of rows a and b, if they have one.
fn fetch(a: u32, b: u32, unit: u32) -> Units {
    var units = Units();
    if unit * UNIT < share_of(params.runs) {
        units.a = unit_at(a, unit);
        units.b = unit_at(b, unit);
    }
    return units;
}

// Run i of a unit of two rows times one of activations.
fn run_products(w: Units, token: u32, unit: u32, i: u32) -> vec2<f32> {
    let run = run_in(unit, i);
    let a = array<vec4<u32>, 2>(q_at(token, run * 2u), q_at(token, run * 2u + 1u));
    let step = run_step(token, run);
    let size = bitcast<f32>(step.x);
    let sum = bitcast<i32>(step.y);
    var excess = vec2<i32>(ZERO * sum, 0);
    if HALVES && ZERO != 0 {
        let first = ZERO * dot16(vec4<u32>(0x01010101u), a[0], 0);
        excess = vec2<i32>(first, excess.x - first);
    }
    return vec2<f32>(
        product(unit_codes(w.a, unit, i), unit_scales(w.a, unit, i), a, size, f32(sum), excess),
        product(unit_codes(w.b, unit, i), unit_scales(w.b, unit, i), a, size, f32(sum), excess),
    );
}

// A unit of two rows times one of activations.
fn products(w: Units, token: u32, unit: u32) -> vec2<f32> {
    var sums = run_products(w, token, unit, 0u);
    if UNIT > 1u {
        sums += run_products(w, token, unit, 1u);
    }
    if UNIT > 2u {
        sums += run_products(w, token, unit, 2u);
        sums += run_products(w, token, unit, 3u);
    }
    return sums;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    find_matrix(at, group);
    let runs = share_of(params.runs);
    let row = 2u * (place_of(group) * (WG / LANES) + thread / LANES);
    let a = matrix_begin() + stored_row(row);
    let b = matrix_begin() + stored_row(row + 1u);
    // Loads are issued long before their use: with few workgroups, most of the time is spent waiting for
    // memory.
    var next: array<Units, DEPTH>;
    for (var d = 0u; d < DEPTH; d++) {
        next[d] = fetch(a, b, thread % LANES + d * LANES);
    }
    let i = params.first + row;
    let end = params.first + params.n;
    let base = params.out_offset + row_out(0u) * params.out_stride;
    var old = array<vec2<f32>, 8>();
    if thread % LANES == 0u {
        for (var t = 0u; t < TOKENS; t++) {
            old[t] = residual(base + t * params.out_stride, i, end);
        }
    }
    prepare(at);
    var sums = array<vec2<f32>, 8>();
    for (var unit = thread % LANES; unit * UNIT < runs; unit += DEPTH * LANES) {
        for (var d = 0u; d < DEPTH; d++) {
            let w = next[d];
            let now = unit + d * LANES;
            next[d] = fetch(a, b, now + DEPTH * LANES);
            if now * UNIT < runs {
                for (var t = 0u; t < TOKENS; t++) {
                    sums[t] += products(w, row_in(t), now);
                }
            }
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        let sum = segment_sum_f32(at, sums[t]);
        if thread % LANES == 0u && row < share_of(params.n) {
            put_sum(base + t * params.out_stride, i, end, sum, old[t]);
        }
    }
}
