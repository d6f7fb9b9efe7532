// Where trits are, and what sums of them times int8 come to.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<f32>;

// The last quotients, and the scales of two rows and of a token that they are of: an exact division takes long.
var<private> known: vec3<f32>;
var<private> quotients: vec2<f32>;

// The products of rows `row` and `row + 1` with a token, of the sums with 1 + c / 4 instead of c - 1.
fn result_of(row: u32, token: u32, sums: vec2<f32>) -> vec2<f32> {
    let step = steps[token];
    let exact = vec2<f32>(vec2<i32>(4.0 * sums) - vec2<i32>(5 * bitcast<i32>(step.y)));
    let own = vec3<f32>(
        scales[matrix_begin() + stored_row(row)],
        scales[matrix_begin() + stored_row(row + 1u)],
        bitcast<f32>(step.x),
    );
    if any(known != own) {
        known = own;
        quotients = vec2<f32>(divide(own.x, own.z));
        // Most matrices have one scale for all rows.
        if own.y != own.x {
            quotients.y = divide(own.y, own.z);
        }
    }
    return exact * quotients;
}
