// out[t, h] ← Σ_j softmax_j(scale · q[t, h] · k[j, h']) · v[j, h'] over the positions j that t attends to, for many
// rows, by cooperative matrices
//
// Agrees with `sterna_kernels::attention` as attention.wgsl does, except that queries, keys, values and weights are
// rounded to f16. Sums are f32.
// Shapes: as attention.wgsl; heads of at most 128 elements.
// Workgroups of 128, four subgroups of 32, per 64 pairs of a query and one of the heads that share keys; 32 positions of a
// page at a time, keys and then values in shared memory. A subgroup multiplies half of the queries, which stay in registers,
// by half of the keys, then half of the weights by half of the elements of values: so each reads half of what is shared.
// The weights are relative to a bound near the largest score so far: sums are scaled anew only where a score exceeds it by
// more than SLACK, since matrices have to pass through shared memory for that.

// Runs of 32 elements of a head, at most 4.
override CHUNKS: u32 = 4u;
// Whether keys and values may be beyond the range of f16: they are clamped to it then.
override BEYOND_F16: u32 = 0u;

@group(1) @binding(0) var<uniform> params: Params;

// A score at the bound has the weight e^RAISE, which is 16, so that more of the small ones are f16. The largest weight,
// e^(RAISE + SLACK), is one, too.
const SLACK: f32 = 8.0;
const RAISE: f32 = 2.7725887;
const LARGEST: f32 = 65504.0;

// 32 positions of 128 elements, in lines 34 vectors apart, so that they are in different banks; before that, 64 queries of
// 64 elements.
const LINE: u32 = 34u;
const QUERY_LINE: u32 = 16u;
var<workgroup> tile: array<vec4<f16>, 1086>;
// Where pairs' outputs begin, or nowhere.
const NOWHERE: u32 = 0xffffffffu;
var<workgroup> places: array<u32, 64>;

// 64 pairs by 32 positions: scores, in lines nine vectors apart, and weights, in lines ten apart.
const SCORE_LINE: u32 = 9u;
var<workgroup> scores: array<vec4<f32>, 576>;
const WEIGHT_LINE: u32 = 10u;
var<workgroup> weights: array<vec4<f16>, 640>;
// Whether sums are scaled anew, in the first. Matrices are loaded from multiples of sixteen bytes, which no type requires:
// so all that is shared has such a size.
var<workgroup> rescales: array<atomic<u32>, 4>;

// Eight elements of each run of a position.
struct Position {
    a: Eight,
    b: Eight,
    c: Eight,
    d: Eight,
}

// What this invocation loads of the position in a row: every fourth eight elements. Beyond a head's end, others: queries
// have zeros there, and sums aren't stored.
fn fetch_keys(row: u32, part: u32) -> Position {
    let last = (params.head_dim + 7u) / 8u - 1u;
    var own = Position();
    own.a = key_words(row, min(part, last));
    if CHUNKS > 1u {
        own.b = key_words(row, min(part + 4u, last));
    }
    if CHUNKS > 2u {
        own.c = key_words(row, min(part + 8u, last));
    }
    if CHUNKS > 3u {
        own.d = key_words(row, min(part + 12u, last));
    }
    return own;
}

// Likewise.
fn fetch_values(row: u32, part: u32) -> Position {
    let last = (params.head_dim + 7u) / 8u - 1u;
    var own = Position();
    own.a = value_words(row, min(part, last));
    if CHUNKS > 1u {
        own.b = value_words(row, min(part + 4u, last));
    }
    if CHUNKS > 2u {
        own.c = value_words(row, min(part + 8u, last));
    }
    if CHUNKS > 3u {
        own.d = value_words(row, min(part + 12u, last));
    }
    return own;
}

fn half_of(x: vec4<f32>) -> vec4<f16> {
    if BEYOND_F16 == 1u {
        return vec4<f16>(clamp(x, vec4<f32>(-LARGEST), vec4<f32>(LARGEST)));
    }
    return vec4<f16>(x);
}

fn stage_eight(to: u32, x: Eight) {
    let both = floats(x);
    tile[to] = half_of(both[0]);
    tile[to + 1u] = half_of(both[1]);
}

