// out[t, i] ← Σ_j w[i, j] · x[t, j], of blocks of integers and rounded activations, by matrix units
//
// Agrees with `sterna_kernels::gemm` as block_gemm.wgsl does, but that both sides are rounded to f16
// first, 11 bits.
// Shapes: as block_gemm.wgsl.
// Workgroups of 128, four subgroups of 32: 64 rows of weights by 64 of activations, 32 by 32 to a
// subgroup, two runs of 32 columns at a time.

@group(0) @binding(2) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> steps: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

// 64 rows of 64 columns, 72 apart, so that rows are in different banks.
var<workgroup> tile_w: array<f16, 4608>;
var<workgroup> tile_x: array<f16, 4608>;
// 64 tokens of 64 rows, 68 apart.
var<workgroup> tile_out: array<f32, 4352>;

// Activations are divided by this, so that those up to 4 million are still f16.
const SHRINK: f32 = 64.0;

// Four bytes as floats.
fn bytes_of(word: u32) -> vec4<f32> {
    let shifted = bitcast<vec4<i32>>(vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u));
    return vec4<f32>(shifted >> vec4<u32>(24u));
}

@compute @workgroup_size(128)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
) {
    let row0 = group.x * 64u;
    let token0 = group.y * 64u;
    for (var i = thread; i < 4352u; i += 128u) {
        tile_out[i] = 0.0;
    }
    workgroupBarrier();
    // This subgroup's rows and tokens within the tile.
    let r = subgroup / 2u * 32u;
    let t = subgroup % 2u * 32u;
    var c00 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 68u);
    var c01 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 68u);
    var c10 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 68u);
    var c11 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 68u);
    // Each invocation has a run of a row, and one of a token.
    let line = thread / 2u;
    let row = min(row0 + line, params.n - 1u);
    let token = min(token0 + line, params.m - 1u);
    let to = line * 72u + thread % 2u * 32u;
    for (var run0 = 0u; run0 < params.runs; run0 += 2u) {
        let run = run0 + thread % 2u;
        var w = array<vec4<u32>, 2>();
        var s = vec3<f32>();
        if run < params.runs {
            w = run_codes(row, run);
            s = run_scales(row, run);
        }
        // Rows of activations are padded to eight runs.
        let at = token * params.q_len + run * 2u;
        let x = array<vec4<u32>, 2>(q[at], q[at + 1u]);
        let step = bitcast<f32>(steps[token * params.q_len / 2u + run].x) / SHRINK;
        for (var i = 0u; i < 8u; i++) {
            let scale = select(s.x, s.y, i >= 4u);
            let weights = vec4<f16>(scale * bytes_of(w[i / 4u][i % 4u]) - s.z);
            let values = vec4<f16>(step * bytes_of(x[i / 4u][i % 4u]));
            for (var j = 0u; j < 4u; j++) {
                tile_w[to + 4u * i + j] = weights[j];
                tile_x[to + 4u * i + j] = values[j];
            }
        }
        workgroupBarrier();
        for (var k = 0u; k < 64u; k += 16u) {
            let a0 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[r * 72u + k], 72u);
            let a1 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[(r + 16u) * 72u + k], 72u);
            let b0 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[t * 72u + k], 72u);
            let b1 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[(t + 16u) * 72u + k], 72u);
            c00 = coopMultiplyAdd(a0, b0, c00);
            c01 = coopMultiplyAdd(a0, b1, c01);
            c10 = coopMultiplyAdd(a1, b0, c10);
            c11 = coopMultiplyAdd(a1, b1, c11);
        }
        workgroupBarrier();
    }
    coopStore(c00, &tile_out[t * 68u + r], 68u);
    coopStore(c01, &tile_out[(t + 16u) * 68u + r], 68u);
    coopStore(c10, &tile_out[t * 68u + r + 16u], 68u);
    coopStore(c11, &tile_out[(t + 16u) * 68u + r + 16u], 68u);
    workgroupBarrier();
    let end = params.first + params.n;
    for (var pair = thread; pair < 2048u; pair += 128u) {
        let token = token0 + pair / 32u;
        let i = pair % 32u * 2u;
        if token < params.m {
            let at = pair / 32u * 68u + i;
            let value = SHRINK * vec2<f32>(tile_out[at], tile_out[at + 1u]);
            put(params.out_offset + token * params.out_stride, params.first + row0 + i, end, value);
        }
    }
}
