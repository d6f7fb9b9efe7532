// out[t, i] ← the sums of gemm_coop_few.wgsl or gemm_coop_columns.wgsl over all parts of the columns
//
// Shapes: partial [parts, m, n] f32; out f32. Parts are added in their order. It has all buffers of
// these, and needs some.
// An invocation for two rows of a token.

@group(0) @binding(5) var<storage, read> partial: array<f32>;
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(@builtin(local_invocation_index) thread: u32, group: Group) {
    let pairs = (params.n + 1u) / 2u;
    let i = group_of(group) * 64u + thread;
    if i >= pairs * params.m {
        return;
    }
    let token = i / pairs;
    let row = i % pairs * 2u;
    var sums = vec2<f32>();
    for (var part = 0u; part < params.parts; part++) {
        let at = (part * params.m + token) * params.n + row;
        sums.x += partial[at];
        if row + 1u < params.n {
            sums.y += partial[at + 1u];
        }
    }
    put(
        params.out_offset + token * params.out_stride,
        params.first + row,
        params.first + params.n,
        result_of(row, token, sums),
    );
}
