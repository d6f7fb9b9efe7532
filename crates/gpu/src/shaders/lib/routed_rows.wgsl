// A matrix for every route, a row of activations and one of its experts: that of the expert. The grid has a row
// of workgroups for each route.

// The expert of each route.
@group(0) @binding(5) var<storage, read> experts: array<u32>;

// Routes of a row of activations.
override ROUTES_PER_ROW: u32 = 1u;
// The experts whose matrices are in this piece: how many, and the first.
override EXPERTS: u32 = 1u;
override FIRST_EXPERT: u32 = 0u;
// Rows from the beginning of one expert's matrix to that of the next.
override EXPERT_STRIDE: u32 = 1u;

var<private> own_route: u32;
// From the first of this piece; too large for those of other pieces.
var<private> own_expert: u32;

fn find_matrix(at: Invocation, group: Group) {
    own_route = params.token + group.id.y;
    own_expert = experts[own_route] - FIRST_EXPERT;
}

fn place_of(group: Group) -> u32 {
    return group.id.x;
}

// Nothing, if the matrix is in another piece.
fn share_of(len: u32) -> u32 {
    return select(0u, len, own_expert < EXPERTS);
}

fn matrix_begin() -> u32 {
    return share_of(own_expert * EXPERT_STRIDE);
}

fn row_in(t: u32) -> u32 {
    return own_route / ROUTES_PER_ROW;
}

fn row_out(t: u32) -> u32 {
    return own_route;
}
