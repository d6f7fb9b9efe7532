// Attention of few rows, over spans of positions: what each span comes to, for attention_combine.wgsl.
// PREPARE 1 does for one row what heads.wgsl does besides: its queries, keys and values come as they were
// computed; key and value go to the cache.
//
// Agrees with `sterna_kernels::attention`, and as heads.wgsl does, but for the order of sums and
// exponentials.
// Shapes: q rows of [n_heads, head_dim], or with PREPARE one row with queries, keys and values at offsets
// of their own; angles [positions, half] of cosine and sine; keys and values as `cache_*.wgsl` says,
// [n_kv_heads, capacity] rows; position[0] is that of the first row; states [rows, n_heads, n_spans,
// head_dim + 2], of sums, their weight and the largest score.
// A workgroup to HEADS pairs of a row and one of the heads that share keys, and a span. A segment of LANES
// to a position, four at a time, its lanes to UNITS runs of eight elements each: of keys, values and sums,
// all in registers. Segments have sums of their own until the end.

override PREPARE: u32 = 0u;
// 1 if queries, or keys, are normalised.
override Q_NORM: u32 = 0u;
override K_NORM: u32 = 0u;
// 1 if pairs are neighbours, 0 if they lie half the rotated elements apart.
override PAIRS: u32 = 0u;
override HEADS: u32 = 4u;
// At most 4, and HEADS · UNITS at most 8.
override UNITS: u32 = 1u;
// Pairs whose sums are put together at once.
override MERGED: u32 = 1u;
// Vectors of shared memory: for HEADS heads and, with PREPARE, a key and a value; and for the sums of
// all segments and MERGED pairs.
override ROOM: u32 = 640u;
// Segments · HEADS.
override STATES: u32 = 256u;

@group(0) @binding(0) var<storage, read> q: array<f32>;
@group(0) @binding(1) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> position: array<u32>;
@group(0) @binding(3) var<storage, read> q_weight: array<f32>;
@group(0) @binding(4) var<storage, read> k_weight: array<f32>;
@group(0) @binding(5) var<storage, read_write> keys: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read_write> values: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> states: array<f32>;

