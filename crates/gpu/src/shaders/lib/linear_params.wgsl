// Parameters of all kernels of linear layers.
struct Params {
    // Rows of this piece of the matrix, the number of its first, and its offset in the buffers.
    n: u32,
    first: u32,
    begin: u32,
    // Columns, and blocks of a row of weights.
    k: u32,
    row_blocks: u32,
    // Vectors of 16 int8, and runs of 32, in a row of quantized activations; the latter without padding.
    q_len: u32,
    runs: u32,
    // The first row of activations, and how many there are.
    token: u32,
    m: u32,
    // Where rows of f32 activations begin, in elements.
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    out_stride: u32,
    // What is added to the mean square, where the kernel normalises.
    eps: f32,
    // How many parts of the columns are summed apart.
    parts: u32,
}

// The row of the buffers that result i of this piece comes from; beyond the last, any existing row. The
// results of gated layers alternate: they come from the first half of the rows and from the second.
fn stored_row(i: u32) -> u32 {
    let row = min(i, params.n - 1u);
    if EPILOGUE == 2u {
        return params.begin + row / 2u + row % 2u * (params.n / 2u);
    }
    return params.begin + row;
}
