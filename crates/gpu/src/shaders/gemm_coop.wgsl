// out[t, i] ← Σ_j w[i, j] · x[t, j], for many rows t, by cooperative matrices
//
// `coop_*.wgsl` loads both sides into shared memory as f16, and says what it agrees with.
// Shapes: codes and scales as there; q and steps as there; out f32.
// Workgroups of 256, eight subgroups of 32: 128 rows of weights by 128 of activations, 64 by 32 per subgroup,
// 64 columns at a time.

@group(1) @binding(0) var<uniform> params: Params;

// Of 128 rows, and of 128 tokens, 64 columns as f16: sixteen vectors, in lines eighteen apart, so that lines
// are in different banks. Columns are in whatever order is cheapest, the same in both.
var<workgroup> tile_w: array<vec4<f16>, 2304>;
var<workgroup> tile_x: array<vec4<f16>, 2304>;
// Of each subgroup, a matrix of 16 tokens by 16 rows, tokens 20 apart.
var<workgroup> tile_out: array<f32, 2560>;

// Stores the matrix of this subgroup, whose first result is of row `row` and token `token`.
fn put_tile(lane: u32, own: u32, row: u32, token: u32) {
    workgroupBarrier();
    for (var i = lane; i < 128u; i += 32u) {
        let r = i % 8u * 2u;
        let t = i / 8u;
        let at = own + t * 20u + r;
        if token + t < params.m {
            put(
                params.out_offset + (token + t) * params.out_stride,
                params.first + row + r,
                params.first + params.n,
                result_of(row + r, token + t, vec2<f32>(tile_out[at], tile_out[at + 1u])),
            );
        }
    }
    workgroupBarrier();
}

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let row0 = group.x * 128u;
    let token0 = group.y * 128u;
    for (var i = thread; i < 320u; i += 256u) {
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
    let r = subgroup % 2u * 64u;
    let t = subgroup / 2u * 32u;
    // The row of weights, and the half of the columns that this invocation loads; and the part of the columns of several
    // tokens, as neighbours read what is side by side.
    let line = thread / 2u;
    let half = thread % 2u;
    let to = line * 18u + half * 8u;
    let x_line = thread / X_PARTS;
    let part = thread % X_PARTS;
    var next_w = fetch_w(row0 + line, 0u, half);
    var x_at: array<u32, 4>;
    var next_x: array<vec4<u32>, 4>;
    for (var i = 0u; i < X_PARTS / 2u; i++) {
        x_at[i] = x_begin(min(token0 + x_line + i * (256u / X_PARTS), params.m - 1u), part);
        next_x[i] = q[x_at[i]];
    }
    let n_turns = chunks();
    for (var turn = 0u; turn < n_turns; turn++) {
        stage_w(to, next_w, half);
        for (var i = 0u; i < X_PARTS / 2u; i++) {
            stage_x((x_line + i * (256u / X_PARTS)) * 18u, part, next_x[i]);
        }
        workgroupBarrier();
        // While these are multiplied, the next are being loaded.
        let ahead = min(turn + 1u, n_turns - 1u);
        next_w = fetch_w(row0 + line, ahead, half);
        for (var i = 0u; i < X_PARTS / 2u; i++) {
            next_x[i] = q[x_at[i] + x_of_chunk(ahead)];
        }
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
    let own = subgroup * 320u;
    let row = row0 + r;
    let token = token0 + t;
    coopStore(c00, &tile_out[own], 20u);
    put_tile(lane, own, row, token);
    coopStore(c01, &tile_out[own], 20u);
    put_tile(lane, own, row, token + 16u);
    coopStore(c10, &tile_out[own], 20u);
    put_tile(lane, own, row + 16u, token);
    coopStore(c11, &tile_out[own], 20u);
    put_tile(lane, own, row + 16u, token + 16u);
    coopStore(c20, &tile_out[own], 20u);
    put_tile(lane, own, row + 32u, token);
    coopStore(c21, &tile_out[own], 20u);
    put_tile(lane, own, row + 32u, token + 16u);
    coopStore(c30, &tile_out[own], 20u);
    put_tile(lane, own, row + 48u, token);
    coopStore(c31, &tile_out[own], 20u);
    put_tile(lane, own, row + 48u, token + 16u);
}
