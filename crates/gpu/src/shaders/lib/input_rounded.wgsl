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
var<workgroup> maxima: array<f32, WG>;

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

// An invocation to a run of 32.
fn prepare(at: Invocation) {
    let thread = thread_of(at);
    let runs = Q_LEN / 2u;
    var squares = 0.0;
    var top = 0.0;
    for (var i = thread; i < runs * 8u; i += WG) {
        if 4u * i < params.k {
            let v = x[params.x_offset / 4u + i];
            squares += dot(v, v);
            top = max(top, largest(weighted(i)));
        }
    }
    var inverse = 1.0;
    if NORM == 1u {
        inverse = 1.0 / sqrt(workgroup_sum_f32(at, squares) / f32(params.k) + params.eps);
    }
    var scale = 0.0;
    if SCALING == 0u {
        scale = divide(1.0, max(workgroup_max_f32(at, top) * inverse, 1e-5)) * 127.0;
    }
    var total = 0;
    for (var first = 0u; first < runs; first += WG) {
        let run = first + thread;
        var v: array<vec4<f32>, 8>;
        var most = 0.0;
        for (var i = 0u; i < 8u; i++) {
            v[i] = weighted(run * 8u + i) * inverse;
            most = max(most, largest(v[i]));
        }
        if SCALING == 1u {
            maxima[thread] = most;
            workgroupBarrier();
            for (var i = 0u; i < 8u; i++) {
                most = max(most, maxima[thread / 8u * 8u + i]);
            }
            workgroupBarrier();
        }
        if SCALING != 0u {
            scale = divide(1.0, max(most, 1e-20)) * 127.0;
        }
        var sum = 0;
        var words: array<u32, 8>;
        for (var i = 0u; i < 8u; i++) {
            let codes = vec4<i32>(round(v[i] * scale));
            sum += codes.x + codes.y + codes.z + codes.w;
            words[i] = pack(codes);
        }
        if run < runs {
            own_q[2u * run] = vec4<u32>(words[0], words[1], words[2], words[3]);
            own_q[2u * run + 1u] = vec4<u32>(words[4], words[5], words[6], words[7]);
            if SCALING != 0u {
                let step = divide(1.0, scale);
                own_steps[run] = vec2<u32>(bitcast<u32>(step), bitcast<u32>(sum));
            }
        }
        total += sum;
    }
    if SCALING == 0u {
        let sum = workgroup_sum_i32(at, total);
        if thread == 0u {
            own_steps[0] = vec2<u32>(bitcast<u32>(scale), bitcast<u32>(sum));
        }
    }
    workgroupBarrier();
}

fn q_at(token: u32, i: u32) -> vec4<u32> {
    return own_q[i];
}

// Scale and sum of the row.
fn row_step(token: u32) -> vec2<u32> {
    return own_steps[0];
}

// Step and sum of a run.
fn run_step(token: u32, run: u32) -> vec2<u32> {
    return own_steps[run];
}
