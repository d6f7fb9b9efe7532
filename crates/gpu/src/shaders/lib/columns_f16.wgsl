// F16 weights and f16 activations for gemm_coop_columns.wgsl. Needs `floats_f16.wgsl` and `half_range.wgsl`.
//
// Agrees with `sterna_kernels::gemm` as float_gemm.wgsl does, except that activations are rounded to f16.
// Shapes: as float_gemv.wgsl, with m rows of out; x as halve.wgsl stores it.

// Turns of 64 columns: as many as there are registers for.
override TURNS: u32 = select(1u, 2u, TOKENS == 32u);

@group(0) @binding(2) var<storage, read> halves: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

// Of the columns of each turn half of a row of weights, and a quarter of a token's, or of two in a single turn.
struct Chunk {
    w: array<vec4<u32>, 8>,
    x: array<vec4<u32>, 4>,
}

// Rows of activations from `token` on.
struct Tile {
    token: u32,
}

// Workgroups of the same weights follow each other, so that caches have them.
fn rows_of(group: vec3<u32>) -> u32 {
    return group.y;
}

fn tile_of(group: vec3<u32>) -> Tile {
    return Tile(group.x * TOKENS);
}

fn chunks_of(tile: Tile) -> vec2<u32> {
    return vec2<u32>(0u, (params.row_blocks + 2u * TURNS - 1u) / (2u * TURNS));
}

// The row of activations of a line of the tile; beyond the last, any.
fn row_of(tile: Tile, line: u32) -> u32 {
    return min(tile.token + line, params.m - 1u);
}

// Stores the sums of rows `row` and `row + 1` of weights with a line of the tile.
fn put_line(tile: Tile, line: u32, row: u32, sums: vec2<f32>) {
    let token = tile.token + line;
    if token < params.m {
        put(
            params.out_offset + token * params.out_stride,
            params.first + row,
            params.first + params.n,
            SHRINK * sums,
        );
    }
}

fn fetch(tile: Tile, thread: u32, row0: u32, chunk: u32) -> Chunk {
    let stored = stored_row(row0 + thread / 2u) * params.row_blocks * 4u;
    let lines = vec2<u32>(row_of(tile, thread / 4u), row_of(tile, thread / 4u + 32u));
    let tokens = lines * 2u * params.q_len;
    var next: Chunk;
    for (var turn = 0u; turn < TURNS; turn++) {
        let columns = chunk * TURNS + turn;
        let eighth = columns * 8u + thread % 2u * 4u;
        // Zeros beyond the row's end.
        if eighth < params.row_blocks * 4u {
            for (var i = 0u; i < 4u; i++) {
                next.w[4u * turn + i] = codes[stored + eighth + i];
            }
        }
        let quarter = columns * 8u + thread % 4u * 2u;
        next.x[2u * turn] = halves[tokens.x + quarter];
        next.x[2u * turn + 1u] = halves[tokens.x + quarter + 1u];
    }
    if TOKENS == 64u {
        let quarter = chunk * 8u + thread % 4u * 2u;
        next.x[2] = halves[tokens.y + quarter];
        next.x[3] = halves[tokens.y + quarter + 1u];
    }
    return next;
}

// Eight values of activations.
fn put_eight(to: u32, words: vec4<u32>) {
    tile_x[to] = vec4<f16>(pair_of(words.x), pair_of(words.y));
    tile_x[to + 1u] = vec4<f16>(pair_of(words.z), pair_of(words.w));
}

// The columns of the first turn; those of the next become the first.
fn stage(thread: u32, now: Chunk) -> Chunk {
    let to_w = thread / 2u * 18u + thread % 2u * 8u;
    let to_x = thread / 4u * 18u + thread % 4u * 4u;
    var later = now;
    for (var i = 0u; i < 4u; i++) {
        tile_w[to_w + 2u * i] = vec4<f16>(pair_of(now.w[i].x), pair_of(now.w[i].y));
        tile_w[to_w + 2u * i + 1u] = vec4<f16>(pair_of(now.w[i].z), pair_of(now.w[i].w));
        later.w[i] = now.w[4u + i];
    }
    for (var i = 0u; i < 2u; i++) {
        put_eight(to_x + 2u * i, now.x[i]);
        if TOKENS == 64u {
            put_eight(to_x + 576u + 2u * i, now.x[2u + i]);
        }
        later.x[i] = now.x[2u + i];
    }
    return later;
}