fn stage(to: u32, x: Position) {
    stage_eight(to, x.a);
    if CHUNKS > 1u {
        stage_eight(to + 8u, x.b);
    }
    if CHUNKS > 2u {
        stage_eight(to + 16u, x.c);
    }
    if CHUNKS > 3u {
        stage_eight(to + 24u, x.d);
    }
}

// Puts 32 elements of a query, which begins at `source`, into shared memory, scaled, padded with zeros.
fn stage_query(to: u32, source: u32, first: u32) {
    let last = params.head_dim - 1u;
    for (var i = 0u; i < 8u; i++) {
        let e = vec4<u32>(first + 4u * i) + vec4<u32>(0u, 1u, 2u, 3u);
        let at = vec4<u32>(source) + min(e, vec4<u32>(last));
        let x = select(vec4<f32>(), vec4<f32>(q[at.x], q[at.y], q[at.z], q[at.w]), e <= vec4<u32>(last));
        tile[to + i] = vec4<f16>(clamp(params.scale * x, vec4<f32>(-LARGEST), vec4<f32>(LARGEST)));
    }
}

// The scores of four positions from `first` on, without those that a pair isn't to attend to.
fn masked(score: vec4<f32>, first: u32, end: u32, last: u32, here: u32) -> vec4<f32> {
    let j = vec4<u32>(first) + vec4<u32>(0u, 1u, 2u, 3u);
    return select(vec4<f32>(LOWEST), score, sees(j, end, vec4<u32>(last), vec4<u32>(here)));
}

// Puts the weights of four scores into shared memory, as f16, and returns their sum.
fn put_weights(at: u32, score: vec4<f32>, top: f32) -> f32 {
    let visible = select(vec4<f32>(), exp(score - (top - RAISE)), score > vec4<f32>(LOWEST));
    weights[at] = vec4<f16>(visible);
    return (visible.x + visible.y) + (visible.z + visible.w);
}

// Scales sums that are where scores were, each invocation half a line.
fn scale_sums(at: u32, factor: f32) {
    workgroupBarrier();
    for (var i = at; i < at + 4u; i++) {
        scores[i] *= factor;
    }
    workgroupBarrier();
}

// Stores sixteen sums of each half of all pairs' elements, those from `e` on of the half. Behind each line of them is what
// they are multiplied with. Adjacent invocations store adjacent elements.
fn put_sums(thread: u32, e: u32) {
    workgroupBarrier();
    let column = thread % 32u;
    let element = column / 16u * CHUNKS * 16u + e + column % 16u;
    for (var i = thread / 32u; i < 64u; i += 4u) {
        let line = i * SCORE_LINE;
        if places[i] != NOWHERE && element < params.head_dim {
            out[places[i] + element] = scores[line + 8u].x * scores[line + column / 4u][column % 4u];
        }
    }
    workgroupBarrier();
}

