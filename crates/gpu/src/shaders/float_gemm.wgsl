// out[t, i] ← Σ_j w[i, j] · x[t, j], for many rows t
//
// Agrees with `sterna_kernels::gemm` as float_gemv.wgsl does.
// Shapes: as float_gemv.wgsl, with m rows of x and out.
// Workgroups of 256: 64 rows of weights by 64 of activations, four by four per invocation, 16 columns at a
// time.

@group(0) @binding(3) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

// By column: 16 of 64 rows, or tokens, 65 apart, so that a column's writers are in different banks.
var<workgroup> tile_w: array<f32, 1040>;
var<workgroup> tile_x: array<f32, 1040>;

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let row0 = group.x * 64u;
    let token0 = group.y * 64u;
    // See `gemm_tile.wgsl`.
    let x = thread % 16u;
    let y = thread / 16u;
    var sums = array<vec4<f32>, 4>();
    for (var column = 0u; column < params.k; column += 16u) {
        if thread < 128u {
            let r = thread / 2u;
            let w = eight_floats(stored_row(row0 + r), column / 8u + thread % 2u);
            for (var i = 0u; i < 8u; i++) {
                tile_w[(thread % 2u * 8u + i) * 65u + r] = w[i / 4u][i % 4u];
            }
        } else {
            let t = (thread - 128u) / 2u;
            let token = min(token0 + t, params.m - 1u);
            for (var i = 0u; i < 2u; i++) {
                let first = thread % 2u * 2u + i;
                let v = x_at(token, column / 4u + first);
                for (var j = 0u; j < 4u; j++) {
                    tile_x[(first * 4u + j) * 65u + t] = v[j];
                }
            }
        }
        workgroupBarrier();
        for (var j = 0u; j < 16u; j++) {
            let at = j * 65u;
            let w = vec4<f32>(
                tile_w[at + 2u * x],
                tile_w[at + 2u * x + 1u],
                tile_w[at + 2u * x + 32u],
                tile_w[at + 2u * x + 33u],
            );
            for (var t = 0u; t < 4u; t++) {
                sums[t] += w * tile_x[at + t * 16u + y];
            }
        }
        workgroupBarrier();
    }
    put_tile(row0, token0, x, y, sums);
}
