// F16 weights and f32 activations for gemm_coop_columns.wgsl. Needs `floats_f16.wgsl` and `x_vectors.wgsl`.
//
// Agrees with `sterna_kernels::gemm` as float_gemm.wgsl does, except that activations are rounded to f16.
// Shapes: as float_gemv.wgsl, with m rows of x and out.

// Activations over it are f16, over the range that coop_sums_blocks.wgsl says.
const SHRINK: f32 = 64.0;

const TURNS: u32 = 1u;

@group(0) @binding(3) var<storage, read_write> out: array<f32>;

// 64 columns: half of a row of weights, and a quarter of a token's, or of two.
struct Chunk {
    w: array<vec4<u32>, 4>,
    x: array<vec4<f32>, 4>,
    y: array<vec4<f32>, 4>,
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
    return vec2<u32>(0u, (params.row_blocks + 1u) / 2u);
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

fn fetch_x(token: u32, quarter: u32) -> array<vec4<f32>, 4> {
    return array<vec4<f32>, 4>(
        x_at(token, quarter),
        x_at(token, quarter + 1u),
        x_at(token, quarter + 2u),
        x_at(token, quarter + 3u),
    );
}

fn fetch(tile: Tile, thread: u32, row0: u32, chunk: u32) -> Chunk {
    var next: Chunk;
    let eighth = chunk * 8u + thread % 2u * 4u;
    // Zeros beyond the row's end.
    if eighth < params.row_blocks * 4u {
        let first = stored_row(row0 + thread / 2u) * params.row_blocks * 4u + eighth;
        for (var i = 0u; i < 4u; i++) {
            next.w[i] = codes[first + i];
        }
    }
    let quarter = chunk * 16u + thread % 4u * 4u;
    next.x = fetch_x(row_of(tile, thread / 4u), quarter);
    if TOKENS == 64u {
        next.y = fetch_x(row_of(tile, thread / 4u + 32u), quarter);
    }
    return next;
}

fn stage(thread: u32, now: Chunk) -> Chunk {
    let to_w = thread / 2u * 18u + thread % 2u * 8u;
    let to_x = thread / 4u * 18u + thread % 4u * 4u;
    for (var i = 0u; i < 4u; i++) {
        tile_w[to_w + 2u * i] = vec4<f16>(pair_of(now.w[i].x), pair_of(now.w[i].y));
        tile_w[to_w + 2u * i + 1u] = vec4<f16>(pair_of(now.w[i].z), pair_of(now.w[i].w));
        tile_x[to_x + i] = vec4<f16>(now.x[i] / SHRINK);
        if TOKENS == 64u {
            tile_x[to_x + 576u + i] = vec4<f16>(now.y[i] / SHRINK);
        }
    }
    return now;
}
