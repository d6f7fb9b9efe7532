// Trits and int8 for gemm_coop_columns.wgsl. Needs `quarters.wgsl`, and coop_every_row.wgsl or coop_routed_rows.wgsl.
//
// Agrees with `sterna_kernels::gemm` bit for bit, as coop_ternary.wgsl says.
// Shapes: weights as coop_ternary.wgsl says; instead of q, activations [m, 2 · q_len] of eight f16 in the order in which they
// are multiplied, as quantize.wgsl stores them; out, or partial, as gemm_coop_few.wgsl says.

// Turns of 64 columns: those of one word in each vector of codes.
const TURNS: u32 = 4u;

// 256 columns: a vector of codes of two rows; and of one turn the activations of one token or two, which are followed by
// those of the next turn.
struct Chunk {
    w: array<vec4<u32>, 2>,
    x: array<vec4<u32>, 2>,
    y: array<vec4<u32>, 2>,
    x_at: u32,
    y_at: u32,
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
    let first = 32u * chunk + 2u * own;
    var next: Chunk;
    next.w[0] = fetch_w(row0 + line, chunk, own);
    next.w[1] = fetch_w(row0 + line + 32u, chunk, own);
    next.x_at = row_of(tile, line) * 2u * params.q_len + first;
    next.y_at = row_of(tile, line + 32u) * 2u * params.q_len + first;
    return with_activations(next);
}

fn with_activations(now: Chunk) -> Chunk {
    var next = now;
    next.x = array<vec4<u32>, 2>(q[now.x_at], q[now.x_at + 1u]);
    if TOKENS == 64u {
        next.y = array<vec4<u32>, 2>(q[now.y_at], q[now.y_at + 1u]);
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
    for (var i = 0u; i < 2u; i++) {
        tile_x[to + 2u * i] = vec4<f16>(pair_of(now.x[i].x), pair_of(now.x[i].y));
        tile_x[to + 2u * i + 1u] = vec4<f16>(pair_of(now.x[i].z), pair_of(now.x[i].w));
        if TOKENS == 64u {
            tile_x[to + 2u * i + 576u] = vec4<f16>(pair_of(now.y[i].x), pair_of(now.y[i].y));
            tile_x[to + 2u * i + 577u] = vec4<f16>(pair_of(now.y[i].z), pair_of(now.y[i].w));
        }
    }
    var later = now;
    later.w[0] = now.w[0].yzwx;
    later.w[1] = now.w[1].yzwx;
    later.turn += 1u;
    later.x_at += 8u;
    later.y_at += 8u;
    if later.turn == TURNS {
        return later;
    }
    return with_activations(later);
}
