// Split-KV attention of few rows: partial results of each split of positions, for attention_combine.wgsl.
// PREPARE 1 also does for one row of each sequence what heads.wgsl does: its queries, keys and values come as
// they were computed; with NEW 1 there are key and value, which go to the cache.
//
// Agrees with `sterna_kernels::attention`, and as heads.wgsl does, except for the order of sums and
// exponentials.
// Shapes: input rows, of `rows_as_they_are.wgsl` or `rows_of_sums.wgsl`, of [n_heads, head_dim], or with PREPARE rows with
// queries, keys and values at offsets of their own; angles [n_angles, half] of cosine and sine; keys and values as `cache_*.wgsl` says, in pages as
// `pages.wgsl` says; states [sequences, n_rows, n_heads, n_splits + NEW, head_dim + 2], of sums, their
// weight and the largest score. With NEW the last state is that of the new position. With ALONE there is one split,
// of all positions and the new one, and instead of states rows of out [n_heads, head_dim].
// One workgroup per split and HEADS pairs of a row and one of the heads that share keys, as many for every
// sequence as for one of `n_rows`: those behind its last pair do nothing. SEGMENTS segments of
// LANES for every SHARED pairs: a segment processes one position, four at a time, its lanes UNITS runs of eight elements
// each, of keys, values and sums, all in registers. A few workgroups mostly wait: the shorter an invocation's
// chain of dependent operations, the sooner it is done. Many compute without a pause: pairs that share what was loaded
// take fewer instructions: then each of eight lanes has the score of one of the four positions for one of the two pairs.

override PREPARE: u32 = 0u;
// 1 if the last position's key and value aren't in the cache yet.
override NEW: u32 = 0u;
// 1 if one workgroup attends to all positions of its pairs, and stores the results.
override ALONE: u32 = 0u;
// 1 if queries, or keys, are normalised head by head, 2 if all of the row's heads are together.
override Q_NORM: u32 = 0u;
override K_NORM: u32 = 0u;
// 1 if pairs are adjacent, 0 if they are half the rotated elements apart.
override PAIRS: u32 = 0u;
override HEADS: u32 = 4u;
// Pairs of an invocation, 1 or 2; then HEADS is even, LANES are at least eight, and UNITS at most two.
override SHARED: u32 = 1u;
override SEGMENTS: u32 = 8u;
// At most 4.
override UNITS: u32 = 1u;
// HEADS, a key, and a value if it has its own.
override SLOTS: u32 = 6u;
// What is divided by: heads of keys, heads of queries that share one of them, elements of a head, and workgroups of pairs that
// share keys.
override KV_HEADS: u32 = 1u;
override SHARE: u32 = 1u;
override HEAD_DIM: u32 = 64u;
override GROUPS: u32 = 1u;
// HEADS · SEGMENTS.
override STATES: u32 = 32u;
// Vectors of HEADS queries, and of the sums of all segments; with ALONE and NEW of a key and a value too.
override ROOM: u32 = 576u;

@group(0) @binding(1) var<storage, read> angles: array<vec2<f32>>;
@group(0) @binding(2) var<storage, read> sequences: array<u32>;
@group(0) @binding(5) var<storage, read_write> keys: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read_write> values: array<vec4<u32>>;
@group(0) @binding(7) var<storage, read_write> states: array<f32>;

