// Where trits are, and what sums of them times int8 come to.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<f32>;

// Quotients, and the scales of two rows and of a token that they are of: an exact division takes long. By slot.
var<private> known: array<vec3<f32>, 4>;
var<private> quotients: array<vec2<f32>, 4>;

// The products of rows `row` and `row + 1` with a token, of the sums with 1 + c / 4 instead of c - 1. Callers that alternate
// between tokens have a slot for each.
fn result_of(row: u32, token: u32, sums: vec2<f32>, slot: u32) -> vec2<f32> {
    let step = steps[token];
    let exact = vec2<f32>(vec2<i32>(4.0 * sums) - vec2<i32>(5 * bitcast<i32>(step.y)));
    let own = vec3<f32>(
        scales[matrix_begin() + stored_row(row)],
        scales[matrix_begin() + stored_row(row + 1u)],
        bitcast<f32>(step.x),
    );
    if any(known[slot] != own) {
        known[slot] = own;
        quotients[slot] = vec2<f32>(divide(own.x, own.z));
        // Most matrices have one scale for all rows.
        if own.y != own.x {
            quotients[slot].y = divide(own.y, own.z);
        }
    }
    return exact * quotients[slot];
}
