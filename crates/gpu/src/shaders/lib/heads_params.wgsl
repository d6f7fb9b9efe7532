// Parameters of heads.wgsl and heads_in_vectors.wgsl.
struct Params {
    // The most rows of a sequence.
    n_rows: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    // Pairs that are rotated.
    half: u32,
    offset: u32,
    stride: u32,
    // From one query of a row to the next.
    q_step: u32,
    // Of the keys, and of the values, within a row.
    keys: u32,
    values: u32,
    sequences: u32,
    pages: u32,
    page_stride: u32,
    row_len: u32,
    row_scales: u32,
    scales: u32,
    // Positions in the table of angles.
    n_angles: u32,
    eps: f32,
}