struct Params {
    // The most rows of a sequence.
    n_rows: u32,
    n_kv_heads: u32,
    offset: u32,
    stride: u32,
    // From one query of a row to the next.
    q_step: u32,
    // Of the keys, and of the values, within a row.
    key_column: u32,
    value_column: u32,
    // Pairs that are rotated.
    half: u32,
    sequences: u32,
    pages: u32,
    page_stride: u32,
    row_len: u32,
    row_scales: u32,
    scales: u32,
    // How many positions a query attends to; 0xffffffff for all.
    window: u32,
    n_splits: u32,
    split_len: u32,
    // Positions in the table of angles.
    n_angles: u32,
    eps: f32,
    scale: f32,
    softcap: f32,
    out_offset: u32,
    out_stride: u32,
    // Where the scales of what is added up begin, and the elements of each part of it.
    begin: u32,
    part_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Prepared heads, in slots: HEADS queries; then, with NEW, a key and a value of its own, or else the sums of
// segments; both with ALONE.
var<workgroup> room: array<vec4<f32>, ROOM>;
// The largest score and the weight of each segment.
var<workgroup> states_of: array<vec2<f32>, STATES>;
// The inverse root mean square of the head in a slot.
var<workgroup> inverse_roots: array<f32, SLOTS>;
// Of the key's blocks, then of the value's.
var<workgroup> block_scales: array<f32, 16>;

// Vectors of a slot.
fn slot_len() -> u32 {
    return 2u * UNITS * LANES;
}

// The slot of the first segment's sums.
fn first_sums() -> u32 {
    return select(HEADS, SLOTS, ALONE == 1u && NEW == 1u);
}

fn element(slot: u32, e: u32) -> f32 {
    return room[slot * slot_len() + e / 4u][e % 4u];
}

// What is in a slot.
struct Head {
    source: u32,
    is_query: bool,
    is_value: bool,
    // The inverse root mean square that it is normalised with, or one.
    inverse: f32,
    // Where its row of angles begins.
    turn: u32,
}

// Element e of a head, normalised and rotated. Nothing is loaded in a branch here, so that all loads are issued together, where
// rows are as they are.
fn prepared(head: Head, e: u32) -> f32 {
    let turns = PREPARE == 1u && !head.is_value && e < 2u * params.half;
    let is_second = turns && e >= params.half;
    let i = min(select(e, e - params.half, is_second), max(params.half, 1u) - 1u);
    let first = select(min(e, HEAD_DIM - 1u), select(i, 2u * i, PAIRS == 1u), turns);
    let second = select(first, select(i + params.half, 2u * i + 1u, PAIRS == 1u), turns);
    let a = normed(head, first);
    let b = normed(head, second);
    let angle = angles[head.turn + i];
    let rotated = select(a * angle.x - b * angle.y, b * angle.x + a * angle.y, is_second);
    return select(0.0, select(a, rotated, turns), e < HEAD_DIM);
}

fn normed(head: Head, e: u32) -> f32 {
    let x = input_at(head.source + e);
    // Of whole rows, heads have weights of their own.
    let column = head.source - row_start;
    var weight = 1.0;
    if Q_NORM != 0u {
        let at = select(e, column + e, Q_NORM == 2u);
        weight = select(1.0, q_weight_at(select(0u, at, head.is_query)), head.is_query);
    }
    if K_NORM != 0u {
        let is_key = !head.is_query && !head.is_value;
        let at = select(e, column - params.key_column + e, K_NORM == 2u);
        weight = select(weight, k_weight_at(select(0u, at, is_key)), is_key);
    }
    return x * head.inverse * weight;
}

// Where the row begins whose heads are normalised together.
var<private> row_start: u32;

// An invocation's share of the sum of squares of `len` elements of the row from `first` on.
fn squares_of(thread: u32, first: u32, len: u32) -> f32 {
    var squares = 0.0;
    for (var e = thread; e < len; e += WG) {
        let x = input_at(row_start + first + e);
        squares += x * x;
    }
    return squares;
}

// Where the head for a slot begins.
fn source_of(slot: u32, kv: u32, own: Sequence, first_pair: u32) -> u32 {
    if slot < HEADS {
        let pair = min(first_pair + slot, own.n_rows * SHARE - 1u);
        let row = own.first_row + pair / SHARE;
        return params.offset + row * params.stride + (kv * SHARE + pair % SHARE) * params.q_step;
    }
    let column = select(params.value_column, params.key_column, slot == HEADS);
    return params.offset + own.first_row * params.stride + column + kv * HEAD_DIM;
}

// Fills the first slots: queries, scaled, and a key and a value of its own, rounded to f16 as such a cache does, if n_slots
// includes them.
fn prepare(at: Invocation, thread: u32, n_slots: u32, kv: u32, own: Sequence, first_pair: u32) {
    if Q_NORM == 1u || K_NORM == 1u {
        // There are more segments than slots.
        let slot = min(thread / LANES, n_slots - 1u);
        let source = source_of(slot, kv, own, first_pair);
        var squares = 0.0;
        for (var i = 0u; i < (HEAD_DIM + LANES - 1u) / LANES; i++) {
            let e = i * LANES + thread % LANES;
            let x = input_at(source + min(e, HEAD_DIM - 1u));
            squares += select(0.0, x * x, e < HEAD_DIM);
        }
        let sum = segment_sum_f32(at, vec2<f32>(squares, 0.0)).x;
        if thread % LANES == 0u && thread / LANES < n_slots {
            inverse_roots[slot] = 1.0 / sqrt(sum / f32(HEAD_DIM) + params.eps);
        }
        workgroupBarrier();
    }
    row_start = params.offset + own.first_row * params.stride;
    if Q_NORM == 2u || K_NORM == 2u {
        let n_queries = SHARE * KV_HEADS * HEAD_DIM;
        let n_keys = KV_HEADS * HEAD_DIM;
        var squares = vec2<f32>(squares_of(thread, 0u, n_queries), 0.0);
        if NEW == 1u {
            squares.y = squares_of(thread, params.key_column, n_keys);
        }
        squares = segment_sum_f32(at, squares);
        if thread % LANES == 0u {
            // Its states come later.
            states_of[thread / LANES] = squares;
        }
        workgroupBarrier();
        if thread < n_slots {
            var sum = vec2<f32>();
            for (var i = 0u; i < WG / LANES; i++) {
                sum += states_of[i];
            }
            let mean = select(sum.y / f32(n_keys), sum.x / f32(n_queries), thread < HEADS);
            inverse_roots[thread] = 1.0 / sqrt(mean + params.eps);
        }
        workgroupBarrier();
    }
    for (var i = thread; i < n_slots * slot_len(); i += WG) {
        let slot = i / slot_len();
        let is_query = slot < HEADS;
        let is_value = slot > HEADS;
        var inverse = 1.0;
        if Q_NORM != 0u || K_NORM != 0u {
            let is_normed = select(K_NORM != 0u && !is_value, Q_NORM != 0u, is_query);
            inverse = select(1.0, inverse_roots[slot], is_normed);
        }
        let turn = min(own.position + own.angles, params.n_angles - 1u) * params.half;
        let head = Head(source_of(slot, kv, own, first_pair), is_query, is_value, inverse, turn);
        let first = 4u * (i % slot_len());
        var x = vec4<f32>(
            prepared(head, first),
            prepared(head, first + 1u),
            prepared(head, first + 2u),
            prepared(head, first + 3u),
        );
        if CACHE == 1u {
            let words = vec2<u32>(pack2x16float(x.xy), pack2x16float(x.zw));
            let rounded = vec4<f32>(unpack2x16float(words.x), unpack2x16float(words.y));
            x = select(rounded, x, is_query);
        }
        room[i] = select(x, params.scale * x, is_query);
    }
    workgroupBarrier();
}

// Rounds the new key and value as a cache of int8 does.
fn round_new(thread: u32) {
    if thread < (1u + VALUES) * params.row_scales {
        let block = thread % params.row_scales;
        block_scales[thread] = block_scale(HEADS + thread / params.row_scales, 32u * block);
    }
    workgroupBarrier();
    let n_vectors = (HEAD_DIM + 3u) / 4u;
    for (var i = thread; i < (1u + VALUES) * n_vectors; i += WG) {
        let slot = HEADS + i / n_vectors;
        let e = i % n_vectors * 4u;
        let scale = block_scales[i / n_vectors * params.row_scales + e / 32u];
        room[slot * slot_len() + e / 4u] = scale * codes_of(elements(slot, e), scale);
    }
    workgroupBarrier();
}

// Puts the new key and value into the cache.
fn store(thread: u32, row: u32) {
    for (var i = thread; i < (1u + VALUES) * params.row_len; i += WG) {
        let is_value = i >= params.row_len;
        let slot = HEADS + u32(is_value);
        let at = select(i, i - params.row_len, is_value);
        var scale = 0.0;
        if CACHE == 2u {
            scale = block_scales[u32(is_value) * params.row_scales + at / 2u];
        }
        // Rounding again changes nothing.
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
        // By one invocation: devices may write a whole vector for one of its words.
        for (var i = 0u; i < params.row_scales; i++) {
            let to = params.scales + row * params.row_scales + i;
            keys[to / 4u][to % 4u] = bitcast<u32>(block_scales[i]);
            if VALUES == 1u {
                values[to / 4u][to % 4u] = bitcast<u32>(block_scales[params.row_scales + i]);
            }
        }
    }
}

// Stores element e of a pair's partial result in a split: sums, their weight, the largest score.
fn put(s: u32, pair: u32, kv: u32, split: u32, e: u32, value: f32) {
    let head = kv * SHARE + pair % SHARE;
    let row = s * params.n_rows + pair / SHARE;
    let state = (row * SHARE * KV_HEADS + head) * (params.n_splits + NEW) + split;
    states[state * (HEAD_DIM + 2u) + e] = value;
}

// Prepares the new position's key and value, besides queries, and puts them into the cache.
fn prepare_new(at: Invocation, thread: u32, kv: u32, s: u32, own: Sequence, first_pair: u32) {
    let now = own.position;
    let page = page_of(s, now);
    prepare(at, thread, SLOTS, kv, own, first_pair);
    if CACHE == 2u {
        round_new(thread);
    }
    if now < own.capacity && first_pair == 0u {
        store(thread, row_of(page, kv, now));
    }
}

// The score of the new position for the query in a slot.
fn score_of_new(at: Invocation, thread: u32, slot: u32, own: Sequence) -> f32 {
    let lane = thread % LANES;
    var product = 0.0;
    for (var u = 0u; u < UNITS; u++) {
        let i = slot * slot_len() + 2u * (u * LANES + lane);
        let key = HEADS * slot_len() + 2u * (u * LANES + lane);
        product += dot(room[key], room[i]) + dot(room[key + 1u], room[i + 1u]);
    }
    let sum = segment_sum_f32(at, vec2<f32>(product, 0.0)).x;
    return select(LOWEST, bounded(vec4<f32>(sum)).x, own.position < own.capacity);
}

// The partial result of the new position alone.
fn attend_new(at: Invocation, thread: u32, kv: u32, s: u32, own: Sequence, first_pair: u32) {
    prepare_new(at, thread, kv, s, own, first_pair);
    let has_room = own.position < own.capacity;
    let first = thread % (SEGMENTS * LANES);
    for (var h = 0u; h < SHARED; h++) {
        let slot = thread / (SEGMENTS * LANES) * SHARED + h;
        let score = score_of_new(at, thread, slot, own);
        let pair = first_pair + slot;
        if pair < own.n_rows * SHARE {
            for (var e = first; e < HEAD_DIM; e += SEGMENTS * LANES) {
                put(s, pair, kv, params.n_splits, e, select(0.0, element(HEADS + VALUES, e), has_room));
            }
            if first == 0u {
                put(s, pair, kv, params.n_splits, HEAD_DIM, f32(has_room));
                put(s, pair, kv, params.n_splits, HEAD_DIM + 1u, score);
            }
        }
    }
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    // The slot of this invocation's first pair.
    let own = thread / (SEGMENTS * LANES) * SHARED;
    let segment = thread / LANES % SEGMENTS;
    let lane = thread % LANES;
    let kv = group.id.x % KV_HEADS;
    let s = group.id.x / KV_HEADS / GROUPS;
    let first_pair = group.id.x / KV_HEADS % GROUPS * HEADS;
    let split = group.id.y;
    // Most splits begin there: it is loaded together with what says where they do.
    var page = page_of(s, split * params.split_len);
    let own_sequence = sequence_of(s);
    let n_pairs = own_sequence.n_rows * SHARE;
    let origin = own_sequence.position;
    if first_pair >= n_pairs {
        return;
    }
    if NEW == 1u && ALONE == 0u && split == params.n_splits {
        attend_new(at, thread, kv, s, own_sequence, first_pair);
        return;
    }
    let earliest = origin + first_pair / SHARE;
    let latest = origin + (min(first_pair + HEADS, n_pairs) - 1u) / SHARE;
    let first = earliest + 1u - min(params.window, earliest + 1u);
    // Cached positions: with NEW, those before the new one.
    // 32 positions are in one page: those before the window are not attended to.
    let begin = max(first / 32u * 32u, split * params.split_len);
    let end = min(min(latest + 1u - NEW, own_sequence.capacity), (split + 1u) * params.split_len);
    if ALONE == 0u && (first >= end || split * params.split_len >= end) {
        return;
    }
    // Where there are none, any is loaded.
    let most = max(end, 1u) - 1u;
    if begin / PAGE != split * params.split_len / PAGE {
        page = page_of(s, begin);
    }
    // The last run of eight elements: lanes beyond it read it too, and are ignored.
    let last_run = (HEAD_DIM + 7u) / 8u - 1u;

    // Four positions of each segment, loaded together, before anything waits.
    var k: array<Eight, 16>;
    var v: array<Eight, 16>;
    for (var r = 0u; r < 4u; r++) {
        let row = row_of(page, kv, min(begin + r * SEGMENTS + segment, most));
        for (var u = 0u; u < UNITS; u++) {
            k[r * UNITS + u] = key_words(row, min(u * LANES + lane, last_run));
            v[r * UNITS + u] = value_words(row, min(u * LANES + lane, last_run));
        }
    }
    // Of this invocation's pairs.
    var scores_now: array<f32, 2>;
    if ALONE == 1u && NEW == 1u {
        prepare_new(at, thread, kv, s, own_sequence, first_pair);
        for (var h = 0u; h < SHARED; h++) {
            scores_now[h] = score_of_new(at, thread, own + h, own_sequence);
        }
    } else {
        prepare(at, thread, HEADS, kv, own_sequence, first_pair);
    }
    // By unit; of the second pair only if there is one.
    var query: array<vec4<f32>, 8>;
    var sums: array<vec4<f32>, 8>;
    var second_query: array<vec4<f32>, 4>;
    var second_sums: array<vec4<f32>, 4>;
    for (var u = 0u; u < UNITS; u++) {
        let i = own * slot_len() + 2u * (u * LANES + lane);
        query[2u * u] = room[i];
        query[2u * u + 1u] = room[i + 1u];
        if SHARED == 2u {
            second_query[2u * u] = room[i + slot_len()];
            second_query[2u * u + 1u] = room[i + slot_len() + 1u];
        }
    }
    // The pair of which this lane has the largest score, and the weight.
    let own_pair = own + lane % (4u * SHARED) / 4u;
    var top = LOWEST;
    var weight = 0.0;
    // The position of that pair's row.
    let last = origin + min(first_pair + own_pair, n_pairs - 1u) / SHARE;
    for (var at_once = begin; at_once < end; at_once += 4u * SEGMENTS) {
        page = page_of(s, at_once + 4u * SEGMENTS);
        var dots = vec4<f32>();
        var second_dots = vec4<f32>();
        for (var u = 0u; u < UNITS; u++) {
            for (var r = 0u; r < 4u; r++) {
                let key = floats(k[r * UNITS + u]);
                dots[r] += dot(key[0], query[2u * u]) + dot(key[1], query[2u * u + 1u]);
                if SHARED == 2u {
                    second_dots[r] += dot(key[0], second_query[2u * u]) + dot(key[1], second_query[2u * u + 1u]);
                }
            }
        }
        var weights = vec4<f32>();
        var shrink = 1.0;
        var second_weights = vec4<f32>();
        var second_shrink = 1.0;
        if SHARED == 1u {
            let low = segment_sum_f32(at, dots.xy);
            let high = segment_sum_f32(at, dots.zw);
            let j = vec4<u32>(at_once + segment) + vec4<u32>(0u, 1u, 2u, 3u) * SEGMENTS;
            let sees = (j < vec4<u32>(end)) & (j <= vec4<u32>(last))
                & (vec4<u32>(last) - j < vec4<u32>(params.window));
            let score = select(vec4<f32>(LOWEST), bounded(vec4<f32>(low, high)), sees);
            let now = max(max(max(score.x, score.y), max(score.z, score.w)), top);
            shrink = exp(top - now);
            weights = select(vec4<f32>(), exp(score - now), sees);
            top = now;
            weight = weight * shrink + weights.x + weights.y + weights.z + weights.w;
        } else {
            let sum = segment_sum_of_eight(at, dots, second_dots);
            let j = at_once + segment + lane % 4u * SEGMENTS;
            let sees = j < end && j <= last && last - j < params.window;
            let score = select(LOWEST, bounded(vec4<f32>(sum)).x, sees);
            let now = max(four_max_f32(at, score), top);
            let own_shrink = exp(top - now);
            let own_weight = select(0.0, exp(score - now), sees);
            top = now;
            weight = weight * own_shrink + own_weight;
            weights = four_of_segment(at, own_weight, 0u);
            shrink = one_of_segment(at, own_shrink, 0u);
            second_weights = four_of_segment(at, own_weight, 4u);
            second_shrink = one_of_segment(at, own_shrink, 4u);
        }
        for (var u = 0u; u < UNITS; u++) {
            sums[2u * u] *= shrink;
            sums[2u * u + 1u] *= shrink;
            if SHARED == 2u {
                second_sums[2u * u] *= second_shrink;
                second_sums[2u * u + 1u] *= second_shrink;
            }
            for (var r = 0u; r < 4u; r++) {
                let value = floats(v[r * UNITS + u]);
                sums[2u * u] += weights[r] * value[0];
                sums[2u * u + 1u] += weights[r] * value[1];
                if SHARED == 2u {
                    second_sums[2u * u] += second_weights[r] * value[0];
                    second_sums[2u * u + 1u] += second_weights[r] * value[1];
                }
            }
        }
        let next = at_once + 4u * SEGMENTS;
        if next < end {
            for (var r = 0u; r < 4u; r++) {
                let row = row_of(page, kv, min(next + r * SEGMENTS + segment, most));
                for (var u = 0u; u < UNITS; u++) {
                    k[r * UNITS + u] = key_words(row, min(u * LANES + lane, last_run));
                    v[r * UNITS + u] = value_words(row, min(u * LANES + lane, last_run));
                }
            }
        }
    }
    // After the queries, and what is new, which others may still read.
    let to = (first_sums() + own * SEGMENTS + segment) * slot_len();
    for (var u = 0u; u < UNITS; u++) {
        let i = to + 2u * (u * LANES + lane);
        room[i] = sums[2u * u];
        room[i + 1u] = sums[2u * u + 1u];
        if SHARED == 2u {
            room[i + SEGMENTS * slot_len()] = second_sums[2u * u];
            room[i + SEGMENTS * slot_len() + 1u] = second_sums[2u * u + 1u];
        }
    }
    if SHARED == 2u {
        weight = four_sum_f32(at, weight);
    }
    if lane < 4u * SHARED && lane % 4u == 0u {
        states_of[own_pair * SEGMENTS + segment] = vec2<f32>(top, weight);
    }
    workgroupBarrier();
    for (var h = 0u; h < SHARED && first_pair + own + h < n_pairs; h++) {
        let slot = own + h;
        let score_now = select(LOWEST, scores_now[h], ALONE == 1u && NEW == 1u);
        var highest = score_now;
        for (var s = 0u; s < SEGMENTS; s++) {
            highest = max(highest, states_of[slot * SEGMENTS + s].x);
        }
        let now = exp(score_now - highest) * f32(score_now > LOWEST);
        let first = thread % (SEGMENTS * LANES);
        for (var e = first; e < HEAD_DIM; e += SEGMENTS * LANES) {
            var all = now;
            var sum = 0.0;
            if ALONE == 1u && NEW == 1u {
                sum = now * element(HEADS + VALUES, e);
            }
            for (var s = 0u; s < SEGMENTS; s++) {
                let state = states_of[slot * SEGMENTS + s];
                let factor = exp(state.x - highest);
                all += factor * state.y;
                sum += factor * element(first_sums() + slot * SEGMENTS + s, e);
            }
            let pair = first_pair + slot;
            if ALONE == 1u {
                let row = own_sequence.first_row + pair / SHARE;
                let head = kv * SHARE + pair % SHARE;
                states[params.out_offset + row * params.out_stride + head * HEAD_DIM + e] = sum / all;
            } else {
                put(s, pair, kv, split, e, sum);
                if e == 0u {
                    put(s, pair, kv, split, HEAD_DIM, all);
                    put(s, pair, kv, split, HEAD_DIM + 1u, highest);
                }
            }
        }
    }
}
