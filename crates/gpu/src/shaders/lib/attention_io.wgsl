// What attention of many rows reads and writes: attention.wgsl, attention_coop.wgsl.

// 1: t attends to no positions after its own. 0: to those of all rows.
override CAUSAL: u32 = 1u;
// Whether each head has a score that has no value, in `sinks`.
override SINKS: u32 = 0u;

@group(0) @binding(0) var<storage, read> q: array<f32>;
@group(0) @binding(1) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> sequences: array<u32>;
@group(0) @binding(4) var<storage, read> sinks: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

struct Params {
    // The most rows of a sequence.
    n_rows: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    q_offset: u32,
    q_stride: u32,
    // From one query of a row to the next.
    q_step: u32,
    out_offset: u32,
    out_stride: u32,
    sequences: u32,
    n_sequences: u32,
    pages: u32,
    page_stride: u32,
    row_len: u32,
    row_scales: u32,
    scales: u32,
    // How many positions a query attends to; 0xffffffff for all.
    window: u32,
    n_splits: u32,
    split_len: u32,
    scale: f32,
    softcap: f32,
}

// Whether pairs attend to positions j: of a pair at `here`, those up to `last` and before `end`, in its window.
fn sees(j: vec4<u32>, end: u32, last: vec4<u32>, here: vec4<u32>) -> vec4<bool> {
    return (j < vec4<u32>(end)) & (j <= last) & (here - min(j, here) < vec4<u32>(params.window));
}
