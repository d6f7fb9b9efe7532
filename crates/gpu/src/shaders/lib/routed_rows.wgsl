// A matrix for every route, a row of activations and one of its experts: that of the expert. The grid has a row
// of workgroups for each route.

// The expert of each route.
@group(0) @binding(5) var<storage, read> experts: array<u32>;

fn find_matrix(at: Invocation, group: Group) {
    own_route = params.token + group.id.y;
    own_expert = experts[own_route] - FIRST_EXPERT;
}
