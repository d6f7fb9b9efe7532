// Trits and int8 for gemm_coop.wgsl. Needs `quarters.wgsl`.
//
// Agrees with `sterna_kernels::gemm` for ternary weights bit for bit: int8 and quarters from 1 to 1½ are
// exact in f16, and so are sums in f32 while 4 · 1½ · 127 · k is less than 2^24, which k up to 22000 is.
// Shapes: codes [rows, 2 · blocks] of 16 bytes, the working layout of `sterna_kernels::quant::ternary`;
// scales [rows] f32; q [m, q_len] of 16 int8; steps [m] of scale and sum.

// Sixteen bytes of a row: 64 columns, half a block.
struct Weights {
    w: vec4<u32>,
}

// Of two quarters of a block.
struct Activations {
    x0: vec4<u32>,
    x1: vec4<u32>,
}

// How many times 64 columns a row has.
fn chunks() -> u32 {
    return params.row_blocks * 2u;
}

// All of a chunk, whichever half: they share words.
fn fetch_w(row: u32, chunk: u32, half: u32) -> Weights {
    let stored = matrix_begin() + stored_row(row);
    return Weights(codes[stored * params.row_blocks * 2u + chunk]);
}

// Half `half` of a chunk.
fn fetch_x(token: u32, chunk: u32, half: u32) -> Activations {
    let at = token * params.q_len + chunk / 2u * 8u + half * 4u + chunk % 2u;
    return Activations(q[at], q[at + 2u]);
}

// Eight vectors from `to` on: two quarters.
fn stage_w(to: u32, f: Weights, half: u32) {
    for (var i = 0u; i < 4u; i++) {
        tile_w[to + i] = quarter_of(f.w[i], 2u * half);
        tile_w[to + 4u + i] = quarter_of(f.w[i], 2u * half + 1u);
    }
}

// Likewise.
fn stage_x(to: u32, f: Activations) {
    for (var i = 0u; i < 4u; i++) {
        tile_x[to + i] = halves_of(f.x0[i]);
        tile_x[to + 4u + i] = halves_of(f.x1[i]);
    }
}
