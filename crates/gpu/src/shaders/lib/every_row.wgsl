// One matrix for every row of activations. `routed_rows.wgsl` and `chosen_rows.wgsl` have the same for matrices of
// experts.

// Called first.
fn find_matrix(at: Invocation, group: Group) {}

// The index of a workgroup among those of the same rows of activations.
fn place_of(group: Group) -> u32 {
    return group_of(group);
}

// What this workgroup computes of `len`.
fn share_of(len: u32) -> u32 {
    return len;
}

// Rows of the buffers before the matrix, besides those of its piece.
fn matrix_begin() -> u32 {
    return 0u;
}

// Row t of this dispatch: of the activations, and of the output.
fn row_in(t: u32) -> u32 {
    return params.token + t;
}

fn row_out(t: u32) -> u32 {
    return params.token + t;
}
