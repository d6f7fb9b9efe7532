// Activations in f32, with rows at multiples of four elements.

@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;

// Elements 4i to 4i + 3 of a row; zeros beyond its end.
fn x_at(token: u32, i: u32) -> vec4<f32> {
    // No branch around the load: several are issued together.
    let value = x[(params.x_offset + token * params.x_stride) / 4u + min(i, (max(params.k, 1u) - 1u) / 4u)];
    return select(vec4<f32>(), value, 4u * i < params.k);
}
