// What sums of trits times int8 come to, for x_of_sums.wgsl, as coop_sums_ternary.wgsl has it.

@group(0) @binding(6) var<storage, read> scales: array<f32>;

// The last quotient, and what it is of.
var<private> known: vec2<f32>;
var<private> quotient: f32;

// The products of four rows from `row` on with a token.
fn result_of_sums(token: u32, row: u32, sums: vec4<f32>) -> vec4<f32> {
    let step = steps[token];
    let exact = vec4<f32>(vec4<i32>(4.0 * sums) - vec4<i32>(5 * bitcast<i32>(step.y)));
    var result = vec4<f32>();
    for (var i = 0u; i < 4u; i++) {
        let own = vec2<f32>(scales[params.begin + row + i], bitcast<f32>(step.x));
        if any(known != own) {
            known = own;
            quotient = divide(own.x, own.y);
        }
        result[i] = exact[i] * quotient;
    }
    return result;
}
