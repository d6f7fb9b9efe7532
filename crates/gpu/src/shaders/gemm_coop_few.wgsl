// out[t, i] ← Σ_j w[i, j] · x[t, j], for rows t, or rows i, that aren't many, by cooperative matrices
//
// `coop_*.wgsl` loads both sides into shared memory as f16, and says what it agrees with.
// Shapes: codes and scales as there; q and steps as there; out f32, or, of several parts of
// the columns, partial [parts, m, n] of sums, which gemm_coop_sum.wgsl or x_of_sums.wgsl adds up.
// Workgroups of 128, four subgroups of 32: 64 rows of weights by TOKENS of activations, 32 by half of them per
// subgroup, 64 columns at a time, of one part of them all. Small tiles and parts keep a large device busy.
// Which rows of activations they are: coop_every_row.wgsl, or coop_routed_rows.wgsl.

// 32 or 64.
override TOKENS: u32 = 64u;

@group(1) @binding(0) var<uniform> params: Params;

// Of 64 rows, and of 64 tokens, 64 columns as f16: sixteen vectors, in lines eighteen apart, so that lines
// are in different banks. Columns are in whatever order is cheapest, the same in both.
var<workgroup> tile_w: array<vec4<f16>, 1152>;
var<workgroup> tile_x: array<vec4<f16>, 1152>;
// Of each subgroup, a matrix of 16 tokens by 16 rows, tokens 20 apart.
var<workgroup> tile_out: array<f32, 1280>;

// Stores the matrix of this subgroup, whose first result is of row `row` and line `line` of the tile.
fn put_tile(tile: Tile, lane: u32, own: u32, row: u32, line: u32) {
    workgroupBarrier();
    for (var i = lane; i < 128u; i += 32u) {
        let r = i % 8u * 2u;
        let t = i / 8u;
        let at = own + t * 20u + r;
        put_line(tile, line + t, row + r, vec2<f32>(tile_out[at], tile_out[at + 1u]));
    }
    workgroupBarrier();
}

@compute @workgroup_size(128)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let row0 = group.x * 64u;
    let tile = find_tile(group.y);
    for (var i = thread; i < 320u; i += 128u) {
        tile_out[i] = 0.0;
    }
    workgroupBarrier();
    var c00 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c01 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c10 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c11 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    // This subgroup's rows and tokens within the tile.
    let r = subgroup % 2u * 32u;
    let t = subgroup / 2u * (TOKENS / 2u);
    // The row of weights, and the half of the columns that this invocation loads; and the part of the columns of several
    // tokens, as neighbours read what is side by side.
    let line = thread / 2u;
    let half = thread % 2u;
    let to = line * 18u + half * 8u;
    let x_line = thread / X_PARTS;
    let part = thread % X_PARTS;
    let chunks = chunks_of(tile);
    // Of no chunks the first is read, and not used.
    let last = max(chunks.y, 1u) - 1u;
    var next_w = fetch_w(row0 + line, min(chunks.x, last), half);
    var x_at: array<u32, 4>;
    var next_x: array<vec4<u32>, 4>;
    for (var i = 0u; i < TOKENS * X_PARTS / 128u; i++) {
        x_at[i] = x_begin(row_of(tile, x_line + i * (128u / X_PARTS)), part);
        next_x[i] = q[x_at[i] + x_of_chunk(min(chunks.x, last))];
    }
    for (var turn = chunks.x; turn < chunks.y; turn++) {
        stage_w(to, next_w, half);
        for (var i = 0u; i < TOKENS * X_PARTS / 128u; i++) {
            stage_x((x_line + i * (128u / X_PARTS)) * 18u, part, next_x[i]);
        }
        workgroupBarrier();
        // While these are multiplied, the next are being loaded.
        let ahead = min(turn + 1u, last);
        next_w = fetch_w(row0 + line, ahead, half);
        for (var i = 0u; i < TOKENS * X_PARTS / 128u; i++) {
            next_x[i] = q[x_at[i] + x_of_chunk(ahead)];
        }
        for (var k = 0u; k < 16u; k += 4u) {
            let a0 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[r * 18u + k], 18u);
            let a1 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[(r + 16u) * 18u + k], 18u);
            let b0 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[t * 18u + k], 18u);
            c00 = coopMultiplyAdd(a0, b0, c00);
            c10 = coopMultiplyAdd(a1, b0, c10);
            if TOKENS == 64u {
                let b1 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[(t + 16u) * 18u + k], 18u);
                c01 = coopMultiplyAdd(a0, b1, c01);
                c11 = coopMultiplyAdd(a1, b1, c11);
            }
        }
        workgroupBarrier();
    }
    let own = subgroup * 320u;
    let row = row0 + r;
    coopStore(c00, &tile_out[own], 20u);
    put_tile(tile, lane, own, row, t);
    coopStore(c10, &tile_out[own], 20u);
    put_tile(tile, lane, own, row + 16u, t);
    if TOKENS == 64u {
        coopStore(c01, &tile_out[own], 20u);
        put_tile(tile, lane, own, row, t + 16u);
        coopStore(c11, &tile_out[own], 20u);
        put_tile(tile, lane, own, row + 16u, t + 16u);
    }
}
