// Trits and int8 for gemm_coop_columns.wgsl. Needs `quarters.wgsl`, and coop_every_row.wgsl or coop_routed_rows.wgsl.
//
// Agrees with `sterna_kernels::gemm` bit for bit, as coop_ternary.wgsl says.
// Shapes: weights as coop_ternary.wgsl says; instead of q, activations [m, 2 · q_len] of eight f16 in the order in which they
// are multiplied, as quantize.wgsl stores them; out, or partial, as gemm_coop_few.wgsl says.

// Turns of 64 columns: those of one word in each vector of codes.
const TURNS: u32 = 4u;

// 256 columns: a vector of codes of two rows; and of one turn a vector of activations of each of two tokens or four, as
// neighbours read what is side by side, and where it is.
struct Chunk {
    w: array<vec4<u32>, 2>,
    x: array<vec4<u32>, 4>,
    x_at: array<u32, 4>,
    turn: u32,
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

// Beyond the row's end, any: activations are zeros there.
fn fetch_w(row: u32, chunk: u32, own: u32) -> vec4<u32> {
    let first = (matrix_begin() + stored_row(row)) * params.row_blocks * 2u;
    return codes[first + min(4u * chunk + own, 2u * params.row_blocks - 1u)];
}

fn fetch(tile: Tile, thread: u32, row0: u32, chunk: u32) -> Chunk {
    let line = thread / 4u;
    let own = thread % 4u;
    var next: Chunk;
    next.w[0] = fetch_w(row0 + line, chunk, own);
    next.w[1] = fetch_w(row0 + line + 32u, chunk, own);
    for (var i = 0u; i < TOKENS / 16u; i++) {
        let token = row_of(tile, thread / 8u + 16u * i);
        next.x_at[i] = token * 2u * params.q_len + 32u * chunk + thread % 8u;
    }
    return with_activations(next);
}

fn with_activations(now: Chunk) -> Chunk {
    var next = now;
    for (var i = 0u; i < TOKENS / 16u; i++) {
        next.x[i] = q[now.x_at[i]];
    }
    return next;
}

// The columns of the first words; the next become the first.
fn stage(thread: u32, now: Chunk) -> Chunk {
    let to = thread / 4u * 18u + thread % 4u * 4u;
    for (var i = 0u; i < 4u; i++) {
        tile_w[to + i] = quarter_of(now.w[0].x, i);
        tile_w[to + i + 576u] = quarter_of(now.w[1].x, i);
    }
    for (var i = 0u; i < TOKENS / 16u; i++) {
        let x = now.x[i];
        let first = (thread / 8u + 16u * i) * 18u + thread % 8u * 2u;
        tile_x[first] = vec4<f16>(pair_of(x.x), pair_of(x.y));
        tile_x[first + 1u] = vec4<f16>(pair_of(x.z), pair_of(x.w));
    }
    var later = now;
    later.w[0] = now.w[0].yzwx;
    later.w[1] = now.w[1].yzwx;
    later.turn += 1u;
    for (var i = 0u; i < TOKENS / 16u; i++) {
        later.x_at[i] += 8u;
    }
    if later.turn == TURNS {
        return later;
    }
    return with_activations(later);
}
