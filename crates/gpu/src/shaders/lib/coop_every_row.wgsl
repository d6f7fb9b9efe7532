// All rows of activations, and parts of the columns, for gemm_coop_few.wgsl and gemm_coop_columns.wgsl.
// coop_routed_rows.wgsl has the same for the rows that experts are sent.

@group(0) @binding(5) var<storage, read_write> partial: array<f32>;

// Rows of activations from `token` on, and a part of the columns.
struct Tile {
    token: u32,
    part: u32,
}

fn find_tile(y: u32) -> Tile {
    return Tile(y / params.parts * TOKENS, y % params.parts);
}

// The chunks of 64 columns, from the first to before the last.
fn chunks_of(tile: Tile) -> vec2<u32> {
    let each = (chunks() + params.parts - 1u) / params.parts;
    return min(vec2<u32>(tile.part * each, tile.part * each + each), vec2<u32>(chunks()));
}

// The row of activations of a line of the tile; beyond the last, any.
fn row_of(tile: Tile, line: u32) -> u32 {
    return min(tile.token + line, params.m - 1u);
}

// Stores the sums of rows `row` and `row + 1` of weights with a line of the tile.
fn put_line(tile: Tile, line: u32, row: u32, sums: vec2<f32>) {
    let token = tile.token + line;
    if token >= params.m {
        return;
    }
    if params.parts == 1u {
        put(
            params.out_offset + token * params.out_stride,
            params.first + row,
            params.first + params.n,
            result_of(row, token, sums),
        );
        return;
    }
    let at = (tile.part * params.m + token) * params.n + row;
    if row < params.n {
        partial[at] = sums.x;
    }
    if row + 1u < params.n {
        partial[at + 1u] = sums.y;
    }
}
