// Parameters of two products of the same rows side by side: those of linear_params.wgsl, and what is the second's own.
struct Params {
    n: u32,
    first: u32,
    begin: u32,
    k: u32,
    row_blocks: u32,
    q_len: u32,
    runs: u32,
    token: u32,
    m: u32,
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    out_stride: u32,
    eps: f32,
    parts: u32,
    second_n: u32,
    second_begin: u32,
    second_out_offset: u32,
    // Workgroups of the first product.
    first_groups: u32,
}

// The row of the buffers that result i of this piece comes from; beyond the last, any existing row.
fn stored_row(i: u32) -> u32 {
    return params.begin + min(i, params.n - 1u);
}
