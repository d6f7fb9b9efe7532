// Rows of f32 as f16, which products of floats by cooperative matrices take
//
// The values of x over SHRINK, which is a power of two, to the nearest f16.
// Shapes: x [n_rows, k], rows at multiples of four elements; halves [n_rows, padded / 8] of eight values over SHRINK, zeros beyond the
// row's end. `padded` is a multiple of 256. Eight values per invocation; workgroups of 64, as many as a row takes, by rows.
// Needs `half_range.wgsl`.

@group(0) @binding(0) var<storage, read_write> halves: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;

struct Params {
    k: u32,
    padded: u32,
    x_offset: u32,
    x_stride: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// The f16 of elements 4i to 4i + 3 of a row.
fn halves_of(row: u32, i: u32) -> vec2<u32> {
    if 4u * i >= params.k {
        return vec2<u32>();
    }
    let v = x[(params.x_offset + row * params.x_stride) / 4u + i] / SHRINK;
    return vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw));
}

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let i = group.x * 64u + thread;
    let row = group.y;
    let words = params.padded / 8u;
    if i < words {
        halves[row * words + i] = vec4<u32>(
            halves_of(row, 2u * i),
            halves_of(row, 2u * i + 1u),
        );
    }
}
