// Input and output in separate buffers.
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
@group(0) @binding(2) var<storage, read> x: array<f32>;

fn load(i: u32) -> f32 {
    return x[i];
}
