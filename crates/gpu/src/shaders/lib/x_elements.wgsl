// Activations in f32, with rows at any offset.

@group(0) @binding(2) var<storage, read> x: array<f32>;

fn x_element(at: u32, column: u32) -> f32 {
    if column >= params.k {
        return 0.0;
    }
    return x[at + column];
}

// Elements 4i to 4i + 3 of a row; zeros beyond its end.
fn x_at(token: u32, i: u32) -> vec4<f32> {
    let at = params.x_offset + token * params.x_stride;
    return vec4<f32>(
        x_element(at, 4u * i),
        x_element(at, 4u * i + 1u),
        x_element(at, 4u * i + 2u),
        x_element(at, 4u * i + 3u),
    );
}
