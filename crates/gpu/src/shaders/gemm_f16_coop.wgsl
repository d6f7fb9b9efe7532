// out[t, i] ← Σ_j w[i, j] · x[t, j], for F16 weights of many rows, and rows t that aren't many, by cooperative matrices
//
// Agrees with `sterna_kernels::gemm` as float_gemm.wgsl does, except that activations are rounded to f16.
// Shapes: as float_gemv.wgsl, with m rows of out; x as halve.wgsl stores it. Needs `floats_f16.wgsl` and `half_range.wgsl`.
// Workgroups of 128, four subgroups of 32: 64 rows of weights by TOKENS of activations. A chunk of columns is loaded while
// the one before is multiplied in turns, 64 columns each; of these, each subgroup multiplies half, for half of the rows: the
// sums of both halves are added up at the end.

// 32 or 64.
override TOKENS: u32 = 64u;
// Turns of a chunk.
const TURNS: u32 = 2u;

@group(0) @binding(2) var<storage, read> halves: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(1) @binding(0) var<uniform> params: Params;

// Of 64 rows, and of 64 tokens, 64 columns as f16: sixteen vectors, in lines eighteen apart, so that lines are in
// different banks.
var<workgroup> tile_w: array<vec4<f16>, 1152>;
var<workgroup> tile_x: array<vec4<f16>, 1152>;
// Of each subgroup, a matrix of 16 tokens by 16 rows, tokens 20 apart.
var<workgroup> tile_out: array<f32, 1280>;

// Of the columns of each turn eight of each of four rows of weights, and of two tokens or four: neighbours read what is side
// by side.
struct Chunk {
    w: array<vec4<u32>, 8>,
    x: array<vec4<u32>, 8>,
}

fn fetch(thread: u32, row0: u32, token0: u32, chunk: u32) -> Chunk {
    let line = thread / 8u;
    var next: Chunk;
    for (var turn = 0u; turn < TURNS; turn++) {
        let eighth = (chunk * TURNS + turn) * 8u + thread % 8u;
        // Zeros beyond the row's end.
        let has_weights = eighth < params.row_blocks * 4u;
        for (var i = 0u; i < 4u; i++) {
            if has_weights {
                next.w[4u * turn + i] = codes[stored_row(row0 + line + 16u * i) * params.row_blocks * 4u + eighth];
            }
            if i < TOKENS / 16u {
                // Beyond the last token, any.
                let token = min(token0 + line + 16u * i, params.m - 1u);
                next.x[4u * turn + i] = halves[token * 2u * params.q_len + eighth];
            }
        }
    }
    return next;
}

// Puts the columns of the first turn into shared memory; those of the next become the first.
fn stage(thread: u32, now: Chunk) -> Chunk {
    let first = thread / 8u * 18u + thread % 8u * 2u;
    var later = now;
    for (var i = 0u; i < 4u; i++) {
        let to = first + 288u * i;
        let w = now.w[i];
        tile_w[to] = vec4<f16>(pair_of(w.x), pair_of(w.y));
        tile_w[to + 1u] = vec4<f16>(pair_of(w.z), pair_of(w.w));
        if i < TOKENS / 16u {
            let x = now.x[i];
            tile_x[to] = vec4<f16>(pair_of(x.x), pair_of(x.y));
            tile_x[to + 1u] = vec4<f16>(pair_of(x.z), pair_of(x.w));
        }
        later.w[i] = now.w[4u + i];
        later.x[i] = now.x[4u + i];
    }
    return later;
}

// Adds up the matrices of both halves of the columns, whose first result is of row `row` and of token `token`, or of 32 rows
// further, and stores that.
fn put_sums(thread: u32, row: u32, token: u32) {
    workgroupBarrier();
    let later = thread / 64u;
    for (var i = thread % 64u; i < 128u; i += 64u) {
        let t = i / 8u;
        let r = i % 8u * 2u;
        let at = later * 320u + t * 20u + r;
        let sums = vec2<f32>(tile_out[at] + tile_out[at + 640u], tile_out[at + 1u] + tile_out[at + 641u]);
        if token + t < params.m {
            put(
                params.out_offset + (token + t) * params.out_stride,
                params.first + row + 32u * later + r,
                params.first + params.n,
                SHRINK * sums,
            );
        }
    }
    workgroupBarrier();
}

@compute @workgroup_size(128)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
) {
    // Workgroups of the same weights follow each other, so that caches have them.
    let row0 = group.y * 64u;
    let token0 = group.x * TOKENS;
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
    let n_chunks = (params.row_blocks + 2u * TURNS - 1u) / (2u * TURNS);
    // This subgroup's rows, and its half of the columns.
    let r = subgroup % 2u * 576u;
    let half = subgroup / 2u * 8u;
    var next = fetch(thread, row0, token0, 0u);
    for (var chunk = 0u; chunk < n_chunks; chunk++) {
        var now = next;
        next = fetch(thread, row0, token0, min(chunk + 1u, n_chunks - 1u));
        for (var turn = 0u; turn < TURNS; turn++) {
            now = stage(thread, now);
            workgroupBarrier();
            for (var k = half; k < half + 8u; k += 4u) {
                let x0 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[k], 18u);
                let x1 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[288u + k], 18u);
                let w0 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[r + k], 18u);
                c00 = coopMultiplyAdd(w0, x0, c00);
                c01 = coopMultiplyAdd(w0, x1, c01);
                let w1 = coopLoadT<coop_mat16x16<f16, A>>(&tile_w[r + 288u + k], 18u);
                c10 = coopMultiplyAdd(w1, x0, c10);
                c11 = coopMultiplyAdd(w1, x1, c11);
                if TOKENS == 64u {
                    let x2 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[576u + k], 18u);
                    let x3 = coopLoad<coop_mat16x16<f16, B>>(&tile_x[864u + k], 18u);
                    c02 = coopMultiplyAdd(w0, x2, c02);
                    c03 = coopMultiplyAdd(w0, x3, c03);
                    c12 = coopMultiplyAdd(w1, x2, c12);
                    c13 = coopMultiplyAdd(w1, x3, c13);
                }
            }
            workgroupBarrier();
        }
    }
    let own = subgroup * 320u;
    coopStore(c00, &tile_out[own], 20u);
    put_sums(thread, row0, token0);
    coopStore(c10, &tile_out[own], 20u);
    put_sums(thread, row0 + 16u, token0);
    coopStore(c01, &tile_out[own], 20u);
    put_sums(thread, row0, token0 + 16u);
    coopStore(c11, &tile_out[own], 20u);
    put_sums(thread, row0 + 16u, token0 + 16u);
    if TOKENS == 64u {
        coopStore(c02, &tile_out[own], 20u);
        put_sums(thread, row0, token0 + 32u);
        coopStore(c12, &tile_out[own], 20u);
        put_sums(thread, row0 + 16u, token0 + 32u);
        coopStore(c03, &tile_out[own], 20u);
        put_sums(thread, row0, token0 + 48u);
        coopStore(c13, &tile_out[own], 20u);
        put_sums(thread, row0 + 16u, token0 + 48u);
    }
}
