// Where trits are, and what sums of them times int8 come to.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<f32>;

// The products of rows `row` and `row + 1` with a token, of the sums with 1 + c / 4 instead of c - 1.
fn result_of(row: u32, token: u32, sums: vec2<f32>) -> vec2<f32> {
    let step = steps[token];
    let act = bitcast<f32>(step.x);
    let exact = vec2<f32>(vec2<i32>(4.0 * sums) - vec2<i32>(5 * bitcast<i32>(step.y)));
    let first = scales[matrix_begin() + stored_row(row)];
    let second = scales[matrix_begin() + stored_row(row + 1u)];
    // Most matrices have one scale for all rows, and an exact division takes long.
    var quotients = vec2<f32>(divide(first, act));
    if second != first {
        quotients.y = divide(second, act);
    }
    return exact * quotients;
}
