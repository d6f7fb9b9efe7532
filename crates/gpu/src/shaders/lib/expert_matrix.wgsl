// The matrix of a route's expert, whichever way that is found: `find_matrix` of routed_rows.wgsl or chosen_rows.wgsl sets
// route and expert.

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
