// Activations that every workgroup rounds for itself, normalised first if NORM is 1: one row of f32, in
// vectors of four. Agrees with quantize.wgsl, but that the largest magnitude of a whole row is taken
// before it is normalised. Needs `reduce_*.wgsl` and `exact.wgsl`.

// 0: a scale for the row. 1: for blocks of 256. 2: for blocks of 32.
override SCALING: u32 = 0u;
override NORM: u32 = 0u;
// Vectors of 16 int8 of the row, padded to blocks of 256.
override Q_LEN: u32 = 16u;

@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> norm: array<vec4<f32>>;

var<workgroup> own_q: array<vec4<u32>, Q_LEN>;
var<workgroup> own_steps: array<vec2<u32>, Q_LEN>;
// Largest magnitudes of runs of 32.
var<workgroup> maxima: array<f32, Q_LEN>;
// Of the whole row, for SCALING 0.
var<private> own_scale: f32;
var<private> own_sum: i32;

// Elements 4i to 4i + 3, weighted but not yet normalised; zeros behind the end.
fn weighted(i: u32) -> vec4<f32> {
    if 4u * i >= params.k {
        return vec4<f32>();
    }
    let v = x[params.x_offset / 4u + i];
    if NORM == 1u {
        return v * norm[i];
    }
    return v;
}

fn largest(v: vec4<f32>) -> f32 {
    let a = abs(v);
    return max(max(a.x, a.y), max(a.z, a.w));
}

fn pack(codes: vec4<i32>) -> u32 {
    let bytes = bitcast<vec4<u32>>(codes) & vec4<u32>(255u);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

// An invocation to a vector. Eight in a row have a run of 32.
fn prepare(at: Invocation) {
    let thread = thread_of(at);
    let vectors = Q_LEN * 4u;
    var inverse = 1.0;
    if NORM == 1u || SCALING == 0u {
        var squares = 0.0;
        var top = 0.0;
        for (var i = thread; i < vectors; i += WG) {
            if 4u * i < params.k {
                let v = x[params.x_offset / 4u + i];
                squares += dot(v, v);
                top = max(top, largest(weighted(i)));
            }
        }
        let both = workgroup_sum_and_max(at, squares, top);
        if NORM == 1u {
            inverse = 1.0 / sqrt(both.x / f32(params.k) + params.eps);
        }
        own_scale = divide(1.0, max(both.y * inverse, 1e-5)) * 127.0;
    }
    if SCALING == 0u {
        var sum = 0;
        for (var i = thread; i < vectors; i += WG) {
            let codes = vec4<i32>(round(weighted(i) * inverse * own_scale));
            sum += codes.x + codes.y + codes.z + codes.w;
            own_q[i / 4u][i % 4u] = pack(codes);
        }
        // Its barriers make the codes visible too.
        own_sum = workgroup_sum_i32(at, sum);
        return;
    }
    // Every invocation has a vector in every turn, so that all take part in exchanges.
    for (var first = 0u; first < vectors; first += WG) {
        let i = first + thread;
        let top = eight_max_f32(at, largest(weighted(i) * inverse));
        if i < vectors && i % 8u == 0u {
            maxima[i / 8u] = top;
        }
    }
    workgroupBarrier();
    for (var first = 0u; first < vectors; first += WG) {
        let i = first + thread;
        let run = min(i, vectors - 1u) / 8u;
        var top = maxima[run];
        if SCALING == 1u {
            for (var j = 0u; j < 8u; j++) {
                top = max(top, maxima[run / 8u * 8u + j]);
            }
        }
        let scale = divide(1.0, max(top, 1e-20)) * 127.0;
        let codes = vec4<i32>(round(weighted(i) * inverse * scale));
        let sum = eight_sum_i32(at, codes.x + codes.y + codes.z + codes.w);
        if i < vectors {
            own_q[i / 4u][i % 4u] = pack(codes);
            if i % 8u == 0u {
                let step = divide(1.0, scale);
                own_steps[i / 8u] = vec2<u32>(bitcast<u32>(step), bitcast<u32>(sum));
            }
        }
    }
    workgroupBarrier();
}

fn q_at(token: u32, i: u32) -> vec4<u32> {
    return own_q[i];
}

// Scale and sum of the row.
fn row_step(token: u32) -> vec2<u32> {
    return vec2<u32>(bitcast<u32>(own_scale), bitcast<u32>(own_sum));
}

// Step and sum of a run.
fn run_step(token: u32, run: u32) -> vec2<u32> {
    return own_steps[run];
}
