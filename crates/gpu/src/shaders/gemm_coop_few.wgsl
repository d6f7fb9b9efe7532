// out[t, i] ← Σ_j w[i, j] · x[t, j], for some tens of rows t, by cooperative matrices
//
// `coop_*.wgsl` loads both sides into shared memory as f16, and says what it agrees with.
// Shapes: codes and scales as there; q [m, q_len] of 16 int8; steps as there; out f32.
// Workgroups of 128, four subgroups of 32: 32 rows of weights by 32 of activations, 256 columns at a time, of which
// each subgroup multiplies 64; then their sums are added up. Small tiles keep a large device busy with few rows of
// activations, and wide ones keep much of the weights on their way.

@group(1) @binding(0) var<uniform> params: Params;

// For each subgroup 32 rows, and 32 tokens, of 64 columns as f16: sixteen vectors, in lines eighteen apart, so that
// lines are in different banks. Columns are in whatever order is cheapest, the same in both.
var<workgroup> tile_w: array<vec4<f16>, 2304>;
var<workgroup> tile_x: array<vec4<f16>, 2304>;
// Of each subgroup, a matrix of 16 tokens by 16 rows, tokens 20 apart.
var<workgroup> tile_out: array<f32, 1280>;

// Stores what the subgroups have of 16 tokens by 16 rows, from these on, added up.
fn put_sums(thread: u32, row: u32, token: u32) {
    workgroupBarrier();
    let r = thread % 8u * 2u;
    let t = thread / 8u;
    if token + t < params.m {
        var sums = vec2<f32>();
        for (var subgroup = 0u; subgroup < 4u; subgroup++) {
            let at = subgroup * 320u + t * 20u + r;
            sums += vec2<f32>(tile_out[at], tile_out[at + 1u]);
        }
        put(
            params.out_offset + (token + t) * params.out_stride,
            params.first + row + r,
            params.first + params.n,
            result_of(row + r, token + t, sums),
        );
    }
    workgroupBarrier();
}

@compute @workgroup_size(128)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
) {
    let row0 = group.x * 32u;
    let token0 = group.y * 32u;
    for (var i = thread; i < 1280u; i += 128u) {
        tile_out[i] = 0.0;
    }
    workgroupBarrier();
    var c00 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c01 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c10 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c11 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    // The row, or token, and the quarter of the columns that this invocation loads.
    let line = thread / 4u;
    let part = thread % 4u;
    let to = part * 576u + line * 18u;
    let n_turns = (chunks() + 3u) / 4u;
    var next_w = fetch_w(row0 + line, part);
    var next_x0 = fetch_x(token0 + line, part, 0u);
    var next_x1 = fetch_x(token0 + line, part, 1u);
    let own = subgroup * 576u;
    for (var turn = 0u; turn < n_turns; turn++) {
        stage_w(to, next_w);
        stage_x(to, next_x0);
        stage_x(to + 8u, next_x1);
        workgroupBarrier();
        // While these are multiplied, the next are being loaded.
        let ahead = min(turn + 1u, n_turns - 1u) * 4u + part;
        next_w = fetch_w(row0 + line, ahead);
        next_x0 = fetch_x(token0 + line, ahead, 0u);
        next_x1 = fetch_x(token0 + line, ahead, 1u);
        for (var k = 0u; k < 16u; k += 4u) {
            let b0 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[own + k], 18u);
            let b1 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[own + 288u + k], 18u);
            let a0 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[own + k], 18u);
            c00 = coopMultiplyAdd(a0, b0, c00);
            c01 = coopMultiplyAdd(a0, b1, c01);
            let a1 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[own + 288u + k], 18u);
            c10 = coopMultiplyAdd(a1, b0, c10);
            c11 = coopMultiplyAdd(a1, b1, c11);
        }
        workgroupBarrier();
    }
    let mine = subgroup * 320u;
    coopStore(c00, &tile_out[mine], 20u);
    put_sums(thread, row0, token0);
    coopStore(c01, &tile_out[mine], 20u);
    put_sums(thread, row0, token0 + 16u);
    coopStore(c10, &tile_out[mine], 20u);
    put_sums(thread, row0 + 16u, token0);
    coopStore(c11, &tile_out[mine], 20u);
    put_sums(thread, row0 + 16u, token0 + 16u);
}
