// out[t, i] ← Σ_j w[i, j] · x[t, j] for trits and int8, for rows t, or rows i, that aren't many, by cooperative matrices
//
// Agrees with `sterna_kernels::gemm` bit for bit, as coop_ternary.wgsl says. Needs `quarters.wgsl`.
// Shapes: weights and activations as coop_ternary.wgsl says; out, or partial, as gemm_coop_few.wgsl says.
// Workgroups of 128, four subgroups of 32: 64 rows of weights by TOKENS of activations. 256 columns are loaded at a
// time, while those before are multiplied in four turns, 64 of them each; of these, each subgroup multiplies 16: the
// sums of all four are added up at the end.
// Which rows of activations they are: coop_every_row.wgsl, or coop_routed_rows.wgsl.

// 32 or 64.
override TOKENS: u32 = 64u;

@group(1) @binding(0) var<uniform> params: Params;

// Of 64 rows, and of 64 tokens, 64 columns as f16: sixteen vectors, in lines eighteen apart, so that lines are in
// different banks. The columns of a turn are those of one word in each vector of codes.
var<workgroup> tile_w: array<vec4<f16>, 1152>;
var<workgroup> tile_x: array<vec4<f16>, 1152>;
// Of each subgroup, a matrix of 16 tokens by 16 rows, tokens 20 apart.
var<workgroup> tile_out: array<f32, 1280>;

// How many times 256 columns a row has.
fn chunks() -> u32 {
    return (params.row_blocks + 1u) / 2u;
}

// Vector `own` of the four of a chunk of a row of weights. Beyond the row's end, any: activations are zeros there.
fn fetch_w(row: u32, chunk: u32, own: u32) -> vec4<u32> {
    let first = (matrix_begin() + stored_row(row)) * params.row_blocks * 2u;
    return codes[first + min(4u * chunk + own, 2u * params.row_blocks - 1u)];
}

// What vector `own` of a chunk of weights is multiplied with: of each quarter of its block half. The first two are
// exchanged, and the last two, if `swap` is 1.
fn fetch_x(token: u32, chunk: u32, own: u32, swap: u32) -> array<vec4<u32>, 4> {
    let block = 2u * chunk + own / 2u;
    var x: array<vec4<u32>, 4>;
    if block < params.row_blocks {
        let at = token * params.q_len + 8u * block + own % 2u;
        for (var i = 0u; i < 4u; i++) {
            x[i] = q[at + 2u * (i ^ swap)];
        }
    }
    return x;
}

// The columns of the first word.
fn stage_w(to: u32, w: vec4<u32>, swap: u32) {
    for (var i = 0u; i < 4u; i++) {
        tile_w[to + (i ^ swap)] = quarter_of(w.x, i ^ swap);
    }
}

fn stage_x(to: u32, x: array<vec4<u32>, 4>, swap: u32) {
    for (var i = 0u; i < 4u; i++) {
        tile_x[to + (i ^ swap)] = halves_of(x[i].x);
    }
}

// The next word becomes the first.
fn next_words(x: array<vec4<u32>, 4>) -> array<vec4<u32>, 4> {
    return array<vec4<u32>, 4>(x[0].yzwx, x[1].yzwx, x[2].yzwx, x[3].yzwx);
}

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
    let row0 = group.x * 64u;
    let tile = find_tile(group.y);
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
    // What this invocation loads: a vector of the codes of two rows, and what that is multiplied with of one token or two.
    let line = thread / 4u;
    let own = thread % 4u;
    // Neighbours write to different banks.
    let swap = line / 2u % 2u;
    let to = line * 18u + own * 4u;
    let chunks = chunks_of(tile);
    // Of no chunks the first is read, and not used.
    let last = max(chunks.y, 1u) - 1u;
    let begin = min(chunks.x, last);
    var next_v = fetch_w(row0 + line, begin, own);
    var next_w = fetch_w(row0 + line + 32u, begin, own);
    var next_x = fetch_x(row_of(tile, line), begin, own, swap);
    var next_y = next_x;
    if TOKENS == 64u {
        next_y = fetch_x(row_of(tile, line + 32u), begin, own, swap);
    }
    for (var chunk = chunks.x; chunk < chunks.y; chunk++) {
        var v = next_v;
        var w = next_w;
        var x = next_x;
        var y = next_y;
        // While these are multiplied, the next are being loaded.
        let ahead = min(chunk + 1u, last);
        next_v = fetch_w(row0 + line, ahead, own);
        next_w = fetch_w(row0 + line + 32u, ahead, own);
        next_x = fetch_x(row_of(tile, line), ahead, own, swap);
        if TOKENS == 64u {
            next_y = fetch_x(row_of(tile, line + 32u), ahead, own, swap);
        }
        for (var turn = 0u; turn < 4u; turn++) {
            stage_w(to, v, swap);
            stage_w(to + 576u, w, swap);
            stage_x(to, x, swap);
            v = v.yzwx;
            w = w.yzwx;
            x = next_words(x);
            if TOKENS == 64u {
                stage_x(to + 576u, y, swap);
                y = next_words(y);
            }
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
    let own_out = subgroup * 320u;
    coopStore(c00, &tile_out[own_out], 20u);
    put_sum_of_all(tile, thread, row0, 0u);
    coopStore(c01, &tile_out[own_out], 20u);
    put_sum_of_all(tile, thread, row0, 16u);
    coopStore(c10, &tile_out[own_out], 20u);
    put_sum_of_all(tile, thread, row0 + 16u, 0u);
    coopStore(c11, &tile_out[own_out], 20u);
    put_sum_of_all(tile, thread, row0 + 16u, 16u);
    coopStore(c20, &tile_out[own_out], 20u);
    put_sum_of_all(tile, thread, row0 + 32u, 0u);
    coopStore(c21, &tile_out[own_out], 20u);
    put_sum_of_all(tile, thread, row0 + 32u, 16u);
    coopStore(c30, &tile_out[own_out], 20u);
    put_sum_of_all(tile, thread, row0 + 48u, 0u);
    coopStore(c31, &tile_out[own_out], 20u);
    put_sum_of_all(tile, thread, row0 + 48u, 16u);
    if TOKENS == 64u {
        coopStore(c02, &tile_out[own_out], 20u);
        put_sum_of_all(tile, thread, row0, 32u);
        coopStore(c03, &tile_out[own_out], 20u);
        put_sum_of_all(tile, thread, row0, 48u);
        coopStore(c12, &tile_out[own_out], 20u);
        put_sum_of_all(tile, thread, row0 + 16u, 32u);
        coopStore(c13, &tile_out[own_out], 20u);
        put_sum_of_all(tile, thread, row0 + 16u, 48u);
        coopStore(c22, &tile_out[own_out], 20u);
        put_sum_of_all(tile, thread, row0 + 32u, 32u);
        coopStore(c23, &tile_out[own_out], 20u);
        put_sum_of_all(tile, thread, row0 + 32u, 48u);
        coopStore(c32, &tile_out[own_out], 20u);
        put_sum_of_all(tile, thread, row0 + 48u, 32u);
        coopStore(c33, &tile_out[own_out], 20u);
        put_sum_of_all(tile, thread, row0 + 48u, 48u);
    }
}
