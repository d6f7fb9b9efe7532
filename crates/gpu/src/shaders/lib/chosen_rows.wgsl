// A matrix for every route of one row of activations, as routed_rows.wgsl, but its experts are chosen here: each workgroup
// finds that of its route. The first of each route stores expert and weight for what comes later.
// Agrees with route.wgsl where experts are chosen by their scores alone. Needs `reduce_*.wgsl` and `ranks.wgsl`.

// Bits of f32, one for each expert, from SCORES_AT on.
@group(0) @binding(5) var<storage, read> scores: array<u32>;
@group(0) @binding(6) var<storage, read_write> experts: array<u32>;
@group(0) @binding(7) var<storage, read_write> route_weights: array<f32>;

override N_EXPERTS: u32 = 1u;
override SCORES_AT: u32 = 0u;
// 1: weights are sigmoids of scores. 0: their softmax.
override SIGMOID: u32 = 0u;
// 1: weights are divided by the sum of those of the chosen experts.
override RENORMALISED: u32 = 0u;
// A factor on weights.
override ROUTE_SCALE: f32 = 1.0;

var<workgroup> ranks: array<u32, N_EXPERTS>;
// How many experts are better than each.
var<workgroup> places: array<u32, N_EXPERTS>;
var<workgroup> chosen: u32;
var<workgroup> chosen_weight: f32;

fn find_matrix(at: Invocation, group: Group) {
    let thread = thread_of(at);
    own_route = params.token + group.id.y;
    for (var i = thread; i < N_EXPERTS; i += WG) {
        ranks[i] = rank_of(scores[SCORES_AT + i]);
    }
    workgroupBarrier();
    // A segment compares an expert with all.
    for (var first = 0u; first < N_EXPERTS; first += WG / LANES) {
        let i = first + thread / LANES;
        let own = ranks[min(i, N_EXPERTS - 1u)];
        var better = 0;
        for (var j = thread % LANES; j < N_EXPERTS; j += LANES) {
            let other = ranks[j];
            better += i32(other > own || (other == own && j < i));
        }
        let place = u32(segment_sum_i32(at, vec2<i32>(better, 0)).x);
        if thread % LANES == 0u && i < N_EXPERTS {
            places[i] = place;
            if place == own_route {
                chosen = i;
            }
        }
    }
    own_expert = workgroupUniformLoad(&chosen) - FIRST_EXPERT;
    if group.id.x == 0u {
        store_route(at, thread);
    }
}

// Stores expert and weight of the route.
fn store_route(at: Invocation, thread: u32) {
    var own_best = -3.4e38;
    for (var i = thread; i < N_EXPERTS; i += WG) {
        own_best = max(own_best, score_of(ranks[i]));
    }
    let best = workgroup_max_f32(at, own_best);
    var own_sum = 0.0;
    for (var i = thread; i < N_EXPERTS; i += WG) {
        let score = bitcast<f32>(scores[SCORES_AT + i]);
        var weight = exp(score - best);
        if SIGMOID == 1u {
            weight = sigmoid(score);
        }
        if places[i] == own_route {
            chosen_weight = weight;
        }
        own_sum += select(0.0, weight, places[i] < ROUTES_PER_ROW || RENORMALISED == 0u);
    }
    // Its barriers make the weight visible.
    var sum = workgroup_sum_f32(at, own_sum);
    if SIGMOID == 1u {
        sum = select(1.0, sum + 1e-6, RENORMALISED == 1u);
    }
    if thread == 0u {
        experts[own_route] = chosen;
        route_weights[own_route] = chosen_weight / sum * ROUTE_SCALE;
    }
}
