// Where keys and values of sequences are: `sequences` has `params.page_stride` numbers of pages for each, from
// `params.pages` on. A page holds PAGE positions, a multiple of 32: rows [n_kv_heads, PAGE] of keys, and of
// values.

override PAGE: u32 = 64u;

// The page of position j of a sequence.
fn page_of(s: u32, j: u32) -> u32 {
    return sequences[params.pages + s * params.page_stride + min(j / PAGE, params.page_stride - 1u)];
}

// The row of position j, which is in this page.
fn row_of(page: u32, kv: u32, j: u32) -> u32 {
    return (page * params.n_kv_heads + kv) * PAGE + j % PAGE;
}
