// Input and output in one buffer.
@group(0) @binding(1) var<storage, read_write> out: array<f32>;

fn load(i: u32) -> f32 {
    return out[i];
}
