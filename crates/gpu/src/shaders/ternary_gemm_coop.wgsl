// out[t, i] ← (scale[i] / act_scale[t]) · Σ_j trit[i, j] · q[t, j], for many rows t, by matrix units
//
// Agrees with `sterna_kernels::gemm` for ternary weights bit for bit: trits and int8 are exact in f16,
// and sums of less than 2^24 in f32, which k up to 2^17 stays below.
// Shapes: as ternary_gemm.wgsl.
// Workgroups of 128, four subgroups of 32: 64 rows of weights by 64 of activations, 32 by 32 to a
// subgroup, 64 columns at a time.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<f32>;
@group(0) @binding(2) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> steps: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

// 64 rows of 64 columns, 72 apart, so that rows are in different banks.
var<workgroup> tile_w: array<f16, 4608>;
var<workgroup> tile_q: array<f16, 4608>;
// 64 tokens of 64 rows, 68 apart.
var<workgroup> tile_out: array<f32, 4352>;

// Four bytes as f16.
fn bytes_of(word: u32) -> vec4<f16> {
    let shifted = bitcast<vec4<i32>>(vec4<u32>(word) << vec4<u32>(24u, 16u, 8u, 0u));
    return vec4<f16>(shifted >> vec4<u32>(24u));
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
    for (var v = 0u; v < params.row_blocks * 2u; v++) {
        // Sixteen bytes of a row are 64 columns: those of both sides lie by quarter of the block, then by
        // word.
        {
            let row = thread / 2u;
            let w = codes[min(row0 + row, params.n - 1u) * params.row_blocks * 2u + v];
            let two = select(w.xy, w.zw, thread % 2u == 1u);
            for (var i = 0u; i < 2u; i++) {
                for (var quarter = 0u; quarter < 4u; quarter++) {
                    let to = row * 72u + quarter * 16u + (thread % 2u * 2u + i) * 4u;
                    let trits = bytes_of((two[i] >> (6u - 2u * quarter)) & 0x03030303u) - 1.0h;
                    tile_w[to] = trits.x;
                    tile_w[to + 1u] = trits.y;
                    tile_w[to + 2u] = trits.z;
                    tile_w[to + 3u] = trits.w;
                }
            }
        }
        for (var j = 0u; j < 2u; j++) {
            let token = j * 32u + thread / 4u;
            let quarter = thread % 4u;
            let at = min(token0 + token, params.m - 1u) * params.q_len;
            let words = q[at + v / 2u * 8u + quarter * 2u + v % 2u];
            for (var i = 0u; i < 4u; i++) {
                let to = token * 72u + quarter * 16u + i * 4u;
                let x = bytes_of(words[i]);
                tile_q[to] = x.x;
                tile_q[to + 1u] = x.y;
                tile_q[to + 2u] = x.z;
                tile_q[to + 3u] = x.w;
            }
        }
        workgroupBarrier();
        for (var k = 0u; k < 64u; k += 16u) {
            let a0 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[r * 72u + k], 72u);
            let a1 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[(r + 16u) * 72u + k], 72u);
            let b0 = coopLoad<coop_mat16x16<f16, B>>(&tile_q[t * 72u + k], 72u);
            let b1 = coopLoad<coop_mat16x16<f16, B>>(&tile_q[(t + 16u) * 72u + k], 72u);
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
        let row = pair % 32u * 2u;
        let i = params.first + row0 + row;
        if token < params.m {
            let act = bitcast<f32>(steps[token].x);
            let exact = vec2<f32>(
                tile_out[pair / 32u * 68u + row],
                tile_out[pair / 32u * 68u + row + 1u],
            );
            let scale = vec2<f32>(
                divide(scales[min(i, end - 1u)], act),
                divide(scales[min(i + 1u, end - 1u)], act),
            );
            put(params.out_offset + token * params.out_stride, i, end, exact * scale);
        }
    }
}
