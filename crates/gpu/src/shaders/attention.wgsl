// out[t, h] ← Σ_j softmax_j(scale · q[t, h] · k[j, h']) · v[j, h'] over the positions j that t attends to,
// for many rows
//
// Agrees with `sterna_kernels::attention`, except for what that rounds to make products exact, the order of
// sums, and exponentials.
// Shapes: q and out rows of [n_heads, head_dim]; keys and values as `cache_*.wgsl` says, in pages as
// `pages.wgsl` says.
// Workgroups of 128 per 32 pairs of a query and one of the heads that share keys, as many for every sequence
// as for one of `n_rows`: those behind its last pair do nothing. 32 positions of a page at a time, of
// which 32 elements of keys or values are in shared memory; an invocation has four pairs' scores with two of
// the positions, then their sums of two of the elements. Positions that no pair attends to are skipped.
// A workgroup sums PIECE of the runs of values: wider heads take several, which compute the same scores. With
// SPLIT 1 there is one for each split of positions, too; `out` are partial results then, as those of
// attention_split_kv.wgsl: [sequences, n_rows, n_heads, n_splits, head_dim + 2].

// Runs of 32 elements of a head.
override CHUNKS: u32 = 4u;
// Of these, how many a workgroup sums, at most 8.
override PIECE: u32 = 4u;
// 1 if positions are divided among workgroups.
override SPLIT: u32 = 0u;
// How many of those of queries are kept in shared memory: all, or one at a time.
override KEPT: u32 = 1u;

@group(1) @binding(0) var<uniform> params: Params;

// 32 rows of eight vectors, nine apart, so that rows are in different banks.
const TILE: u32 = 288u;
override QUERIES: u32 = KEPT * TILE;
var<workgroup> queries: array<vec4<f32>, QUERIES>;
// Of keys, then of values.
var<workgroup> tile: array<vec4<f32>, TILE>;
// For each position those of eight groups of four pairs: scores, then weights.
var<workgroup> weights: array<vec4<f32>, 256>;

// Puts a chunk of a sequence's 32 queries from `first_pair` on into a slot, scaled, padded with zeros.
fn stage_queries(thread: u32, kv: u32, own: Sequence, first_pair: u32, chunk: u32, slot: u32) {
    let d = params.head_dim;
    let share = params.n_heads / params.n_kv_heads;
    for (var i = thread; i < 256u; i += 128u) {
        let pair = min(first_pair + i / 8u, own.n_rows * share - 1u);
        let e0 = chunk * 32u + i % 8u * 4u;
        let row = own.first_row + pair / share;
        let source = params.q_offset + row * params.q_stride + (kv * share + pair % share) * params.q_step;
        var x = vec4<f32>();
        for (var c = 0u; c < 4u; c++) {
            if e0 + c < d {
                x[c] = q[source + e0 + c];
            }
        }
        queries[slot * TILE + i / 8u * 9u + i % 8u] = params.scale * x;
    }
}

// Puts this invocation's eight elements of a position into the tile.
fn stage(thread: u32, x: Eight) {
    let both = floats(x);
    let to = thread / 4u * 9u + thread % 4u * 2u;
    tile[to] = both[0];
    tile[to + 1u] = both[1];
}

