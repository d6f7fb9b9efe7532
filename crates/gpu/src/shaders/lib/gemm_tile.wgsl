// The results of a workgroup of 256, of 64 rows of weights and 64 of activations: invocation 16y + x has
// rows 2x, 2x + 1, 32 + 2x and 33 + 2x, and tokens y, 16 + y, 32 + y and 48 + y.
fn put_tile(row0: u32, token0: u32, x: u32, y: u32, sums: array<vec4<f32>, 4>) {
    for (var t = 0u; t < 4u; t++) {
        let token = token0 + t * 16u + y;
        if token >= params.m {
            continue;
        }
        let base = params.out_offset + token * params.out_stride;
        let i = params.first + row0 + 2u * x;
        put(base, i, params.first + params.n, sums[t].xy);
        put(base, i + 32u, params.first + params.n, sums[t].zw);
    }
}
