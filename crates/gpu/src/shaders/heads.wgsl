// Prepares queries, keys and values of a batch: heads normalised where there are weights for it, rotated by
// their positions, queries updated in place, keys and values put into the cache.
//
// Agrees with `sterna_kernels::rope` (both layouts; pairs leave as halves) and `sterna_kernels::norm`, and
// in what the cache then holds with `sterna_kernels::attention`.
// Shapes: qkv rows with the queries [n_heads, head_dim], keys and values [n_kv_heads, head_dim] at
// offsets of their own; angles [n_angles, half] of cosine and sine; keys and values as `cache_*.wgsl`
// says, in pages as `pages.wgsl` says.
// A workgroup of 64 per head, n_heads + 2 · n_kv_heads per row; n_heads + n_kv_heads where the keys are the
// values; or n_heads, for queries alone. Each sequence has `n_rows` of them: those behind its last row do
// nothing.

// 1 if queries, or keys, are normalised.
override Q_NORM: u32 = 0u;
override K_NORM: u32 = 0u;
// 1 if pairs are adjacent, 0 if they are half the rotated elements apart.
override PAIRS: u32 = 0u;
// Room for the elements of a head.
override HEAD_LEN: u32 = 256u;

@group(0) @binding(0) var<storage, read_write> qkv: array<f32>;
@group(0) @binding(1) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> sequences: array<u32>;
@group(0) @binding(3) var<storage, read> q_weight: array<f32>;
@group(0) @binding(4) var<storage, read> k_weight: array<f32>;
@group(0) @binding(5) var<storage, read_write> keys: array<u32>;
@group(0) @binding(6) var<storage, read_write> values: array<u32>;

@group(1) @binding(0) var<uniform> params: Params;

var<workgroup> head: array<f32, HEAD_LEN>;
// After the rotation.
var<workgroup> turned: array<f32, HEAD_LEN>;

fn turn(thread: u32, row: u32) {
    for (var e = thread; e < params.head_dim; e += WG) {
        if e >= 2u * params.half {
            turned[e] = head[e];
        }
    }
    for (var i = thread; i < params.half; i += WG) {
        let angle = angles[min(row, params.n_angles - 1u) * params.half + i];
        let a = head[select(i, 2u * i, PAIRS == 1u)];
        let b = head[select(i + params.half, 2u * i + 1u, PAIRS == 1u)];
        turned[i] = a * angle.x - b * angle.y;
        turned[i + params.half] = b * angle.x + a * angle.y;
    }
    workgroupBarrier();
}

// Element e of the head, zero beyond its end; there is one slot.
fn element(slot: u32, e: u32) -> f32 {
    return select(0.0, turned[min(e, HEAD_LEN - 1u)], e < params.head_dim);
}

// The scale of the block that word i of a cached head is in.
fn scale_of_word(i: u32) -> f32 {
    if CACHE == 2u {
        return block_scale(0u, 4u * i / 32u * 32u);
    }
    return 0.0;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    let s = group.id.y / params.n_rows;
    let own = sequence_of(s);
    let t = group.id.y % params.n_rows;
    if t >= own.n_rows {
        return;
    }
    let slot = group.id.x;
    let kv = (slot - params.n_heads) % params.n_kv_heads;
    let is_query = slot < params.n_heads;
    let is_key = !is_query && slot < params.n_heads + params.n_kv_heads;
    var begin = params.offset + (own.first_row + t) * params.stride;
    if is_query {
        begin += slot * params.q_step;
    } else {
        begin += select(params.values, params.keys, is_key) + kv * params.head_dim;
    }
    var squares = 0.0;
    for (var e = thread; e < params.head_dim; e += WG) {
        let x = qkv[begin + e];
        head[e] = x;
        squares += x * x;
    }
    if Q_NORM == 1u || K_NORM == 1u {
        let sum = workgroup_sum_f32(at, squares);
        let inverse = 1.0 / sqrt(sum / f32(params.head_dim) + params.eps);
        let is_normed = select(K_NORM == 1u && is_key, Q_NORM == 1u, is_query);
        for (var e = thread; is_normed && e < params.head_dim; e += WG) {
            // No product of the two weights is used: a head has one of them.
            if is_query {
                head[e] = head[e] * inverse * q_weight[e];
            } else {
                head[e] = head[e] * inverse * k_weight[e];
            }
        }
    }
    workgroupBarrier();
    let now = own.position + t;
    if is_query || is_key {
        turn(thread, now + own.angles);
    } else {
        for (var e = thread; e < params.head_dim; e += WG) {
            turned[e] = head[e];
        }
        workgroupBarrier();
    }
    if is_query {
        for (var e = thread; e < params.head_dim; e += WG) {
            qkv[begin + e] = turned[e];
        }
        return;
    }
    if now >= own.capacity {
        return;
    }
    let row = row_of(page_of(s, now), kv, now);
    for (var i = thread; i < params.row_len * 4u; i += WG) {
        let to = row * params.row_len * 4u + i;
        if is_key {
            keys[to] = word(0u, i, scale_of_word(i));
        } else {
            values[to] = word(0u, i, scale_of_word(i));
        }
    }
    if CACHE == 2u {
        for (var i = thread; i < params.row_scales; i += WG) {
            let to = params.scales + row * params.row_scales + i;
            let scale = bitcast<u32>(block_scale(0u, 32u * i));
            if is_key {
                keys[to] = scale;
            } else {
                values[to] = scale;
            }
        }
    }
}
