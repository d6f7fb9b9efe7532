// out[t, i] ← (scale[i] / act_scale[t]) · Σ_j trit[i, j] · q[t, j], for few rows t
//
// Agrees with `sterna_kernels::gemm` for ternary weights bit for bit.
// Shapes: codes [n, 2 · blocks] of 16 bytes, the working layout of `sterna_kernels::quant::ternary`;
// scales [n] f32; activations as `input_*.wgsl` says; out f32.
// LANES invocations to two rows; workgroups of WG.

// Rows of activations, at most 4.
override TOKENS: u32 = 1u;

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

const CODES: vec4<u32> = vec4<u32>(0x03030303u);

fn dot16(w: vec4<u32>, a: vec4<u32>, c: i32) -> i32 {
    return dot4(w.w, a.w, dot4(w.z, a.z, dot4(w.y, a.y, dot4(w.x, a.x, c))));
}

// Sums of two rows with the products of vector v of each.
fn multiply(w0: vec4<u32>, w1: vec4<u32>, token: u32, v: u32, before: vec2<i32>) -> vec2<i32> {
    // Sixteen bytes have positions 0 to 15 or 16 to 31 of four quarters of a block.
    let at = v / 2u * 8u + v % 2u;
    let q0 = q_at(token, at);
    let q1 = q_at(token, at + 2u);
    let q2 = q_at(token, at + 4u);
    let q3 = q_at(token, at + 6u);
    var sum = before;
    sum.x = dot16((w0 >> vec4<u32>(6u)) & CODES, q0, sum.x);
    sum.y = dot16((w1 >> vec4<u32>(6u)) & CODES, q0, sum.y);
    sum.x = dot16((w0 >> vec4<u32>(4u)) & CODES, q1, sum.x);
    sum.y = dot16((w1 >> vec4<u32>(4u)) & CODES, q1, sum.y);
    sum.x = dot16((w0 >> vec4<u32>(2u)) & CODES, q2, sum.x);
    sum.y = dot16((w1 >> vec4<u32>(2u)) & CODES, q2, sum.y);
    sum.x = dot16(w0 & CODES, q3, sum.x);
    sum.y = dot16(w1 & CODES, q3, sum.y);
    return sum;
}

// Vector v of the row that begins at `row`, if it has one.
fn fetch(row: u32, v: u32, row_len: u32) -> vec4<u32> {
    if v < row_len {
        return codes[row + v];
    }
    return vec4<u32>();
}

@compute @workgroup_size(WG)
fn main(at: Invocation) {
    prepare(at);
    let thread = thread_of(at);
    let row_len = params.row_blocks * 2u;
    let row = 2u * (group_of(at) * (WG / LANES) + thread / LANES);
    let a = min(row, params.n - 1u) * row_len;
    let b = min(row + 1u, params.n - 1u) * row_len;
    var sums = array<vec2<i32>, 4>();
    // Four steps at a time, their weights asked for together: where there are few workgroups, what takes
    // the time is waiting for memory.
    for (var v0 = thread % LANES; v0 < row_len; v0 += 4u * LANES) {
        let v1 = v0 + LANES;
        let v2 = v1 + LANES;
        let v3 = v2 + LANES;
        let a0 = fetch(a, v0, row_len);
        let b0 = fetch(b, v0, row_len);
        let a1 = fetch(a, v1, row_len);
        let b1 = fetch(b, v1, row_len);
        let a2 = fetch(a, v2, row_len);
        let b2 = fetch(b, v2, row_len);
        let a3 = fetch(a, v3, row_len);
        let b3 = fetch(b, v3, row_len);
        for (var t = 0u; t < TOKENS; t++) {
            let token = params.token + t;
            var sum = multiply(a0, b0, token, v0, sums[t]);
            if v1 < row_len {
                sum = multiply(a1, b1, token, v1, sum);
            }
            if v2 < row_len {
                sum = multiply(a2, b2, token, v2, sum);
            }
            if v3 < row_len {
                sum = multiply(a3, b3, token, v3, sum);
            }
            sums[t] = sum;
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        let sum = segment_sum_i32(at, sums[t]);
        if thread % LANES == 0u && row < params.n {
            let step = row_step(params.token + t);
            let exact = vec2<f32>(sum - vec2<i32>(bitcast<i32>(step.y)));
            let i = params.first + row;
            let act = bitcast<f32>(step.x);
            let other = scales[min(i + 1u, params.first + params.n - 1u)];
            let scale = vec2<f32>(divide(scales[i], act), divide(other, act));
            let base = params.out_offset + (params.token + t) * params.out_stride;
            put(base, i, params.first + params.n, exact * scale);
        }
    }
}
