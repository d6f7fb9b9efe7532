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

// Vectors of a token's 64 columns: of each quarter of a block half.
const X_PARTS: u32 = 4u;

// How many times 64 columns a row has.
fn chunks() -> u32 {
    return params.row_blocks * 2u;
}

// All of a chunk, whichever half: they share words.
fn fetch_w(row: u32, chunk: u32, half: u32) -> Weights {
    let stored = matrix_begin() + stored_row(row);
    return Weights(codes[stored * params.row_blocks * 2u + chunk]);
}

// Where one of the parts of a token's first chunk is, and how much further that of another chunk.
fn x_begin(token: u32, part: u32) -> u32 {
    return token * params.q_len + 2u * part;
}

fn x_of_chunk(chunk: u32) -> u32 {
    return chunk / 2u * 8u + chunk % 2u;
}

// Eight vectors from `to` on: two quarters.
fn stage_w(to: u32, f: Weights, half: u32) {
    for (var i = 0u; i < 4u; i++) {
        tile_w[to + i] = quarter_of(f.w[i], 2u * half);
        tile_w[to + 4u + i] = quarter_of(f.w[i], 2u * half + 1u);
    }
}

// Four vectors, of the line that begins at `first`.
fn stage_x(first: u32, part: u32, x: vec4<u32>) {
    for (var i = 0u; i < 4u; i++) {
        tile_x[first + 4u * part + i] = halves_of(x[i]);
    }
}