@compute @workgroup_size(128)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    // Two that share a pair are adjacent in a subgroup.
    let thread = subgroup * 32u + lane;
    let share = params.n_heads / params.n_kv_heads;
    let kv = group.x % params.n_kv_heads;
    let s = group.x / params.n_kv_heads % params.n_sequences;
    let own = sequence_of(s);
    let n_pairs = own.n_rows * share;
    // The last queries attend to the most positions: they begin first.
    let n_units = (params.n_rows * share + 63u) / 64u;
    let unit = n_units - 1u - group.x / params.n_kv_heads / params.n_sequences;
    let first_pair = unit * 64u;
    let origin = own.position;
    let earliest = origin + first_pair / share;
    let last_row = origin + own.n_rows - 1u;
    let latest = select(last_row, origin + (min(first_pair + 64u, n_pairs) - 1u) / share, CAUSAL == 1u);
    // There is nothing beyond the capacity, and nothing to do behind the last pair.
    let end = select(min(latest + 1u, own.capacity), 0u, first_pair >= n_pairs);
    // 32 positions are in one page. Those before the window are not attended to.
    let begin = (earliest + 1u - min(params.window, earliest + 1u)) / 32u * 32u;
    // All pairs attend to the positions before this one that are in their windows.
    let seen = select(end, min(earliest + 1u, end), CAUSAL == 1u);

    // This invocation's pair, half of its positions, and what the pair attends to.
    let pair = first_pair + thread / 2u;
    let half = thread % 2u;
    let own_pair = min(pair, max(n_pairs, 1u) - 1u);
    let own_row = own_pair / share;
    let head = kv * share + own_pair % share;
    let here = origin + own_row;
    let last = select(last_row, here, CAUSAL == 1u);
    let score_at = thread / 2u * SCORE_LINE + half * 4u;
    let weight_at = thread / 2u * WEIGHT_LINE + half * 4u;
    let part = thread % 4u;
    let to = thread / 4u * LINE + part * 2u;
    // This subgroup's half of the pairs; its half of the positions, then of the elements.
    let pairs = subgroup % 2u * 32u;
    let side = subgroup / 2u;
    let own_keys = side * 16u * LINE;
    let own_values = side * CHUNKS * 4u;
    let own_scores = pairs * SCORE_LINE + side * 4u;
    let below = 16u * SCORE_LINE;

    for (var i = thread; i < 576u; i += 128u) {
        scores[i] = vec4<f32>();
    }
    // Without rows, any that there is.
    let row_of_pair = select(own.first_row + own_row, 0u, n_pairs == 0u);
    let source = params.q_offset + row_of_pair * params.q_stride + head * params.q_step;
    let query_at = thread / 2u * QUERY_LINE + half * 8u;
    stage_query(query_at, source, half * 32u);
    workgroupBarrier();
    let zero = coopLoadT<coop_mat16x16<f32, C>>(&scores[0], SCORE_LINE);
    let line = pairs * QUERY_LINE;
    let q00 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line], QUERY_LINE);
    let q01 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 4u], QUERY_LINE);
    let q02 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 8u], QUERY_LINE);
    let q03 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 12u], QUERY_LINE);
    let q10 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 16u * QUERY_LINE], QUERY_LINE);
    let q11 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 16u * QUERY_LINE + 4u], QUERY_LINE);
    let q12 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 16u * QUERY_LINE + 8u], QUERY_LINE);
    let q13 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 16u * QUERY_LINE + 12u], QUERY_LINE);
    workgroupBarrier();
    if CHUNKS > 2u {
        stage_query(query_at, source, 64u + half * 32u);
        workgroupBarrier();
    }
    let q04 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line], QUERY_LINE);
    let q05 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 4u], QUERY_LINE);
    let q06 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 8u], QUERY_LINE);
    let q07 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 12u], QUERY_LINE);
    let q14 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 16u * QUERY_LINE], QUERY_LINE);
    let q15 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 16u * QUERY_LINE + 4u], QUERY_LINE);
    let q16 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 16u * QUERY_LINE + 8u], QUERY_LINE);
    let q17 = coopLoadT<coop_mat16x16<f16, A>>(&tile[line + 16u * QUERY_LINE + 12u], QUERY_LINE);
    workgroupBarrier();

    // Of the first sixteen pairs, and of the others: sixteen elements each.
    var sum00 = zero;
    var sum01 = zero;
    var sum02 = zero;
    var sum03 = zero;
    var sum10 = zero;
    var sum11 = zero;
    var sum12 = zero;
    var sum13 = zero;
    // Of this pair: the bound, and this invocation's part of the sum of weights.
    var top = LOWEST;
    var weight = 0.0;
    var row = 0u;
    var next_keys = Position();
    if begin < end {
        row = row_of(page_of(s, begin), kv, min(begin + thread / 4u, end - 1u));
        next_keys = fetch_keys(row, part);
    }
    for (var j0 = begin; j0 < end; j0 += 32u) {
        if thread == 0u {
            atomicStore(&rescales[0], 0u);
        }
        stage(to, next_keys);
        workgroupBarrier();
        // What is staged next is loaded before anything is computed with what is there.
        let next_values = fetch_values(row, part);
        var score0 = zero;
        var score1 = zero;
        let k0 = coopLoad<coop_mat16x16<f16, B>>(&tile[own_keys], LINE);
        score0 = coopMultiplyAdd(q00, k0, score0);
        score1 = coopMultiplyAdd(q10, k0, score1);
        let k1 = coopLoad<coop_mat16x16<f16, B>>(&tile[own_keys + 4u], LINE);
        score0 = coopMultiplyAdd(q01, k1, score0);
        score1 = coopMultiplyAdd(q11, k1, score1);
        if CHUNKS > 1u {
            let k2 = coopLoad<coop_mat16x16<f16, B>>(&tile[own_keys + 8u], LINE);
            score0 = coopMultiplyAdd(q02, k2, score0);
            score1 = coopMultiplyAdd(q12, k2, score1);
            let k3 = coopLoad<coop_mat16x16<f16, B>>(&tile[own_keys + 12u], LINE);
            score0 = coopMultiplyAdd(q03, k3, score0);
            score1 = coopMultiplyAdd(q13, k3, score1);
        }
        if CHUNKS > 2u {
            let k4 = coopLoad<coop_mat16x16<f16, B>>(&tile[own_keys + 16u], LINE);
            score0 = coopMultiplyAdd(q04, k4, score0);
            score1 = coopMultiplyAdd(q14, k4, score1);
            let k5 = coopLoad<coop_mat16x16<f16, B>>(&tile[own_keys + 20u], LINE);
            score0 = coopMultiplyAdd(q05, k5, score0);
            score1 = coopMultiplyAdd(q15, k5, score1);
        }
        if CHUNKS > 3u {
            let k6 = coopLoad<coop_mat16x16<f16, B>>(&tile[own_keys + 24u], LINE);
            score0 = coopMultiplyAdd(q06, k6, score0);
            score1 = coopMultiplyAdd(q16, k6, score1);
            let k7 = coopLoad<coop_mat16x16<f16, B>>(&tile[own_keys + 28u], LINE);
            score0 = coopMultiplyAdd(q07, k7, score0);
            score1 = coopMultiplyAdd(q17, k7, score1);
        }
        coopStoreT(score0, &scores[own_scores], SCORE_LINE);
        coopStoreT(score1, &scores[own_scores + below], SCORE_LINE);
        workgroupBarrier();
        stage(to, next_values);
        row = row_of(page_of(s, j0 + 32u), kv, min(j0 + 32u + thread / 4u, end - 1u));
        next_keys = fetch_keys(row, part);
        let is_seen = j0 + 32u <= seen && latest - j0 < params.window;
        var s0 = bounded(scores[score_at]);
        var s1 = bounded(scores[score_at + 1u]);
        var s2 = bounded(scores[score_at + 2u]);
        var s3 = bounded(scores[score_at + 3u]);
        if !is_seen {
            let first = j0 + half * 16u;
            s0 = masked(s0, first, end, last, here);
            s1 = masked(s1, first + 4u, end, last, here);
            s2 = masked(s2, first + 8u, end, last, here);
            s3 = masked(s3, first + 12u, end, last, here);
        }
        let highest = max(max(s0, s1), max(s2, s3));
        var now = max(max(highest.x, highest.y), max(highest.z, highest.w));
        now = max(now, subgroupShuffleXor(now, 1u));
        var factor = 1.0;
        if now > top + SLACK {
            factor = exp(top - now);
            // Of nothing, nothing has to be scaled.
            if top > LOWEST {
                atomicStore(&rescales[0], 1u);
            }
            top = now;
        }
        weight *= factor;
        weight += put_weights(weight_at, s0, top);
        weight += put_weights(weight_at + 1u, s1, top);
        weight += put_weights(weight_at + 2u, s2, top);
        weight += put_weights(weight_at + 3u, s3, top);
        let scales_anew = workgroupUniformLoad(&rescales[0]) == 1u;
        if scales_anew {
            coopStoreT(sum00, &scores[own_scores], SCORE_LINE);
            coopStoreT(sum10, &scores[own_scores + below], SCORE_LINE);
            scale_sums(score_at, factor);
            sum00 = coopLoadT<coop_mat16x16<f32, C>>(&scores[own_scores], SCORE_LINE);
            sum10 = coopLoadT<coop_mat16x16<f32, C>>(&scores[own_scores + below], SCORE_LINE);
            workgroupBarrier();
            if CHUNKS > 1u {
                coopStoreT(sum01, &scores[own_scores], SCORE_LINE);
                coopStoreT(sum11, &scores[own_scores + below], SCORE_LINE);
                scale_sums(score_at, factor);
                sum01 = coopLoadT<coop_mat16x16<f32, C>>(&scores[own_scores], SCORE_LINE);
                sum11 = coopLoadT<coop_mat16x16<f32, C>>(&scores[own_scores + below], SCORE_LINE);
                workgroupBarrier();
            }
            if CHUNKS > 2u {
                coopStoreT(sum02, &scores[own_scores], SCORE_LINE);
                coopStoreT(sum12, &scores[own_scores + below], SCORE_LINE);
                scale_sums(score_at, factor);
                sum02 = coopLoadT<coop_mat16x16<f32, C>>(&scores[own_scores], SCORE_LINE);
                sum12 = coopLoadT<coop_mat16x16<f32, C>>(&scores[own_scores + below], SCORE_LINE);
                workgroupBarrier();
            }
            if CHUNKS > 3u {
                coopStoreT(sum03, &scores[own_scores], SCORE_LINE);
                coopStoreT(sum13, &scores[own_scores + below], SCORE_LINE);
                scale_sums(score_at, factor);
                sum03 = coopLoadT<coop_mat16x16<f32, C>>(&scores[own_scores], SCORE_LINE);
                sum13 = coopLoadT<coop_mat16x16<f32, C>>(&scores[own_scores + below], SCORE_LINE);
                workgroupBarrier();
            }
        }
        for (var h = 0u; h < 2u; h++) {
            let w = pairs * WEIGHT_LINE + h * 4u;
            let w0 = coopLoadT<coop_mat16x16<f16, A>>(&weights[w], WEIGHT_LINE);
            let w1 = coopLoadT<coop_mat16x16<f16, A>>(&weights[w + 16u * WEIGHT_LINE], WEIGHT_LINE);
            let v = own_values + h * 16u * LINE;
            let v0 = coopLoadT<coop_mat16x16<f16, B>>(&tile[v], LINE);
            sum00 = coopMultiplyAdd(w0, v0, sum00);
            sum10 = coopMultiplyAdd(w1, v0, sum10);
            if CHUNKS > 1u {
                let v1 = coopLoadT<coop_mat16x16<f16, B>>(&tile[v + 4u], LINE);
                sum01 = coopMultiplyAdd(w0, v1, sum01);
                sum11 = coopMultiplyAdd(w1, v1, sum11);
            }
            if CHUNKS > 2u {
                let v2 = coopLoadT<coop_mat16x16<f16, B>>(&tile[v + 8u], LINE);
                sum02 = coopMultiplyAdd(w0, v2, sum02);
                sum12 = coopMultiplyAdd(w1, v2, sum12);
            }
            if CHUNKS > 3u {
                let v3 = coopLoadT<coop_mat16x16<f16, B>>(&tile[v + 12u], LINE);
                sum03 = coopMultiplyAdd(w0, v3, sum03);
                sum13 = coopMultiplyAdd(w1, v3, sum13);
            }
        }
        workgroupBarrier();
    }
    var total = weight + subgroupShuffleXor(weight, 1u);
    var shrink = 1.0;
    if SINKS == 1u {
        let sink = sinks[head];
        let both = max(top, sink);
        shrink = exp(top - both);
        total = total * shrink + exp(sink - both + RAISE);
    }
    if half == 0u {
        let row_at = params.out_offset + row_of_pair * params.out_stride;
        places[thread / 2u] = select(NOWHERE, row_at + head * params.head_dim, pair < n_pairs);
        scores[score_at + 8u].x = shrink / total;
    }
    coopStoreT(sum00, &scores[own_scores], SCORE_LINE);
    coopStoreT(sum10, &scores[own_scores + below], SCORE_LINE);
    put_sums(thread, 0u);
    if CHUNKS > 1u {
        coopStoreT(sum01, &scores[own_scores], SCORE_LINE);
        coopStoreT(sum11, &scores[own_scores + below], SCORE_LINE);
        put_sums(thread, 16u);
    }
    if CHUNKS > 2u {
        coopStoreT(sum02, &scores[own_scores], SCORE_LINE);
        coopStoreT(sum12, &scores[own_scores + below], SCORE_LINE);
        put_sums(thread, 32u);
    }
    if CHUNKS > 3u {
        coopStoreT(sum03, &scores[own_scores], SCORE_LINE);
        coopStoreT(sum13, &scores[own_scores + below], SCORE_LINE);
        put_sums(thread, 48u);
    }
}
