// out[t, h] ← Σ_j softmax_j(scale · q[t, h] · k[j, h']) · v[j, h'] over the positions j that t sees
//
// Agrees with `sterna_kernels::attention`, but for what it rounds to make products exact, the order of
// sums, and exponentials.
// Shapes: q rows of [n_heads, head_dim]; keys and values as `cache_*.wgsl` says, [n_kv_heads, capacity]
// rows; position[0] is that of the first query. A unit is eight pairs of a query and one of the heads
// that share keys. out rows of [n_heads, head_dim]; a workgroup to a unit.
// Workgroups of 128: an invocation to a position, then to an element.

@group(0) @binding(0) var<storage, read> q: array<f32>;
@group(0) @binding(1) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> values: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> position: array<u32>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

struct Params {
    n_rows: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    q_offset: u32,
    q_stride: u32,
    out_offset: u32,
    out_stride: u32,
    position: u32,
    capacity: u32,
    row_len: u32,
    row_scales: u32,
    scales: u32,
    // How many positions a query sees; 0xffffffff for all.
    window: u32,
    scale: f32,
    softcap: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Two vectors for each element: that of eight scaled queries. Two for each position: its eight weights.
var<workgroup> queries: array<vec4<f32>, 512>;
var<workgroup> weights: array<vec4<f32>, 256>;
var<workgroup> partial: array<f32, 128>;
// Of the eight rows: the largest score, the sum of weights, and what the sums so far are scaled by.
var<workgroup> row_top: array<f32, 8>;
var<workgroup> row_sum: array<f32, 8>;
var<workgroup> row_scale: array<f32, 8>;

// Which of four rows see position j, when they see `first` to `last`.
fn seen(j: u32, first: vec4<u32>, last: vec4<u32>) -> vec4<bool> {
    return (vec4<u32>(j) >= first) & (vec4<u32>(j) <= last);
}

// Scores of the two fours of rows with the products of four elements of a key; the queries' first is at
// `i`.
fn four_products(k: vec4<f32>, i: u32, score: array<vec4<f32>, 2>) -> array<vec4<f32>, 2> {
    let low = k.x * queries[i] + k.y * queries[i + 2u] + k.z * queries[i + 4u] + k.w * queries[i + 6u];
    let high = k.x * queries[i + 1u] + k.y * queries[i + 3u] + k.z * queries[i + 5u]
        + k.w * queries[i + 7u];
    return array<vec4<f32>, 2>(score[0] + low, score[1] + high);
}

// Element e of the value at position i of a span that has n; zero behind its end.
fn value_of(kv: u32, span: u32, i: u32, n: u32, e: u32) -> f32 {
    if i < n {
        return value_at(kv * params.capacity + span * 128u + i, e);
    }
    return 0.0;
}

// Weights of position i, of the first four rows or the others; of a position behind the span, any.
fn weight_of(i: u32, half: u32) -> vec4<f32> {
    return weights[2u * min(i, 127u) + half];
}

@compute @workgroup_size(128)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let d = params.head_dim;
    let share = params.n_heads / params.n_kv_heads;
    let kv = group.x % params.n_kv_heads;
    let unit = group.x / params.n_kv_heads;
    let n_pairs = params.n_rows * share;
    let origin = position[params.position];
    // The pair of row r is query (8 unit + r) / share, head (8 unit + r) % share of the group.
    let pair_low = vec4<u32>(8u * unit) + vec4<u32>(0u, 1u, 2u, 3u);
    let pair_high = pair_low + vec4<u32>(4u);
    let live_low = pair_low < vec4<u32>(n_pairs);
    let live_high = pair_high < vec4<u32>(n_pairs);
    let last_low = origin + min(pair_low, vec4<u32>(n_pairs - 1u)) / share;
    let last_high = origin + min(pair_high, vec4<u32>(n_pairs - 1u)) / share;
    let window = vec4<u32>(params.window);
    let first_low = last_low + 1u - min(window, last_low + 1u);
    let first_high = last_high + 1u - min(window, last_high + 1u);
    for (var i = thread; i < 2u * d; i += 128u) {
        let e = i / 2u;
        let pairs = select(pair_high, pair_low, i % 2u == 0u);
        var column: vec4<f32>;
        for (var r = 0u; r < 4u; r++) {
            let pair = min(pairs[r], n_pairs - 1u);
            let at = params.q_offset + pair / share * params.q_stride
                + (kv * share + pair % share) * d;
            column[r] = params.scale * q[at + e];
        }
        queries[i] = column;
    }
    // Heads of fewer elements than a vector of eight: nothing times nothing.
    for (var i = 2u * d + thread; i < (d + 7u) / 8u * 16u; i += 128u) {
        queries[i] = vec4<f32>();
    }
    if thread < 8u {
        row_top[thread] = LOWEST;
        row_sum[thread] = 0.0;
    }
    // Elements are shared out to as many invocations as there are, or a power of two; what is left over
    // shares out positions.
    var width = 1u;
    while width < d && width < 128u {
        width *= 2u;
    }
    let e0 = thread % width;
    let begin = thread / width;
    let step = 128u / width;
    var low = array<vec4<f32>, 2>();
    var high = array<vec4<f32>, 2>();

