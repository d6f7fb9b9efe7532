// out[t, i] ← (scale[i] / act_scale[t]) · Σ_j trit[i, j] · q[t, j], for few rows t
//
// Agrees with `sterna_kernels::gemm` for ternary weights bit for bit.
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

fn total(sums: vec3<i32>) -> i32 {
    return sums.x + (sums.y >> 2u) + (sums.z >> 4u);
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

// Vector v of the row that begins at `row`, if it has one.
fn fetch(row: u32, v: u32, row_len: u32) -> vec4<u32> {
    if v < row_len {
        return codes[row + v];
    }
    return vec4<u32>();
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

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    find_matrix(at, group);
    let row_len = share_of(params.row_blocks * 2u);
    let row = 2u * (place_of(group) * (WG / LANES) + thread / LANES);
    let begin = matrix_begin();
    let stored = vec2<u32>(begin + stored_row(row), begin + stored_row(row + 1u));
    let a = stored.x * row_len;
    let b = stored.y * row_len;
    // Loads are issued long before their use: with few workgroups, most of the time is spent waiting for
    // memory.
    var next = fetch_four(a, b, thread % LANES, row_len);
    let unit = vec2<f32>(scales[stored.x], scales[stored.y]);
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
    var scale = array<vec2<f32>, 8>();
    for (var t = 0u; t < TOKENS; t++) {
        let act = bitcast<f32>(row_step(row_in(t)).x);
        scale[t] = vec2<f32>(divide(unit.x, act), divide(unit.y, act));
    }
    var sums = array<Sums, 8>();
    for (var v = thread % LANES; v < row_len; v += 4u * LANES) {
        let w = next;
        next = fetch_four(a, b, v + 4u * LANES, row_len);
        for (var t = 0u; t < TOKENS; t++) {
            let token = row_in(t);
            var sum = multiply_two(w.a0, w.b0, token, v, sums[t]);
            if v + LANES < row_len {
                sum = multiply_two(w.a1, w.b1, token, v + LANES, sum);
            }
            if v + 2u * LANES < row_len {
                sum = multiply_two(w.a2, w.b2, token, v + 2u * LANES, sum);
            }
            if v + 3u * LANES < row_len {
                sum = multiply_two(w.a3, w.b3, token, v + 3u * LANES, sum);
            }
            sums[t] = sum;
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        let sum = segment_sum_i32(at, vec2<i32>(total(sums[t].a), total(sums[t].b)));
        if thread % LANES == 0u && row < share_of(params.n) {
            let exact = vec2<f32>(sum - vec2<i32>(bitcast<i32>(row_step(row_in(t)).y)));
            put_sum(base + t * params.out_stride, i, end, exact * scale[t], old[t]);
        }
    }
}
