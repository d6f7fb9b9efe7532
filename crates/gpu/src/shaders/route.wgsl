// experts[t] ← the experts with the best scores[t], best first; weights[t] ← their probabilities
//
// Agrees with `sterna_kernels::experts`: exactly in which experts they are, and except for exponentials and the
// order of the sum in their weights. Of equal scores that of the lower expert is better, and NaN is the least.
// Shapes: scores [n_rows, n_experts] as bits of f32; experts, weights [n_rows, n_used].
// Workgroups of WG, one for each row.

@group(0) @binding(0) var<storage, read> scores: array<u32>;
@group(0) @binding(1) var<storage, read_write> experts: array<u32>;
@group(0) @binding(2) var<storage, read_write> weights: array<f32>;

struct Params {
    n_rows: u32,
    n_experts: u32,
    n_used: u32,
    // Whether probabilities are those among the chosen experts: 0 or 1.
    renormalised: u32,
    scores_offset: u32,
    scores_stride: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// A number that is larger for a better score.
fn rank_of(bits: u32) -> u32 {
    let number = select(bits, 0xff800000u, (bits & 0x7fffffffu) > 0x7f800000u);
    return select(number | 0x80000000u, ~number, number >> 31u == 1u);
}

// The score that is ranked so.
fn score_of(rank: u32) -> f32 {
    return bitcast<f32>(select(~rank, rank & 0x7fffffffu, rank >> 31u == 1u));
}

// How many scores of the row that begins at `begin` are better than that of `expert`.
fn better_than(begin: u32, expert: u32) -> u32 {
    let own = rank_of(scores[begin + expert]);
    var n = 0u;
    for (var i = 0u; i < params.n_experts; i++) {
        let other = rank_of(scores[begin + i]);
        n += u32(other > own || (other == own && i < expert));
    }
    return n;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    // Workgroups beyond the last row repeat it, and write nothing.
    let live = group_of(group) < params.n_rows;
    let row = min(group_of(group), params.n_rows - 1u);
    let begin = params.scores_offset + row * params.scores_stride;
    let thread = thread_of(at);
    var own_best = -3.4e38;
    for (var i = thread; i < params.n_experts; i += WG) {
        own_best = max(own_best, score_of(rank_of(scores[begin + i])));
    }
    let best = workgroup_max_f32(at, own_best);
    var own_sum = 0.0;
    for (var i = thread; i < params.n_experts; i += WG) {
        let place = better_than(begin, i);
        let weight = exp(bitcast<f32>(scores[begin + i]) - best);
        let chosen = place < params.n_used;
        if chosen && live {
            experts[row * params.n_used + place] = i;
            weights[row * params.n_used + place] = weight;
        }
        own_sum += select(0.0, weight, chosen || params.renormalised == 0u);
    }
    let sum = workgroup_sum_f32(at, own_sum);
    storageBarrier();
    for (var i = thread; i < params.n_used; i += WG) {
        if live {
            weights[row * params.n_used + i] /= sum;
        }
    }
}
