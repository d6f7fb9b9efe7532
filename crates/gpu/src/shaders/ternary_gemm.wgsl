// out[t, i] ← (scale[i] / act_scale[t]) · Σ_j trit[i, j] · q[t, j], for many rows t
//
// Agrees with `sterna_kernels::gemm` for ternary weights bit for bit.
// Shapes: codes [n, 2 · blocks] of 16 bytes, the working layout of `sterna_kernels::quant::ternary`;
// scales [n] f32; q [m, q_len] of 16 int8; steps [m] of scale and sum; out f32.
// Workgroups of 256: 64 rows of weights by 64 of activations, four by four per invocation.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<f32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> steps: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

// A block of 128 columns: of weights 8 words in rows 9 apart, so that rows are in different banks; of
// activations 8 vectors.
var<workgroup> tile_w: array<u32, 576>;
var<workgroup> tile_q: array<vec4<u32>, 512>;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let row0 = group.x * 64u;
    let token0 = group.y * 64u;
    // Rows 2x, 2x + 1, 32 + 2x, 33 + 2x, and tokens y, 16 + y, 32 + y, 48 + y.
    let x = thread % 16u;
    let y = thread / 16u;
    // One vector for each token, of the four rows.
    var sums = array<vec4<i32>, 4>();
    for (var block = 0u; block < params.row_blocks; block++) {
        if thread < 128u {
            let r = thread / 2u;
            let begin = stored_row(row0 + r) * params.row_blocks * 2u + block * 2u + thread % 2u;
            let w = codes[begin];
            let to = r * 9u + thread % 2u * 4u;
            tile_w[to] = w.x;
            tile_w[to + 1u] = w.y;
            tile_w[to + 2u] = w.z;
            tile_w[to + 3u] = w.w;
        }
        for (var i = thread; i < 512u; i += 256u) {
            let t = min(token0 + i / 8u, params.m - 1u);
            tile_q[i] = q[t * params.q_len + block * 8u + i % 8u];
        }
        workgroupBarrier();
        for (var half = 0u; half < 2u; half++) {
            var w = array<vec4<u32>, 4>();
            for (var r = 0u; r < 4u; r++) {
                let at = (r / 2u * 32u + 2u * x + r % 2u) * 9u + half * 4u;
                w[r] = vec4<u32>(tile_w[at], tile_w[at + 1u], tile_w[at + 2u], tile_w[at + 3u]);
            }
            for (var quarter = 0u; quarter < 4u; quarter++) {
                let shift = vec4<u32>(6u - 2u * quarter);
                let mask = vec4<u32>(0x03030303u);
                let w0 = (w[0] >> shift) & mask;
                let w1 = (w[1] >> shift) & mask;
                let w2 = (w[2] >> shift) & mask;
                let w3 = (w[3] >> shift) & mask;
                for (var t = 0u; t < 4u; t++) {
                    let a = tile_q[(t * 16u + y) * 8u + quarter * 2u + half];
                    var sum = sums[t];
                    sum.x = dot16(w0, a, sum.x);
                    sum.y = dot16(w1, a, sum.y);
                    sum.z = dot16(w2, a, sum.z);
                    sum.w = dot16(w3, a, sum.w);
                    sums[t] = sum;
                }
            }
        }
        workgroupBarrier();
    }
    for (var t = 0u; t < 4u; t++) {
        let token = token0 + t * 16u + y;
        if token >= params.m {
            continue;
        }
        let step = steps[token];
        let act = bitcast<f32>(step.x);
        let exact = vec4<f32>(sums[t] - vec4<i32>(bitcast<i32>(step.y)));
        let base = params.out_offset + token * params.out_stride;
        let end = params.first + params.n;
        for (var pair = 0u; pair < 2u; pair++) {
            let row = row0 + pair * 32u + 2u * x;
            let scale = vec2<f32>(
                divide(scales[stored_row(row)], act),
                divide(scales[stored_row(row + 1u)], act),
            );
            put(base, params.first + row, end, select(exact.xy, exact.zw, pair == 1u) * scale);
        }
    }
}