struct Params {
    n_rows: u32,
    n_heads: u32,
    n_kv_heads: u32,
    head_dim: u32,
    offset: u32,
    stride: u32,
    // Of the keys, and of the values, within a row.
    key_column: u32,
    value_column: u32,
    // Pairs that are rotated.
    half: u32,
    position: u32,
    capacity: u32,
    row_len: u32,
    row_scales: u32,
    scales: u32,
    // How many positions a query sees; 0xffffffff for all.
    window: u32,
    n_spans: u32,
    span_len: u32,
    eps: f32,
    scale: f32,
    softcap: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Heads made ready, in slots: HEADS queries, a key, a value. Later sums.
var<workgroup> room: array<vec4<f32>, ROOM>;
// Of the key's blocks, then of the value's.
var<workgroup> block_scales: array<f32, 16>;
// The largest score and the weight that a segment has of a pair.
var<workgroup> states_of: array<vec2<f32>, STATES>;

// Vectors of a slot.
fn slot_len() -> u32 {
    return 2u * UNITS * LANES;
}

fn element(slot: u32, e: u32) -> f32 {
    return room[slot * slot_len() + e / 4u][e % 4u];
}

// Element e of the head that begins at `source`, normalised and rotated.
fn prepared(source: u32, is_query: bool, inverse: f32, now: u32, e: u32) -> f32 {
    if e >= params.head_dim {
        return 0.0;
    }
    if e >= 2u * params.half {
        return normed(source, is_query, inverse, e);
    }
    let is_second = e >= params.half;
    let i = select(e, e - params.half, is_second);
    let a = normed(source, is_query, inverse, select(i, 2u * i, PAIRS == 1u));
    let b = normed(source, is_query, inverse, select(i + params.half, 2u * i + 1u, PAIRS == 1u));
    let angle = angles[now * params.half + i];
    return select(a * angle.x - b * angle.y, b * angle.x + a * angle.y, is_second);
}

fn normed(source: u32, is_query: bool, inverse: f32, e: u32) -> f32 {
    let x = q[source + e];
    if is_query && Q_NORM == 1u {
        return x * inverse * q_weight[e];
    }
    if !is_query && K_NORM == 1u {
        return x * inverse * k_weight[e];
    }
    return x;
}

// One over the root of the mean square of the head that begins at `source`.
fn inverse_root(at: Invocation, source: u32, lane: u32) -> f32 {
    if Q_NORM == 0u && K_NORM == 0u {
        return 1.0;
    }
    var squares = 0.0;
    for (var e = lane; e < params.head_dim; e += LANES) {
        squares += q[source + e] * q[source + e];
    }
    let sum = segment_sum_f32(at, vec2<f32>(squares, 0.0)).x;
    return 1.0 / sqrt(sum / f32(params.head_dim) + params.eps);
}

// Fills the slots: queries, scaled, and with `fresh` the new key and value.
fn prepare(at: Invocation, thread: u32, kv: u32, first_pair: u32, now: u32, fresh: bool) {
    let share = params.n_heads / params.n_kv_heads;
    let lane = thread % LANES;
    let n_slots = HEADS + select(0u, 2u, fresh);
    let n_segments = WG / LANES;
    for (var first = 0u; first < n_slots; first += n_segments) {
        let slot = first + thread / LANES;
        let is_query = slot < HEADS;
        let is_key = slot == HEADS;
        let pair = min(first_pair + slot, params.n_rows * share - 1u);
        var source = params.offset + kv * params.head_dim;
        if is_query {
            source = params.offset + pair / share * params.stride
                + (kv * share + pair % share) * params.head_dim;
        } else {
            source += select(params.value_column, params.key_column, is_key);
        }
        var inverse = 1.0;
        if PREPARE == 1u {
            inverse = inverse_root(at, source, lane);
        }
        if slot < n_slots {
            for (var i = lane; i < slot_len(); i += LANES) {
                var x: vec4<f32>;
                for (var c = 0u; c < 4u; c++) {
                    let e = 4u * i + c;
                    if PREPARE == 1u && (is_query || is_key) {
                        x[c] = prepared(source, is_query, inverse, now, e);
                    } else if e < params.head_dim {
                        x[c] = q[source + e];
                    }
                }
                room[slot * slot_len() + i] = select(x, params.scale * x, is_query);
            }
        }
    }
    workgroupBarrier();
}

// Rounds the new key and value as the cache does, and puts them there.
fn store(thread: u32, kv: u32, now: u32) {
    if CACHE == 2u {
        if thread < 2u * params.row_scales {
            let block = thread % params.row_scales;
            block_scales[thread] = block_scale(HEADS + thread / params.row_scales, 32u * block);
        }
        workgroupBarrier();
    }
    let n_vectors = (params.head_dim + 3u) / 4u;
    for (var i = thread; i < 2u * n_vectors; i += WG) {
        let slot = HEADS + i / n_vectors;
        let e = i % n_vectors * 4u;
        let x = elements(slot, e);
        let to = slot * slot_len() + e / 4u;
        if CACHE == 1u {
            let words = vec2<u32>(pack2x16float(x.xy), pack2x16float(x.zw));
            room[to] = vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
        }
        if CACHE == 2u {
            let scale = block_scales[i / n_vectors * params.row_scales + e / 32u];
            room[to] = scale * codes_of(x, scale);
        }
    }
    workgroupBarrier();
    let row = kv * params.capacity + now;
    for (var i = thread; i < 2u * params.row_len; i += WG) {
        let is_value = i >= params.row_len;
        let slot = HEADS + u32(is_value);
        let at = select(i, i - params.row_len, is_value);
        var scale = 0.0;
        if CACHE == 2u {
            scale = block_scales[u32(is_value) * params.row_scales + at / 2u];
        }
        // What is rounded is not changed by being rounded again.
        let words = vec4<u32>(
            word(slot, 4u * at, scale),
            word(slot, 4u * at + 1u, scale),
            word(slot, 4u * at + 2u, scale),
            word(slot, 4u * at + 3u, scale),
        );
        if is_value {
            values[row * params.row_len + at] = words;
        } else {
            keys[row * params.row_len + at] = words;
        }
    }
    if CACHE == 2u && thread == 0u {
        // By one invocation: devices may write the whole of a vector for one of its words.
        for (var i = 0u; i < params.row_scales; i++) {
            let to = params.scales + row * params.row_scales + i;
            keys[to / 4u][to % 4u] = bitcast<u32>(block_scales[i]);
            values[to / 4u][to % 4u] = bitcast<u32>(block_scales[params.row_scales + i]);
        }
    }
}

@compute @workgroup_size(WG)
fn main(at: Invocation) {
    let thread = thread_of(at);
    let segment = thread / LANES;
    let lane = thread % LANES;
    let n_segments = WG / LANES;
    let d = params.head_dim;
    let share = params.n_heads / params.n_kv_heads;
    let kv = at.group.x % params.n_kv_heads;
    let first_pair = at.group.x / params.n_kv_heads * HEADS;
    let n_pairs = params.n_rows * share;
    let origin = position[params.position];
    let earliest = origin + first_pair / share;
    let latest = origin + (min(first_pair + HEADS, n_pairs) - 1u) / share;
    let first = earliest + 1u - min(params.window, earliest + 1u);
    let span = at.group.y;
    // The new position's span has something to do even if it lies behind the last.
    let is_owner = PREPARE == 1u && span == min(origin / params.span_len, params.n_spans - 1u);
    if !is_owner && (span < first / params.span_len || span > latest / params.span_len) {
        return;
    }
    let fresh = is_owner && origin < params.capacity;
    // Cached positions: with PREPARE, those before the new one.
    let begin = max(first, span * params.span_len);
    let end = min(min(latest + 1u - PREPARE, params.capacity), (span + 1u) * params.span_len);
    let row0 = kv * params.capacity;
    // The last run of eight elements: lanes behind it read it too, and count for nothing.
    let last_run = (d + 7u) / 8u - 1u;

    // Four positions of each segment, asked for together, and before anything is waited for: few
    // workgroups do nothing but wait for memory.
    var k: array<Eight, 16>;
    var v: array<Eight, 16>;
    if begin < end {
        for (var r = 0u; r < 4u; r++) {
            let row = row0 + min(begin + r * n_segments + segment, end - 1u);
            for (var u = 0u; u < UNITS; u++) {
                k[r * UNITS + u] = key_words(row, min(u * LANES + lane, last_run));
                v[r * UNITS + u] = value_words(row, min(u * LANES + lane, last_run));
            }
        }
    }
    prepare(at, thread, kv, first_pair, origin, fresh);
    if fresh {
        store(thread, kv, origin);
    }
    // By pair and unit.
    var query: array<vec4<f32>, 16>;
    var sums: array<vec4<f32>, 16>;
    var top: array<f32, 8>;
    var weight: array<f32, 8>;
    // The position of each pair's row.
    var last: array<u32, 8>;
    for (var h = 0u; h < HEADS; h++) {
        for (var u = 0u; u < UNITS; u++) {
            let i = h * slot_len() + 2u * (u * LANES + lane);
            query[2u * (h * UNITS + u)] = room[i];
            query[2u * (h * UNITS + u) + 1u] = room[i + 1u];
        }
        top[h] = LOWEST;
        last[h] = origin + min(first_pair + h, n_pairs - 1u) / share;
    }
    for (var at_once = begin; at_once < end; at_once += 4u * n_segments) {
        var dots: array<vec4<f32>, 8>;
        for (var u = 0u; u < UNITS; u++) {
            for (var r = 0u; r < 4u; r++) {
                let key = floats(k[r * UNITS + u]);
                for (var h = 0u; h < HEADS; h++) {
                    let i = 2u * (h * UNITS + u);
                    dots[h][r] += dot(key[0], query[i]) + dot(key[1], query[i + 1u]);
                }
            }
        }
        let j = vec4<u32>(at_once + segment) + vec4<u32>(0u, 1u, 2u, 3u) * n_segments;
        for (var h = 0u; h < HEADS; h++) {
            let low = segment_sum_f32(at, dots[h].xy);
            let high = segment_sum_f32(at, dots[h].zw);
            let sees = (j < vec4<u32>(end)) & (j <= vec4<u32>(last[h]))
                & (vec4<u32>(last[h]) - j < vec4<u32>(params.window));
            let score = select(vec4<f32>(LOWEST), bounded(vec4<f32>(low, high)), sees);
            let now = max(max(max(score.x, score.y), max(score.z, score.w)), top[h]);
            let shrink = exp(top[h] - now);
            dots[h] = select(vec4<f32>(), exp(score - now), sees);
            top[h] = now;
            weight[h] = weight[h] * shrink + dots[h].x + dots[h].y + dots[h].z + dots[h].w;
            for (var u = 0u; u < UNITS; u++) {
                sums[2u * (h * UNITS + u)] *= shrink;
                sums[2u * (h * UNITS + u) + 1u] *= shrink;
            }
        }
        for (var u = 0u; u < UNITS; u++) {
            for (var r = 0u; r < 4u; r++) {
                let value = floats(v[r * UNITS + u]);
                for (var h = 0u; h < HEADS; h++) {
                    sums[2u * (h * UNITS + u)] += dots[h][r] * value[0];
                    sums[2u * (h * UNITS + u) + 1u] += dots[h][r] * value[1];
                }
            }
        }
        let next = at_once + 4u * n_segments;
        if next < end {
            for (var r = 0u; r < 4u; r++) {
                let row = row0 + min(next + r * n_segments + segment, end - 1u);
                for (var u = 0u; u < UNITS; u++) {
                    k[r * UNITS + u] = key_words(row, min(u * LANES + lane, last_run));
                    v[r * UNITS + u] = value_words(row, min(u * LANES + lane, last_run));
                }
            }
        }
    }
    if fresh {
        // The new position, by the first segment.
        for (var h = 0u; h < HEADS; h++) {
            var product = 0.0;
            for (var u = 0u; u < UNITS; u++) {
                let i = 2u * (h * UNITS + u);
                let key = HEADS * slot_len() + 2u * (u * LANES + lane);
                product += dot(room[key], query[i]) + dot(room[key + 1u], query[i + 1u]);
            }
            let score = bounded(segment_sum_f32(at, vec2<f32>(product, 0.0)).xxxx).x;
            if segment == 0u {
                let now = max(score, top[h]);
                let shrink = exp(top[h] - now);
                let own = exp(score - now);
                top[h] = now;
                weight[h] = weight[h] * shrink + own;
                for (var u = 0u; u < UNITS; u++) {
                    let i = 2u * (h * UNITS + u);
                    let value = (HEADS + 1u) * slot_len() + 2u * (u * LANES + lane);
                    sums[i] = sums[i] * shrink + own * room[value];
                    sums[i + 1u] = sums[i + 1u] * shrink + own * room[value + 1u];
                }
            }
        }
    }
    if lane == 0u {
        for (var h = 0u; h < HEADS; h++) {
            states_of[segment * HEADS + h] = vec2<f32>(top[h], weight[h]);
        }
    }
    workgroupBarrier();
    for (var h0 = 0u; h0 < HEADS; h0 += MERGED) {
        for (var m = 0u; m < MERGED; m++) {
            let h = h0 + m;
            var highest = LOWEST;
            for (var s = 0u; s < n_segments; s++) {
                highest = max(highest, states_of[s * HEADS + h].x);
            }
            let shrink = exp(top[h] - highest);
            for (var u = 0u; u < UNITS; u++) {
                let to = (m * n_segments + segment) * slot_len() + 2u * (u * LANES + lane);
                room[to] = shrink * sums[2u * (h * UNITS + u)];
                room[to + 1u] = shrink * sums[2u * (h * UNITS + u) + 1u];
            }
        }
        workgroupBarrier();
        for (var i = thread; i < MERGED * (d + 2u); i += WG) {
            let m = i / (d + 2u);
            let e = i % (d + 2u);
            let pair = first_pair + h0 + m;
            if pair < n_pairs {
                var highest = LOWEST;
                for (var s = 0u; s < n_segments; s++) {
                    highest = max(highest, states_of[s * HEADS + h0 + m].x);
                }
                var sum = 0.0;
                if e == d + 1u {
                    sum = highest;
                } else {
                    for (var s = 0u; s < n_segments; s++) {
                        if e == d {
                            let state = states_of[s * HEADS + h0 + m];
                            sum += state.y * exp(state.x - highest);
                        } else {
                            sum += element(m * n_segments + s, e);
                        }
                    }
                }
                let head = kv * share + pair % share;
                let state = (pair / share * params.n_heads + head) * params.n_spans + span;
                states[state * (d + 2u) + e] = sum;
            }
        }
        workgroupBarrier();
    }
}