@compute @workgroup_size(128)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let d = params.head_dim;
    let share = params.n_heads / params.n_kv_heads;
    let kv = group.x % params.n_kv_heads;
    let s = group.x / params.n_kv_heads % params.n_sequences;
    let own = sequence_of(s);
    let n_pairs = own.n_rows * share;
    // The last queries attend to the most positions: they begin first.
    let n_units = (params.n_rows * share + 31u) / 32u;
    let unit = n_units - 1u - group.x / params.n_kv_heads / params.n_sequences;
    let first_pair = unit * 32u;
    if first_pair >= n_pairs {
        return;
    }
    let origin = own.position;
    let earliest = origin + first_pair / share;
    let last_row = origin + own.n_rows - 1u;
    let latest = select(last_row, origin + (min(first_pair + 32u, n_pairs) - 1u) / share, CAUSAL == 1u);
    var begin = earliest + 1u - min(params.window, earliest + 1u);
    // There is nothing beyond the capacity.
    var end = min(latest + 1u, own.capacity);
    let n_pieces = (CHUNKS + PIECE - 1u) / PIECE;
    let split = group.y / n_pieces;
    if SPLIT == 1u {
        begin = max(begin, split * params.split_len);
        end = min(end, (split + 1u) * params.split_len);
    }
    // The chunks of values that this workgroup sums.
    let from_chunk = group.y % n_pieces * PIECE;
    let to_chunk = min(from_chunk + PIECE, CHUNKS);
    // 32 positions are in one page. Those before the window are not attended to.
    begin = begin / 32u * 32u;
    var next_page = page_of(s, begin);
    let last_run = (d + 7u) / 8u - 1u;
    // Four pairs from 4 · quad on; positions, and pairs of elements, by column.
    let quad = thread / 16u;
    let column = thread % 16u;
    let pairs = min(
        vec4<u32>(first_pair + 4u * quad) + vec4<u32>(0u, 1u, 2u, 3u),
        vec4<u32>(n_pairs - 1u),
    );
    let here = origin + pairs / share;
    let last = select(vec4<u32>(last_row), here, CAUSAL == 1u);

    var top = vec4<f32>(LOWEST);
    var weight = vec4<f32>();
    // Of the four pairs: two elements of each chunk that is summed.
    var sums: array<vec4<f32>, 16>;
    if KEPT > 1u || CHUNKS == 1u {
        for (var c = 0u; c < CHUNKS; c++) {
            stage_queries(thread, kv, own, first_pair, c, c);
        }
    }
    for (var j0 = begin; j0 < end; j0 += 32u) {
        // What is staged next is loaded before anything is computed with what is there.
        let row = row_of(next_page, kv, min(j0 + thread / 4u, end - 1u));
        next_page = page_of(s, j0 + 32u);
        var next = key_words(row, min(thread % 4u, last_run));
        var score = array<vec4<f32>, 2>();
        for (var c = 0u; c < CHUNKS; c++) {
            workgroupBarrier();
            stage(thread, next);
            var slot = c;
            if KEPT == 1u {
                slot = 0u;
                if CHUNKS > 1u {
                    stage_queries(thread, kv, own, first_pair, c, 0u);
                }
            }
            workgroupBarrier();
            if c + 1u < CHUNKS {
                next = key_words(row, min((c + 1u) * 4u + thread % 4u, last_run));
            } else {
                next = value_words(row, min(from_chunk * 4u + thread % 4u, last_run));
            }
            for (var i = 0u; i < 8u; i++) {
                let query = slot * TILE + quad * 36u + i;
                let q0 = queries[query];
                let q1 = queries[query + 9u];
                let q2 = queries[query + 18u];
                let q3 = queries[query + 27u];
                let k0 = tile[column * 9u + i];
                let k1 = tile[(column + 16u) * 9u + i];
                score[0] += vec4<f32>(dot(q0, k0), dot(q1, k0), dot(q2, k0), dot(q3, k0));
                score[1] += vec4<f32>(dot(q0, k1), dot(q1, k1), dot(q2, k1), dot(q3, k1));
            }
        }
        var seen = array<vec4<bool>, 2>();
        for (var i = 0u; i < 2u; i++) {
            seen[i] = sees(vec4<u32>(j0 + column + 16u * i), end, last, here);
            score[i] = select(vec4<f32>(LOWEST), bounded(score[i]), seen[i]);
            weights[(column + 16u * i) * 8u + quad] = score[i];
        }
        workgroupBarrier();
        var now = top;
        for (var i = 0u; i < 32u; i++) {
            now = max(now, weights[i * 8u + quad]);
        }
        let shrink = exp(top - now);
        top = now;
        weight *= shrink;
        for (var c = 0u; c < 2u * PIECE; c++) {
            sums[c] *= shrink;
        }
        workgroupBarrier();
        for (var i = 0u; i < 2u; i++) {
            let visible = select(vec4<f32>(), exp(score[i] - now), seen[i]);
            weights[(column + 16u * i) * 8u + quad] = visible;
        }
        for (var c = from_chunk; c < to_chunk; c++) {
            stage(thread, next);
            workgroupBarrier();
            if c + 1u < to_chunk {
                next = value_words(row, min((c + 1u) * 4u + thread % 4u, last_run));
            }
            let sum = 2u * (c - from_chunk);
            var first = sums[sum];
            var second = sums[sum + 1u];
            for (var i = 0u; i < 32u; i++) {
                let w = weights[i * 8u + quad];
                let four = tile[i * 9u + column / 2u];
                let v = select(four.xy, four.zw, column % 2u == 1u);
                first += w * v.x;
                second += w * v.y;
                if c == from_chunk {
                    weight += w;
                }
            }
            sums[sum] = first;
            sums[sum + 1u] = second;
            if c + 1u < to_chunk {
                workgroupBarrier();
            }
        }
    }
    for (var r = 0u; r < 4u; r++) {
        let pair = first_pair + 4u * quad + r;
        if pair < n_pairs {
            let head = kv * share + pair % share;
            var total = weight[r];
            var shrink = 1.0;
            if SINKS == 1u && SPLIT == 0u {
                let sink = sinks[head];
                let both = max(top[r], sink);
                shrink = exp(top[r] - both);
                total = total * shrink + exp(sink - both);
            }
            var to = params.out_offset + (own.first_row + pair / share) * params.out_stride + head * d;
            if SPLIT == 1u {
                let state = s * params.n_rows + pair / share;
                to = ((state * params.n_heads + head) * params.n_splits + split) * (d + 2u);
                if from_chunk == 0u && column == 0u {
                    out[to + d] = total;
                    out[to + d + 1u] = top[r];
                }
                // Splits are weighted when they are combined.
                total = 1.0;
            }
            for (var c = 0u; c < 2u * (to_chunk - from_chunk); c++) {
                let e = (from_chunk + c / 2u) * 32u + 2u * column + c % 2u;
                if e < d {
                    out[to + e] = sums[c][r] * shrink / total;
                }
            }
        }
    }
}
