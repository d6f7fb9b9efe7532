// out[t, i] ← Σ_j w[i, j] · x[t, j], for many rows t, by cooperative matrices
//
// Agrees with `sterna_kernels::gemm` as float_gemm.wgsl does, except that activations are rounded to f16, over the range
// that coop_sums_blocks.wgsl says.
// Shapes: as float_gemv.wgsl, with m rows of x and out.
// Workgroups of 128, four subgroups of 32: 64 rows of weights by TOKENS of activations, 64 columns at a time, of which
// each subgroup multiplies 16: the sums of all four are added up at the end. Workgroups of the same weights follow each
// other, so that caches have them.

// 32 or 64.
override TOKENS: u32 = 64u;

@group(0) @binding(3) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

// Of 64 rows, and of 64 tokens, 64 columns: sixteen vectors, in lines eighteen apart, so that lines are in different
// banks.
var<workgroup> tile_w: array<vec4<f16>, 1152>;
var<workgroup> tile_x: array<vec4<f16>, 1152>;
// Of each subgroup, a matrix of 16 tokens by 16 rows, tokens 20 apart.
var<workgroup> tile_out: array<f32, 1280>;

// Half of a chunk of 64 columns of a row of weights, from vector `eighth` of eight on; zeros beyond its end.
fn fetch_w(row: u32, eighth: u32) -> array<vec4<u32>, 4> {
    var w: array<vec4<u32>, 4>;
    if eighth < params.row_blocks * 4u {
        let first = stored_row(row) * params.row_blocks * 4u + eighth;
        for (var i = 0u; i < 4u; i++) {
            w[i] = codes[first + i];
        }
    }
    return w;
}

// 16 columns of a row of activations, from vector `quarter` of four on.
fn fetch_x(line: u32, quarter: u32) -> array<vec4<f32>, 4> {
    let token = min(line, params.m - 1u);
    return array<vec4<f32>, 4>(
        x_at(token, quarter),
        x_at(token, quarter + 1u),
        x_at(token, quarter + 2u),
        x_at(token, quarter + 3u),
    );
}

fn stage_x(to: u32, x: array<vec4<f32>, 4>) {
    for (var i = 0u; i < 4u; i++) {
        tile_x[to + i] = vec4<f16>(x[i] / SHRINK);
    }
}

// Adds up the matrices of all subgroups, whose first result is of row `row` and token `token`, and stores that.
fn put_sum_of_all(thread: u32, row: u32, token: u32) {
    workgroupBarrier();
    let t = thread / 8u;
    let r = thread % 8u * 2u;
    var sums = vec2<f32>();
    for (var first = 0u; first < 1280u; first += 320u) {
        let at = first + t * 20u + r;
        sums += vec2<f32>(tile_out[at], tile_out[at + 1u]);
    }
    if token + t < params.m {
        put(
            params.out_offset + (token + t) * params.out_stride,
            params.first + row + r,
            params.first + params.n,
            SHRINK * sums,
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
    let token0 = group.x * TOKENS;
    let row0 = group.y * 64u;
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
    // What this invocation loads: half of a row of weights, and a quarter of a token's columns, or of two.
    let row = row0 + thread / 2u;
    let half = thread % 2u;
    let to_w = thread / 2u * 18u + half * 8u;
    let line = thread / 4u;
    let quarter = thread % 4u * 4u;
    let to_x = line * 18u + quarter;
    let chunks = (params.row_blocks + 1u) / 2u;
    var next_w = fetch_w(row, half * 4u);
    var next_x = fetch_x(token0 + line, quarter);
    var next_y = next_x;
    if TOKENS == 64u {
        next_y = fetch_x(token0 + line + 32u, quarter);
    }
    for (var chunk = 0u; chunk < chunks; chunk++) {
        for (var i = 0u; i < 4u; i++) {
            tile_w[to_w + 2u * i] = vec4<f16>(pair_of(next_w[i].x), pair_of(next_w[i].y));
            tile_w[to_w + 2u * i + 1u] = vec4<f16>(pair_of(next_w[i].z), pair_of(next_w[i].w));
        }
        stage_x(to_x, next_x);
        if TOKENS == 64u {
            stage_x(to_x + 576u, next_y);
        }
        workgroupBarrier();
        // While these are multiplied, the next are being loaded; the last ones once more.
        let ahead = min(chunk + 1u, chunks - 1u);
        next_w = fetch_w(row, ahead * 8u + half * 4u);
        next_x = fetch_x(token0 + line, ahead * 16u + quarter);
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
            next_y = fetch_x(token0 + line + 32u, ahead * 16u + quarter);
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
    let own = subgroup * 320u;
    coopStore(c00, &tile_out[own], 20u);
    put_sum_of_all(thread, row0, token0);
    coopStore(c01, &tile_out[own], 20u);
    put_sum_of_all(thread, row0, token0 + 16u);
    coopStore(c10, &tile_out[own], 20u);
    put_sum_of_all(thread, row0 + 16u, token0);
    coopStore(c11, &tile_out[own], 20u);
    put_sum_of_all(thread, row0 + 16u, token0 + 16u);
    coopStore(c20, &tile_out[own], 20u);
    put_sum_of_all(thread, row0 + 32u, token0);
    coopStore(c21, &tile_out[own], 20u);
    put_sum_of_all(thread, row0 + 32u, token0 + 16u);
    coopStore(c30, &tile_out[own], 20u);
    put_sum_of_all(thread, row0 + 48u, token0);
    coopStore(c31, &tile_out[own], 20u);
    put_sum_of_all(thread, row0 + 48u, token0 + 16u);
    if TOKENS == 64u {
        coopStore(c02, &tile_out[own], 20u);
        put_sum_of_all(thread, row0, token0 + 32u);
        coopStore(c03, &tile_out[own], 20u);
        put_sum_of_all(thread, row0, token0 + 48u);
        coopStore(c12, &tile_out[own], 20u);
        put_sum_of_all(thread, row0 + 16u, token0 + 32u);
        coopStore(c13, &tile_out[own], 20u);
        put_sum_of_all(thread, row0 + 16u, token0 + 48u);
        coopStore(c22, &tile_out[own], 20u);
        put_sum_of_all(thread, row0 + 32u, token0 + 32u);
        coopStore(c23, &tile_out[own], 20u);
        put_sum_of_all(thread, row0 + 32u, token0 + 48u);
        coopStore(c32, &tile_out[own], 20u);
        put_sum_of_all(thread, row0 + 48u, token0 + 32u);
        coopStore(c33, &tile_out[own], 20u);
        put_sum_of_all(thread, row0 + 48u, token0 + 48u);
    }
}
