// The rows of activations that experts are sent, for gemm_coop_few.wgsl and gemm_coop_columns.wgsl, as
// group_routes.wgsl has ordered them. Needs expert_matrix.wgsl.

@group(0) @binding(5) var<storage, read> groups: array<u32>;

// Routes to one expert: where they are among the ordered ones, and how many.
struct Tile {
    first: u32,
    len: u32,
}

// There are `parts` tiles.
fn find_tile(y: u32) -> Tile {
    own_expert = groups[3u * y] - FIRST_EXPERT;
    return Tile(3u * params.parts + groups[3u * y + 1u], groups[3u * y + 2u]);
}

// All chunks of 64 columns, or none of an expert in another piece.
fn chunks_of(tile: Tile) -> vec2<u32> {
    return vec2<u32>(0u, share_of(select(0u, chunks(), tile.len > 0u)));
}

fn row_of(tile: Tile, line: u32) -> u32 {
    return groups[tile.first + min(line, max(tile.len, 1u) - 1u)] / ROUTES_PER_ROW;
}

fn put_line(tile: Tile, line: u32, row: u32, sums: vec2<f32>) {
    if line >= share_of(tile.len) {
        return;
    }
    let route = groups[tile.first + line];
    put(
        params.out_offset + route * params.out_stride,
        params.first + row,
        params.first + params.n,
        result_of(row, route / ROUTES_PER_ROW, sums),
    );
}
