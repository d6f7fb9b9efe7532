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

// Unit `unit` of rows a and b; beyond the last, any: a branch around loads costs more.
fn fetch(a: u32, b: u32, unit: u32) -> Units {
    let last = max(share_of(params.runs) / UNIT, 1u) - 1u;
    return Units(unit_at(a, min(unit, last)), unit_at(b, min(unit, last)));
}

// A run of two rows.
struct Run {
    // Which it is.
    index: u32,
    a: array<vec4<u32>, 2>,
    b: array<vec4<u32>, 2>,
    scales_a: vec3<f32>,
    scales_b: vec3<f32>,
}

// Run i of a unit of two rows.
fn unpack(w: Units, unit: u32, i: u32) -> Run {
    return Run(
        run_in(unit, i),
        unit_codes(w.a, unit, i),
        unit_codes(w.b, unit, i),
        unit_scales(w.a, unit, i),
        unit_scales(w.b, unit, i),
    );
}

// A run of two rows times one of activations.
fn products(w: Run, token: u32) -> vec2<f32> {
    let a = array<vec4<u32>, 2>(q_at(token, w.index * 2u), q_at(token, w.index * 2u + 1u));
    let step = run_step(token, w.index);
    let size = bitcast<f32>(step.x);
    let sum = bitcast<i32>(step.y);
    var excess = vec2<i32>(ZERO * sum, 0);
    if HALVES && ZERO != 0 {
        let first = ZERO * dot16(vec4<u32>(0x01010101u), a[0], 0);
        excess = vec2<i32>(first, excess.x - first);
    }
    return vec2<f32>(
        product(w.a, w.scales_a, a, size, f32(sum), excess),
        product(w.b, w.scales_b, a, size, f32(sum), excess),
    );
}

// Whether units are loaded before those in front of them are multiplied. Registers for them cost workgroups that would wait for
// memory at the same time, which is worse where there is little else to do: for one row of activations, which is there already.
fn is_ahead() -> bool {
    return AHEAD || PREPARES || TOKENS > 1u;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    find_matrix(at, group);
    let lane = thread % LANES;
    let runs = share_of(params.runs);
    let row = 2u * (place_of(group) * (WG / LANES) + thread / LANES);
    let a = matrix_begin() + stored_row(row);
    let b = matrix_begin() + stored_row(row + 1u);
    // The first are loaded while the activations are prepared.
    var next = fetch(a, b, lane);
    let i = params.first + row;
    let end = params.first + params.n;
    let base = params.out_offset + row_out(0u) * params.out_stride;
    // Lane t puts the sums of row t of the activations.
    let place = base + min(lane, TOKENS - 1u) * params.out_stride;
    let old = residual(place, i, end);
    prepare(at);
    // One by one: sums in an array that a loop indexes are kept in memory.
    var s0 = vec2<f32>();
    var s1 = vec2<f32>();
    var s2 = vec2<f32>();
    var s3 = vec2<f32>();
    var s4 = vec2<f32>();
    var s5 = vec2<f32>();
    var s6 = vec2<f32>();
    var s7 = vec2<f32>();
    for (var unit = lane; unit * UNIT < runs; unit += LANES) {
        let w = next;
        if is_ahead() {
            next = fetch(a, b, unit + LANES);
        }
        for (var i = 0u; i < UNIT; i++) {
            let run = unpack(w, unit, i);
            s0 += products(run, row_in(0u));
            if TOKENS > 1u {
                s1 += products(run, row_in(1u));
            }
            if TOKENS > 2u {
                s2 += products(run, row_in(2u));
            }
            if TOKENS > 3u {
                s3 += products(run, row_in(3u));
            }
            if TOKENS > 4u {
                s4 += products(run, row_in(4u));
            }
            if TOKENS > 5u {
                s5 += products(run, row_in(5u));
            }
            if TOKENS > 6u {
                s6 += products(run, row_in(6u));
            }
            if TOKENS > 7u {
                s7 += products(run, row_in(7u));
            }
        }
        if !is_ahead() && (unit + LANES) * UNIT < runs {
            next = fetch(a, b, unit + LANES);
        }
    }
    var own = segment_sum_f32(at, s0);
    if TOKENS > 1u {
        own = select(own, segment_sum_f32(at, s1), lane == 1u);
    }
    if TOKENS > 2u {
        own = select(own, segment_sum_f32(at, s2), lane == 2u);
    }
    if TOKENS > 3u {
        own = select(own, segment_sum_f32(at, s3), lane == 3u);
    }
    if TOKENS > 4u {
        own = select(own, segment_sum_f32(at, s4), lane == 4u);
    }
    if TOKENS > 5u {
        own = select(own, segment_sum_f32(at, s5), lane == 5u);
    }
    if TOKENS > 6u {
        own = select(own, segment_sum_f32(at, s6), lane == 6u);
    }
    if TOKENS > 7u {
        own = select(own, segment_sum_f32(at, s7), lane == 7u);
    }
    if lane < TOKENS && row < share_of(params.n) {
        put_sum(place, i, end, own, old);
    }
}
