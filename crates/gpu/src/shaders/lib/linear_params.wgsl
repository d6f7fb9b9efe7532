// What all kernels of linear layers are told.
struct Params {
    // Rows of this piece of the matrix, and the number of its first.
    n: u32,
    first: u32,
    // Columns, and blocks of a row of weights.
    k: u32,
    row_blocks: u32,
    // Vectors of 16 int8, and runs of 32, in a row of rounded activations; the latter without padding.
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
}
