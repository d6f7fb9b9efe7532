// The same rows, of a product by trits whose parts are added up as they are read, in their order, as gemm_coop_sum.wgsl does.
//
// There are no norms. Shapes: partial [ADDED, rows, stride]; scales of the rows of trits; steps of the rows, as quantize.wgsl
// stores them. Needs `exact.wgsl`.

@group(0) @binding(0) var<storage, read> partial: array<f32>;
@group(0) @binding(3) var<storage, read> scales: array<f32>;
@group(0) @binding(4) var<storage, read> steps: array<vec2<u32>>;

// How many parts there are.
override ADDED: u32 = 1u;

// The last quotient, and what it is of: an exact division takes long.
var<private> known: vec2<f32>;
var<private> quotient: f32;

fn input_at(i: u32) -> f32 {
    let step = steps[i / params.stride];
    let own = vec2<f32>(scales[params.begin + i % params.stride], bitcast<f32>(step.x));
    var sum = 0.0;
    for (var part = 0u; part < ADDED; part++) {
        sum += partial[part * params.part_len + i];
    }
    if any(known != own) {
        known = own;
        quotient = divide(own.x, own.y);
    }
    // Of the sums with 1 + c / 4 instead of c - 1.
    return f32(i32(4.0 * sum) - 5 * bitcast<i32>(step.y)) * quotient;
}

fn q_weight_at(i: u32) -> f32 {
    return 1.0;
}

fn k_weight_at(i: u32) -> f32 {
    return 1.0;
}
