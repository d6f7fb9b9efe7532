// Weights of a norm, of rows of any length.

@group(0) @binding(1) var<storage, read> weight: array<f32>;

// Weights 4i to 4i + 3; the last one beyond the end of a row.
fn weights_at(i: u32) -> vec4<f32> {
    let last = max(params.k, 1u) - 1u;
    return vec4<f32>(
        weight[min(4u * i, last)],
        weight[min(4u * i + 1u, last)],
        weight[min(4u * i + 2u, last)],
        weight[min(4u * i + 3u, last)],
    );
}
