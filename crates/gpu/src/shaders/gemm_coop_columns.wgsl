// out[t, i] ← Σ_j w[i, j] · x[t, j], for rows t, or rows i, that aren't many, by cooperative matrices, subgroups side by
// side in the columns
//
// `columns_*.wgsl` loads both sides into shared memory as f16, and says what it agrees with, and which rows of
// activations they are.
// Workgroups of 128, four subgroups of 32: 64 rows of weights by TOKENS of activations. A chunk of columns is loaded while
// the one before is multiplied in turns, 64 columns each; of these, each subgroup multiplies 16: the sums of all four are
// added up at the end. So nothing but activations is read from shared memory more than once.

// 32 or 64.
override TOKENS: u32 = 64u;

@group(1) @binding(0) var<uniform> params: Params;

// Of 64 rows, and of 64 tokens, 64 columns as f16: sixteen vectors, in lines eighteen apart, so that lines are in
// different banks. Columns are in whatever order is cheapest, the same in both.
var<workgroup> tile_w: array<vec4<f16>, 1152>;
var<workgroup> tile_x: array<vec4<f16>, 1152>;
// Of each subgroup, a matrix of 16 tokens by 16 rows, tokens 20 apart.
var<workgroup> tile_out: array<f32, 1280>;

// Adds up the matrices of all subgroups, whose first result is of row `row` and line `line` of the tile, and stores
// that.
fn put_sum_of_all(tile: Tile, thread: u32, row: u32, line: u32) {
    workgroupBarrier();
    let t = thread / 8u;
    let r = thread % 8u * 2u;
    var sums = vec2<f32>();
    for (var first = 0u; first < 1280u; first += 320u) {
        let at = first + t * 20u + r;
        sums += vec2<f32>(tile_out[at], tile_out[at + 1u]);
    }
    put_line(tile, line + t, row + r, sums);
    workgroupBarrier();
}

@compute @workgroup_size(128)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
) {
    let row0 = rows_of(group) * 64u;
    let tile = tile_of(group);
    for (var i = thread; i < 320u; i += 128u) {
        tile_out[i] = 0.0;
    }
    workgroupBarrier();
    var c00 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c01 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c02 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c03 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c10 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c11 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c12 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c13 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c20 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c21 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c22 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c23 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c30 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c31 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c32 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    var c33 = coopLoad<coop_mat16x16<f32, C>>(&tile_out[0], 20u);
    let chunks = chunks_of(tile);
    // Of no chunks the first is read, and not used.
    let last = max(chunks.y, 1u) - 1u;
    var next = fetch(tile, thread, row0, min(chunks.x, last));
    for (var chunk = chunks.x; chunk < chunks.y; chunk++) {
        var now = next;
        next = fetch(tile, thread, row0, min(chunk + 1u, last));
        for (var turn = 0u; turn < TURNS; turn++) {
            now = stage(thread, now);
            workgroupBarrier();
            let k = subgroup * 4u;
            let x0 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[k], 18u);
            let x1 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[288u + k], 18u);
            let w0 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[k], 18u);
            c00 = coopMultiplyAdd(w0, x0, c00);
            c01 = coopMultiplyAdd(w0, x1, c01);
            let w1 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[288u + k], 18u);
            c10 = coopMultiplyAdd(w1, x0, c10);
            c11 = coopMultiplyAdd(w1, x1, c11);
            let w2 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[576u + k], 18u);
            c20 = coopMultiplyAdd(w2, x0, c20);
            c21 = coopMultiplyAdd(w2, x1, c21);
            let w3 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[864u + k], 18u);
            c30 = coopMultiplyAdd(w3, x0, c30);
            c31 = coopMultiplyAdd(w3, x1, c31);
            if TOKENS == 64u {
                let x2 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[576u + k], 18u);
                let x3 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[864u + k], 18u);
                c02 = coopMultiplyAdd(w0, x2, c02);
                c03 = coopMultiplyAdd(w0, x3, c03);
                c12 = coopMultiplyAdd(w1, x2, c12);
                c13 = coopMultiplyAdd(w1, x3, c13);
                c22 = coopMultiplyAdd(w2, x2, c22);
                c23 = coopMultiplyAdd(w2, x3, c23);
                c32 = coopMultiplyAdd(w3, x2, c32);
                c33 = coopMultiplyAdd(w3, x3, c33);
            }
            workgroupBarrier();
        }
    }
    let own = subgroup * 320u;
    // By tokens, whose scales are known then.
    coopStore(c00, &tile_out[own], 20u);
    put_sum_of_all(tile, thread, row0, 0u);
    coopStore(c10, &tile_out[own], 20u);
    put_sum_of_all(tile, thread, row0 + 16u, 0u);
    coopStore(c20, &tile_out[own], 20u);
    put_sum_of_all(tile, thread, row0 + 32u, 0u);
    coopStore(c30, &tile_out[own], 20u);
    put_sum_of_all(tile, thread, row0 + 48u, 0u);
    coopStore(c01, &tile_out[own], 20u);
    put_sum_of_all(tile, thread, row0, 16u);
    coopStore(c11, &tile_out[own], 20u);
    put_sum_of_all(tile, thread, row0 + 16u, 16u);
    coopStore(c21, &tile_out[own], 20u);
    put_sum_of_all(tile, thread, row0 + 32u, 16u);
    coopStore(c31, &tile_out[own], 20u);
    put_sum_of_all(tile, thread, row0 + 48u, 16u);
    if TOKENS == 64u {
        coopStore(c02, &tile_out[own], 20u);
        put_sum_of_all(tile, thread, row0, 32u);
        coopStore(c12, &tile_out[own], 20u);
        put_sum_of_all(tile, thread, row0 + 16u, 32u);
        coopStore(c22, &tile_out[own], 20u);
        put_sum_of_all(tile, thread, row0 + 32u, 32u);
        coopStore(c32, &tile_out[own], 20u);
        put_sum_of_all(tile, thread, row0 + 48u, 32u);
        coopStore(c03, &tile_out[own], 20u);
        put_sum_of_all(tile, thread, row0, 48u);
        coopStore(c13, &tile_out[own], 20u);
        put_sum_of_all(tile, thread, row0 + 16u, 48u);
        coopStore(c23, &tile_out[own], 20u);
        put_sum_of_all(tile, thread, row0 + 32u, 48u);
        coopStore(c33, &tile_out[own], 20u);
        put_sum_of_all(tile, thread, row0 + 48u, 48u);
    }
}
