// Activations that were quantized beforehand: q [m, q_len] of 16 int8; steps [m] of scale and sum, or [m,
// q_len / 2] of the step and the sum of each run of 32.

@group(0) @binding(2) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> steps: array<vec2<u32>>;

// Whether `prepare` has something to do.
const PREPARES: bool = false;

fn prepare(at: Invocation) {}

// Whether what follows from them is.
fn is_exact() -> bool {
    return true;
}

fn q_at(token: u32, i: u32) -> vec4<u32> {
    return q[token * params.q_len + i];
}

// What vector v of a row of trits is multiplied with in quarter `quarter` of its block.
fn q_quarter(token: u32, v: u32, quarter: u32) -> vec4<u32> {
    return q[token * params.q_len + v / 2u * 8u + v % 2u + 2u * quarter];
}

// Scale and sum of a row.
fn row_step(token: u32) -> vec2<u32> {
    return steps[token];
}

// Step and sum of a run.
fn run_step(token: u32, run: u32) -> vec2<u32> {
    return steps[token * params.q_len / 2u + run];
}