    // The earliest that the first row sees, the last that the last does.
    let earliest = first_low.x;
    // Beyond the capacity there is nothing.
    let latest = min(origin + (min(8u * unit + 8u, n_pairs) - 1u) / share, params.capacity - 1u);
    var span = earliest / 128u;
    let end = latest / 128u + 1u;
    for (; span < end; span++) {
        workgroupBarrier();
        let j = span * 128u + thread;
        let row = kv * params.capacity + min(j, latest);
        // Sixteen elements at a time, asked for together: few invocations wait for memory otherwise.
        let eighths = (d + 7u) / 8u;
        var score = array<vec4<f32>, 2>();
        for (var i = 0u; i < eighths; i += 2u) {
            let k0 = key_eight(row, i);
            // Where there is no second eight, the first again, which isn't used.
            let k1 = key_eight(row, min(i + 1u, eighths - 1u));
            score = four_products(k0[0], i * 16u, score);
            score = four_products(k0[1], i * 16u + 8u, score);
            if i + 1u < eighths {
                score = four_products(k1[0], i * 16u + 16u, score);
                score = four_products(k1[1], i * 16u + 24u, score);
            }
        }
        var score_low = score[0];
        var score_high = score[1];
        let sees_low = seen(j, first_low, last_low) & live_low;
        let sees_high = seen(j, first_high, last_high) & live_high;
        score_low = select(vec4<f32>(LOWEST), bounded(score_low), sees_low);
        score_high = select(vec4<f32>(LOWEST), bounded(score_high), sees_high);
        weights[2u * thread] = score_low;
        weights[2u * thread + 1u] = score_high;
        workgroupBarrier();
        // Sixteen invocations to a row, eight positions to each.
        let r = thread / 16u;
        var top = LOWEST;
        for (var i = 0u; i < 8u; i++) {
            top = max(top, weights[2u * (thread % 16u + 16u * i) + r / 4u][r % 4u]);
        }
        partial[thread] = top;
        workgroupBarrier();
        if thread < 8u {
            let before = row_top[thread];
            var now = before;
            for (var i = 0u; i < 16u; i++) {
                now = max(now, partial[16u * thread + i]);
            }
            row_top[thread] = now;
            row_scale[thread] = exp(before - now);
        }
        workgroupBarrier();
        let top_low = vec4<f32>(row_top[0], row_top[1], row_top[2], row_top[3]);
        let top_high = vec4<f32>(row_top[4], row_top[5], row_top[6], row_top[7]);
        weights[2u * thread] = select(vec4<f32>(), exp(score_low - top_low), sees_low);
        weights[2u * thread + 1u] = select(vec4<f32>(), exp(score_high - top_high), sees_high);
        workgroupBarrier();
        var sum = 0.0;
        for (var i = 0u; i < 8u; i++) {
            sum += weights[2u * (thread % 16u + 16u * i) + r / 4u][r % 4u];
        }
        partial[thread] = sum;
        workgroupBarrier();
        if thread < 8u {
            var total = row_sum[thread] * row_scale[thread];
            for (var i = 0u; i < 16u; i++) {
                total += partial[16u * thread + i];
            }
            row_sum[thread] = total;
        }
        let scale_low = vec4<f32>(row_scale[0], row_scale[1], row_scale[2], row_scale[3]);
        let scale_high = vec4<f32>(row_scale[4], row_scale[5], row_scale[6], row_scale[7]);
        let n = min(128u, latest + 1u - span * 128u);
        for (var c = 0u; c < 2u; c++) {
            let e = e0 + c * 128u;
            if e < d {
                var sum_low = low[c] * scale_low;
                var sum_high = high[c] * scale_high;
                // Eight positions at a time, likewise.
                for (var i = begin; i < n; i += 8u * step) {
                    let v0 = value_of(kv, span, i, n, e);
                    let v1 = value_of(kv, span, i + step, n, e);
                    let v2 = value_of(kv, span, i + 2u * step, n, e);
                    let v3 = value_of(kv, span, i + 3u * step, n, e);
                    let v4 = value_of(kv, span, i + 4u * step, n, e);
                    let v5 = value_of(kv, span, i + 5u * step, n, e);
                    let v6 = value_of(kv, span, i + 6u * step, n, e);
                    let v7 = value_of(kv, span, i + 7u * step, n, e);
                    sum_low += v0 * weights[2u * i] + v1 * weight_of(i + step, 0u)
                        + v2 * weight_of(i + 2u * step, 0u) + v3 * weight_of(i + 3u * step, 0u)
                        + v4 * weight_of(i + 4u * step, 0u) + v5 * weight_of(i + 5u * step, 0u)
                        + v6 * weight_of(i + 6u * step, 0u) + v7 * weight_of(i + 7u * step, 0u);
                    sum_high += v0 * weights[2u * i + 1u] + v1 * weight_of(i + step, 1u)
                        + v2 * weight_of(i + 2u * step, 1u) + v3 * weight_of(i + 3u * step, 1u)
                        + v4 * weight_of(i + 4u * step, 1u) + v5 * weight_of(i + 5u * step, 1u)
                        + v6 * weight_of(i + 6u * step, 1u) + v7 * weight_of(i + 7u * step, 1u);
                }
                low[c] = sum_low;
                high[c] = sum_high;
            }
        }
    }
    workgroupBarrier();
    // What several invocations have of an element is in shared memory now, two vectors to each.
    for (var c = 0u; c < 2u; c++) {
        weights[2u * thread] = low[c];
        weights[2u * thread + 1u] = high[c];
        workgroupBarrier();
        let e = e0 + c * 128u;
        if begin == 0u && e < d {
            var sum_low = weights[2u * e0];
            var sum_high = weights[2u * e0 + 1u];
            for (var i = 1u; i < step; i++) {
                sum_low += weights[2u * (e0 + i * width)];
                sum_high += weights[2u * (e0 + i * width) + 1u];
            }
            for (var r = 0u; r < 8u; r++) {
                let pair = 8u * unit + r;
                if pair < n_pairs {
                    let value = select(sum_high[r % 4u], sum_low[r % 4u], r < 4u);
                    let head = kv * share + pair % share;
                    let query = pair / share;
                    let to = params.out_offset + query * params.out_stride + head * d;
                    out[to + e] = value / row_sum[r];
                }
            }
        }
        workgroupBarrier();
    }
}
