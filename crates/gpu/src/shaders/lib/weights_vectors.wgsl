// Weights of a norm, of rows whose length is a multiple of four.

@group(0) @binding(1) var<storage, read> weight: array<vec4<f32>>;

// Weights 4i to 4i + 3; of a row's last four beyond its end.
fn weights_at(i: u32) -> vec4<f32> {
    return weight[min(i, (max(params.k, 1u) - 1u) / 4u)];
}
