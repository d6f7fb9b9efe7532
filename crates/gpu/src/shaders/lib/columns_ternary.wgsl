// Trits and int8 for gemm_coop_columns.wgsl. Needs `quarters.wgsl`, and coop_every_row.wgsl or coop_routed_rows.wgsl.
//
// Agrees with `sterna_kernels::gemm` bit for bit, as coop_ternary.wgsl says.
// Shapes: weights and activations as coop_ternary.wgsl says; out, or partial, as gemm_coop_few.wgsl says.

// Turns of 64 columns: those of one word in each vector of codes.
const TURNS: u32 = 4u;

// 256 columns: a vector of codes of two rows, and what that is multiplied with of one token or two, from each quarter of
// its block half.
struct Chunk {
    w: array<vec4<u32>, 2>,
    x: array<vec4<u32>, 4>,
    y: array<vec4<u32>, 4>,
}

fn rows_of(group: vec3<u32>) -> u32 {
    return group.x;
}

fn tile_of(group: vec3<u32>) -> Tile {
    return find_tile(group.y);
}

// How many times 256 columns a row has.
fn chunks() -> u32 {
    return (params.row_blocks + 1u) / 2u;
}

// Which quarters an invocation exchanges, so that neighbours write to different banks.
fn swap_of(thread: u32) -> u32 {
    return thread / 8u % 2u;
}

// Beyond the row's end, any: activations are zeros there.
fn fetch_w(row: u32, chunk: u32, own: u32) -> vec4<u32> {
    let first = (matrix_begin() + stored_row(row)) * params.row_blocks * 2u;
    return codes[first + min(4u * chunk + own, 2u * params.row_blocks - 1u)];
}

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

fn fetch(tile: Tile, thread: u32, row0: u32, chunk: u32) -> Chunk {
    let line = thread / 4u;
    let own = thread % 4u;
    let swap = swap_of(thread);
    var next: Chunk;
    next.w[0] = fetch_w(row0 + line, chunk, own);
    next.w[1] = fetch_w(row0 + line + 32u, chunk, own);
    next.x = fetch_x(row_of(tile, line), chunk, own, swap);
    if TOKENS == 64u {
        next.y = fetch_x(row_of(tile, line + 32u), chunk, own, swap);
    }
    return next;
}

// The columns of the first words; the next become the first.
fn stage(thread: u32, now: Chunk) -> Chunk {
    let swap = swap_of(thread);
    let to = thread / 4u * 18u + thread % 4u * 4u;
    var later = now;
    for (var i = 0u; i < 4u; i++) {
        let at = to + (i ^ swap);
        tile_w[at] = quarter_of(now.w[0].x, i ^ swap);
        tile_w[at + 576u] = quarter_of(now.w[1].x, i ^ swap);
        tile_x[at] = halves_of(now.x[i].x);
        later.x[i] = now.x[i].yzwx;
        if TOKENS == 64u {
            tile_x[at + 576u] = halves_of(now.y[i].x);
            later.y[i] = now.y[i].yzwx;
        }
    }
    later.w[0] = now.w[0].yzwx;
    later.w[1] = now.w[1].yzwx;
    return later;
}
