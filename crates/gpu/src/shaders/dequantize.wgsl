// out[t, i] ← q[t, i] / scale[t]: dequantizes rows
//
// Agrees with `sterna_kernels::gemm` for BitLinear layers whose weights are floats, bit for bit.
// Shapes: q [n_rows, padded / 4] words of four int8, steps [n_rows] of scale and sum, as quantize.wgsl writes
// them for SCALING 0; out rows of `width` f32. One word per invocation; workgroups of 64, as many as a row
// takes, by rows.

@group(0) @binding(0) var<storage, read> q: array<u32>;
@group(0) @binding(1) var<storage, read> steps: array<vec2<u32>>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

struct Params {
    width: u32,
    padded: u32,
    out_offset: u32,
    out_stride: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let i = group.x * 64u + thread;
    let row = group.y;
    let scale = bitcast<f32>(steps[row].x);
    if 4u * i >= params.width {
        return;
    }
    let word = q[row * params.padded / 4u + i];
    for (var j = 0u; j < min(4u, params.width - 4u * i); j++) {
        let code = bitcast<i32>(word << (24u - 8u * j)) >> 24u;
        let magnitude = divide(f32(abs(code)), scale);
        out[params.out_offset + row * params.out_stride + 4u * i + j] = select(magnitude, -magnitude, code < 0);
    }
}
