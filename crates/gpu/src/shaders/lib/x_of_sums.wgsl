// Rows in f32, as x_vectors.wgsl has them, to which the parts of a product are added first, in their order, as gemm_coop_sum.wgsl
// does. Needs `sums_*.wgsl`.
// Shapes: x [n_rows, k]; partial [ADDED, n_rows, k].

@group(0) @binding(2) var<storage, read_write> x: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read> partial: array<vec4<f32>>;

// How many parts there are.
override ADDED: u32 = 1u;

// Elements 4i to 4i + 3 of a row; zeros beyond its end.
fn x_at(token: u32, i: u32) -> vec4<f32> {
    if 4u * i >= params.k {
        return vec4<f32>();
    }
    let old = x[(params.x_offset + token * params.x_stride) / 4u + i];
    var sums = vec4<f32>();
    for (var part = 0u; part < ADDED; part++) {
        sums += partial[(part * params.n_rows + token) * (params.k / 4u) + i];
    }
    return old + result_of_sums(token, 4u * i, sums);
}

// Stores what x_at has given.
fn keep_x(token: u32, i: u32, value: vec4<f32>) {
    if has_row && 4u * i < params.k {
        x[(params.x_offset + token * params.x_stride) / 4u + i] = value;
    }
}
