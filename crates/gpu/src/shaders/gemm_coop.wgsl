// out[t, i] ← Σ_j w[i, j] · x[t, j], for many rows t, by cooperative matrices
//
// `coop_*.wgsl` loads both sides into shared memory as f16, and says what it agrees with.
// Shapes: codes and scales as there; q [m, q_len] of 16 int8; steps as there; out f32.
// Workgroups of 128, four subgroups of 32: 128 rows of weights by 64 of activations, 64 by 32 per subgroup,
// 64 columns at a time.

@group(1) @binding(0) var<uniform> params: Params;

// Of 128 rows and of 64 tokens, 64 columns as f16: sixteen vectors, in lines eighteen apart, so that lines
// are in different banks. Columns are in whatever order is cheapest, the same in both.
var<workgroup> tile_w: array<vec4<f16>, 2304>;
var<workgroup> tile_x: array<vec4<f16>, 1152>;
// Of each subgroup, four matrices of 16 tokens by 16 rows, tokens 20 apart.
var<workgroup> tile_out: array<f32, 5120>;

// Stores the results of the four matrices of this subgroup's tile, of which the first are of row `row` and
// token `token`.
fn put_tile(lane: u32, subgroup: u32, row: u32, token: u32) {
    for (var i = lane; i < 512u; i += 32u) {
        // Pairs of rows, then rows of 16, tokens of 16.
        let r = i % 8u * 2u + i / 8u % 2u * 16u;
        let t = i / 16u;
        let at = ((subgroup * 4u + r / 16u * 2u + t / 16u) * 16u + t % 16u) * 20u + r % 16u;
        if token + t < params.m {
            let sums = vec2<f32>(tile_out[at], tile_out[at + 1u]);
            put(
                params.out_offset + (token + t) * params.out_stride,
                params.first + row + r,
                params.first + params.n,
                result_of(row + r, token + t, sums),
            );
        }
    }
}

@compute @workgroup_size(128)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let row0 = group.x * 128u;
    let token0 = group.y * 64u;
    for (var i = thread; i < 5120u; i += 128u) {
        tile_out[i] = 0.0;
    }
    workgroupBarrier();
    var c00 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c01 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c10 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c11 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c20 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c21 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c30 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c31 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    // This subgroup's rows and tokens within the tile.
    let r = subgroup / 2u * 64u;
    let t = subgroup % 2u * 32u;
    var next_w = fetch_w(row0 + thread, 0u);
    var next_x = fetch_x(token0 + thread / 2u, 0u, thread % 2u);
    let n_turns = chunks();
    for (var turn = 0u; turn < n_turns; turn++) {
        stage_w(thread * 18u, next_w);
        stage_x(thread / 2u * 18u + thread % 2u * 8u, next_x);
        workgroupBarrier();
        // While these are multiplied, the next are being loaded.
        let ahead = min(turn + 1u, n_turns - 1u);
        next_w = fetch_w(row0 + thread, ahead);
        next_x = fetch_x(token0 + thread / 2u, ahead, thread % 2u);
        for (var k = 0u; k < 16u; k += 4u) {
            let b0 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[t * 18u + k], 18u);
            let b1 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[(t + 16u) * 18u + k], 18u);
            let a0 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[r * 18u + k], 18u);
            c00 = coopMultiplyAdd(a0, b0, c00);
            c01 = coopMultiplyAdd(a0, b1, c01);
            let a1 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[(r + 16u) * 18u + k], 18u);
            c10 = coopMultiplyAdd(a1, b0, c10);
            c11 = coopMultiplyAdd(a1, b1, c11);
            let a2 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[(r + 32u) * 18u + k], 18u);
            c20 = coopMultiplyAdd(a2, b0, c20);
            c21 = coopMultiplyAdd(a2, b1, c21);
            let a3 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[(r + 48u) * 18u + k], 18u);
            c30 = coopMultiplyAdd(a3, b0, c30);
            c31 = coopMultiplyAdd(a3, b1, c31);
        }
        workgroupBarrier();
    }
    let to = subgroup * 1280u;
    coopStore(c00, &tile_out[to], 20u);
    coopStore(c01, &tile_out[to + 320u], 20u);
    coopStore(c10, &tile_out[to + 640u], 20u);
    coopStore(c11, &tile_out[to + 960u], 20u);
    workgroupBarrier();
    put_tile(lane, subgroup, row0 + r, token0 + t);
    workgroupBarrier();
    coopStore(c20, &tile_out[to], 20u);
    coopStore(c21, &tile_out[to + 320u], 20u);
    coopStore(c30, &tile_out[to + 640u], 20u);
    coopStore(c31, &tile_out[to + 960u], 20u);
    workgroupBarrier();
    put_tile(lane, subgroup, row0 + r + 32u, token0 + t);
}
