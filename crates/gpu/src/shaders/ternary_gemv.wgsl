// out[t, i] ← (scale[i] / act_scale[t]) · Σ_j trit[i, j] · q[t, j], for few rows t
//
// Agrees with `sterna_kernels::gemm` for ternary weights bit for bit, where rows aren't normalised first.
// Shapes: codes [n, 2 · blocks] of 16 bytes, the working layout of `sterna_kernels::quant::ternary`;
// scales [n] f32; activations as `input_*.wgsl` says; out f32.
// LANES invocations per two rows; workgroups of WG.

// Rows of activations, at most 8.
override TOKENS: u32 = 1u;

// Vectors of activations that adjacent lanes read together: the same quarter of blocks of 128.
const PARTS: u32 = 4u;

// The part that contains vector i, and its index there.
fn part_of(i: u32) -> vec2<u32> {
    return vec2<u32>(i % 8u / 2u, i / 8u * 2u + i % 2u);
}

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

// Sums with the products of a vector of codes and the four of activations that match it: scaled by one, four
// and sixteen, so that codes are masked in place. Only the highest would be signed.
fn multiply(w: vec4<u32>, q: array<vec4<u32>, 4>, sums: vec3<i32>) -> vec3<i32> {
    return vec3<i32>(
        dot16(w & vec4<u32>(0x03030303u), q[3], sums.x),
        dot16(w & vec4<u32>(0x0c0c0c0cu), q[2], sums.y),
        dot16(
            w & vec4<u32>(0x30303030u),
            q[1],
            dot16((w >> vec4<u32>(2u)) & vec4<u32>(0x30303030u), q[0], sums.z),
        ),
    );
}

// The sum of what `multiply` gives.
fn total(sums: vec3<i32>) -> i32 {
    return sums.x + (sums.y >> 2u) + (sums.z >> 4u);
}

// Sums of two rows.
struct Sums {
    a: vec3<i32>,
    b: vec3<i32>,
}

// The same for two rows and their vectors v: sixteen bytes, positions 0 to 15 or 16 to 31 of four quarters of
// a block.
fn multiply_two(w0: vec4<u32>, w1: vec4<u32>, token: u32, v: u32, before: Sums) -> Sums {
    let q = array<vec4<u32>, 4>(
        q_quarter(token, v, 0u),
        q_quarter(token, v, 1u),
        q_quarter(token, v, 2u),
        q_quarter(token, v, 3u),
    );
    return Sums(multiply(w0, q, before.a), multiply(w1, q, before.b));
}

// Four vectors of each of two rows.
struct Weights {
    a0: vec4<u32>,
    a1: vec4<u32>,
    a2: vec4<u32>,
    a3: vec4<u32>,
    b0: vec4<u32>,
    b1: vec4<u32>,
    b2: vec4<u32>,
    b3: vec4<u32>,
}

// Vector v of the row that begins at `row`; beyond the last, any: a branch around loads costs more. Rows of experts that are in
// another piece have none.
fn fetch(row: u32, v: u32, row_len: u32) -> vec4<u32> {
    return codes[row + min(v, max(row_len, 1u) - 1u)];
}

// Vectors v, v + LANES and so on of the rows that begin at a and b.
fn fetch_four(a: u32, b: u32, v: u32, row_len: u32) -> Weights {
    return Weights(
        fetch(a, v, row_len),
        fetch(a, v + LANES, row_len),
        fetch(a, v + 2u * LANES, row_len),
        fetch(a, v + 3u * LANES, row_len),
        fetch(b, v, row_len),
        fetch(b, v + LANES, row_len),
        fetch(b, v + 2u * LANES, row_len),
        fetch(b, v + 3u * LANES, row_len),
    );
}

