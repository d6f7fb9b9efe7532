// out[t, i] ← Σ_j w[i, j] · x[t, j], for few rows t
//
// Agrees with `sterna_kernels::gemm` for floats, except for the order of the sum, and for the bits that the
// CPU drops of activations with F16 and BF16 weights.
// Shapes: weights as `floats_*.wgsl` says; x rows of k f32; out f32. LANES invocations per two rows;
// workgroups of WG. With NORM rows are normalised first, by weights [k]: each segment has the sum of squares of its row,
// which the product is divided by.

override NORM: u32 = 0u;
// Rows of activations, at most 8.
override TOKENS: u32 = 1u;

@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<storage, read> norm: array<vec4<f32>>;

@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    find_matrix(at, group);
    let eighths = share_of((params.k + 7u) / 8u);
    let row = 2u * (place_of(group) * (WG / LANES) + thread / LANES);
    let a = matrix_begin() + stored_row(row);
    let b = matrix_begin() + stored_row(row + 1u);
    var sums = array<vec2<f32>, 8>();
    var squares = array<f32, 8>();
    for (var i = thread % LANES; i < eighths; i += LANES) {
        let w0 = eight_floats(a, i);
        let w1 = eight_floats(b, i);
        for (var t = 0u; t < TOKENS; t++) {
            var x0 = x_at(row_in(t), 2u * i);
            var x1 = x_at(row_in(t), 2u * i + 1u);
            if NORM == 1u {
                squares[t] += dot(x0, x0) + dot(x1, x1);
                x0 *= norm[2u * i];
                // Beyond the end of the row x is zero.
                x1 *= norm[min(2u * i + 1u, (params.k - 1u) / 4u)];
            }
            sums[t] += vec2<f32>(
                dot(w0[0], x0) + dot(w0[1], x1),
                dot(w1[0], x0) + dot(w1[1], x1),
            );
        }
    }
    for (var t = 0u; t < TOKENS; t++) {
        var sum = segment_sum_f32(at, sums[t]);
        if NORM == 1u {
            let mean = segment_sum_f32(at, vec2<f32>(squares[t], 0.0)).x / f32(params.k);
            sum *= 1.0 / sqrt(mean + params.eps);
        }
        if thread % LANES == 0u && row < share_of(params.n) {
            let base = params.out_offset + row_out(t) * params.out_stride;
            put(base, params.first + row, params.first + params.n, sum);
        }
    }
}
