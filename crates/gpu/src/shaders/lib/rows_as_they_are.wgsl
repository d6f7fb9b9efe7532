// Rows of queries, or of queries, keys and values, for attention_split_kv.wgsl, and the weights of their norms.

@group(0) @binding(0) var<storage, read> q: array<f32>;
@group(0) @binding(3) var<storage, read> q_weight: array<f32>;
@group(0) @binding(4) var<storage, read> k_weight: array<f32>;

fn input_at(i: u32) -> f32 {
    return q[i];
}

fn q_weight_at(i: u32) -> f32 {
    return q_weight[i];
}

fn k_weight_at(i: u32) -> f32 {
    return k_weight[i];
}