// Two rows' vectors v, v + LANES and so on times a row of activations.
fn products(w: Weights, token: u32, v: u32, row_len: u32) -> vec2<i32> {
    var sums = multiply_two(w.a0, w.b0, token, v, Sums());
    if v + LANES < row_len {
        sums = multiply_two(w.a1, w.b1, token, v + LANES, sums);
    }
    if v + 2u * LANES < row_len {
        sums = multiply_two(w.a2, w.b2, token, v + 2u * LANES, sums);
    }
    if v + 3u * LANES < row_len {
        sums = multiply_two(w.a3, w.b3, token, v + 3u * LANES, sums);
    }
    return vec2<i32>(total(sums.a), total(sums.b));
}

fn ratio(a: f32, b: f32) -> f32 {
    if is_exact() {
        return divide(a, b);
    }
    return a / b;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    find_matrix(at, group);
    let lane = thread % LANES;
    let row_len = share_of(params.row_blocks * 2u);
    let row = 2u * (place_of(group) * (WG / LANES) + thread / LANES);
    let begin = matrix_begin();
    let stored = vec2<u32>(begin + stored_row(row), begin + stored_row(row + 1u));
    let a = stored.x * row_len;
    let b = stored.y * row_len;
    // Loads are issued long before their use: with few workgroups, most of the time is spent waiting for
    // memory.
    var next = fetch_four(a, b, lane, row_len);
    let unit = vec2<f32>(scales[stored.x], scales[stored.y]);
    let i = params.first + row;
    let end = params.first + params.n;
    // Lane t puts the sums of row t of the activations.
    let token = min(lane, TOKENS - 1u);
    let place = params.out_offset + (row_out(0u) + token) * params.out_stride;
    let old = residual(place, i, end);
    prepare(at);
    let step = row_step(row_in(token));
    let act = bitcast<f32>(step.x);
    let scale = vec2<f32>(ratio(unit.x, act), ratio(unit.y, act));
    // One by one: sums in an array that a loop indexes are kept in memory.
    var s0 = vec2<i32>();
    var s1 = vec2<i32>();
    var s2 = vec2<i32>();
    var s3 = vec2<i32>();
    var s4 = vec2<i32>();
    var s5 = vec2<i32>();
    var s6 = vec2<i32>();
    var s7 = vec2<i32>();
    for (var v = lane; v < row_len; v += 4u * LANES) {
        let w = next;
        next = fetch_four(a, b, v + 4u * LANES, row_len);
        s0 += products(w, row_in(0u), v, row_len);
        if TOKENS > 1u {
            s1 += products(w, row_in(1u), v, row_len);
        }
        if TOKENS > 2u {
            s2 += products(w, row_in(2u), v, row_len);
        }
        if TOKENS > 3u {
            s3 += products(w, row_in(3u), v, row_len);
        }
        if TOKENS > 4u {
            s4 += products(w, row_in(4u), v, row_len);
        }
        if TOKENS > 5u {
            s5 += products(w, row_in(5u), v, row_len);
        }
        if TOKENS > 6u {
            s6 += products(w, row_in(6u), v, row_len);
        }
        if TOKENS > 7u {
            s7 += products(w, row_in(7u), v, row_len);
        }
    }
    var own = segment_sum_i32(at, s0);
    if TOKENS > 1u {
        own = select(own, segment_sum_i32(at, s1), lane == 1u);
    }
    if TOKENS > 2u {
        own = select(own, segment_sum_i32(at, s2), lane == 2u);
    }
    if TOKENS > 3u {
        own = select(own, segment_sum_i32(at, s3), lane == 3u);
    }
    if TOKENS > 4u {
        own = select(own, segment_sum_i32(at, s4), lane == 4u);
    }
    if TOKENS > 5u {
        own = select(own, segment_sum_i32(at, s5), lane == 5u);
    }
    if TOKENS > 6u {
        own = select(own, segment_sum_i32(at, s6), lane == 6u);
    }
    if TOKENS > 7u {
        own = select(own, segment_sum_i32(at, s7), lane == 7u);
    }
    if lane < TOKENS && row < share_of(params.n) {
        let exact = vec2<f32>(own - vec2<i32>(bitcast<i32>(step.y)));
        put_sum(place, i, end, exact * scale, old);
    }
}
