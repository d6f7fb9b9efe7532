// out[t] ← factor · table[ids[t]], for the ids whose rows this piece of the table has
//
// Agrees with `sterna_kernels::quant::decode_row`, except for products and differences that a device may
// fuse.
// Shapes: the table as `floats_*.wgsl` or `codes_*.wgsl` says; ids u32, each a stride behind the one before; out rows of k f32.
// Eight elements per invocation; workgroups of 64, as many as a row takes, by rows.

@group(0) @binding(2) var<storage, read> ids: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

struct Params {
    n: u32,
    first: u32,
    begin: u32,
    k: u32,
    row_blocks: u32,
    ids_offset: u32,
    ids_stride: u32,
    out_offset: u32,
    out_stride: u32,
    factor: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let eighth = group.x * 64u + thread;
    let row = ids[params.ids_offset + group.y * params.ids_stride] - params.first;
    // Rows of earlier pieces wrap around to numbers that are too large.
    if row >= params.n || eighth * 8u >= params.k {
        return;
    }
    let values = eight_floats(params.begin + row, eighth);
    let base = params.out_offset + group.y * params.out_stride + eighth * 8u;
    for (var i = 0u; i < min(8u, params.k - eighth * 8u); i++) {
        out[base + i] = params.factor * values[i / 4u][i % 4u];
    }
}
