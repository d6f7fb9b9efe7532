// experts[t] ← the experts with the best scores[t], best first; weights[t] ← what becomes of what they give
//
// Agrees with `sterna_kernels::experts`: exactly in which experts they are, unless sigmoids choose them with a bias,
// which differ in the last places, and except for exponentials and the order of the sum in their weights.
// Shapes: scores [n_rows, n_experts] as bits of f32; experts, weights [n_rows, n_used]; bias [n_experts].
// Workgroups of WG, one for each row.

// 1: weights are sigmoids of scores. 0: their softmax.
override SIGMOID: u32 = 0u;
// 1: a bias is added to the sigmoids that experts are chosen by.
override BIAS: u32 = 0u;

@group(0) @binding(0) var<storage, read> scores: array<u32>;
@group(0) @binding(1) var<storage, read> bias: array<f32>;
@group(0) @binding(2) var<storage, read_write> experts: array<u32>;
@group(0) @binding(3) var<storage, read_write> weights: array<f32>;

struct Params {
    n_rows: u32,
    n_experts: u32,
    n_used: u32,
    // Whether weights are those among the chosen experts: 0 or 1.
    renormalised: u32,
    scores_offset: u32,
    scores_stride: u32,
    // Groups of adjacent experts, and how many of them a row is sent to; one of one if there are none.
    n_groups: u32,
    n_used_groups: u32,
    scale: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

// What experts of the row are chosen by: larger for a better one.
var<workgroup> ranks: array<u32, 1024>;
var<workgroup> group_ranks: array<u32, 1024>;

// The rank of a group: of its best expert, or of the sum of its best two.
fn rank_of_group(g: u32) -> u32 {
    let size = params.n_experts / params.n_groups;
    var first = LEAST;
    var second = LEAST;
    for (var i = g * size; i < (g + 1u) * size; i++) {
        second = max(second, min(first, ranks[i]));
        first = max(first, ranks[i]);
    }
    if SIGMOID == 1u && size > 1u {
        return rank_of(bitcast<u32>(score_of(first) + score_of(second)));
    }
    return first;
}

// How many experts are better than `expert`.
fn better_than(expert: u32) -> u32 {
    let own = ranks[expert];
    var n = 0u;
    for (var i = 0u; i < params.n_experts; i++) {
        let other = ranks[i];
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
        let bits = scores[begin + i];
        own_best = max(own_best, score_of(rank_of(bits)));
        ranks[i] = rank_of(bits);
        if SIGMOID == 1u && BIAS == 1u {
            ranks[i] = rank_of(bitcast<u32>(sigmoid(bitcast<f32>(bits)) + bias[i]));
        }
    }
    let best = workgroup_max_f32(at, own_best);
    workgroupBarrier();
    if params.n_groups > 1u {
        for (var g = thread; g < params.n_groups; g += WG) {
            group_ranks[g] = rank_of_group(g);
        }
        workgroupBarrier();
        for (var i = thread; i < params.n_experts; i += WG) {
            let g = i / (params.n_experts / params.n_groups);
            let own = group_ranks[g];
            var n = 0u;
            for (var j = 0u; j < params.n_groups; j++) {
                n += u32(group_ranks[j] > own || (group_ranks[j] == own && j < g));
            }
            if n >= params.n_used_groups {
                ranks[i] = LEAST;
            }
        }
        workgroupBarrier();
    }
    var own_sum = 0.0;
    for (var i = thread; i < params.n_experts; i += WG) {
        let place = better_than(i);
        let score = bitcast<f32>(scores[begin + i]);
        var weight = exp(score - best);
        if SIGMOID == 1u {
            weight = sigmoid(score);
        }
        let chosen = place < params.n_used;
        if chosen && live {
            experts[row * params.n_used + place] = i;
            weights[row * params.n_used + place] = weight;
        }
        own_sum += select(0.0, weight, chosen || params.renormalised == 0u);
    }
    var sum = workgroup_sum_f32(at, own_sum);
    if SIGMOID == 1u {
        sum = select(1.0, sum + 1e-6, params.renormalised == 1u);
    }
    storageBarrier();
    for (var i = thread; i < params.n_used; i += WG) {
        if live {
            weights[row * params.n_used + i] = weights[row * params.n_used + i] / sum * params.scale;
        }
    }
}
