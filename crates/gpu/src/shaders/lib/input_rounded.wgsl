// Activations that every workgroup quantizes for itself, normalised first if NORM is 1: a row of f32, or with SCALING 0
// TOKENS rows, in vectors of four. Agrees with quantize.wgsl, except for the order in which squares are added. Needs
// `reduce_*.wgsl` and `exact.wgsl`.

// 0: a scale for the row. 1: for blocks of 256. 2: for blocks of 32.
override SCALING: u32 = 0u;
override NORM: u32 = 0u;
// Vectors of 16 int8 of a row, padded to blocks of 256.
override Q_LEN: u32 = 16u;
// The same of all rows, with eight more for gaps in each.
override Q_ROOM: u32 = 24u;
// Runs of 32 that have a step of their own, or rows.
override RUNS: u32 = 8u;
// Vectors of four floats that an invocation takes of one row, at most 8.
override TURNS: u32 = 1u;

@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> norm: array<vec4<f32>>;

// Vectors in the order in which adjacent lanes read them, which the kernel defines, so that they are in
// different banks.
var<workgroup> own_q: array<vec4<u32>, Q_ROOM>;
var<workgroup> own_steps: array<vec2<u32>, RUNS>;
// Largest magnitudes of runs.
var<workgroup> maxima: array<f32, RUNS>;
// Of a row that is alone, for SCALING 0.
var<private> own_scale: f32;
var<private> own_sum: i32;
// Of several rows, at most 8: what they are multiplied with to be normalised, and the largest magnitudes before that.
var<workgroup> inverses: array<f32, 8>;
var<workgroup> tops: array<f32, 8>;

// Where vector i is.
fn slot_of(i: u32) -> u32 {
    let at = part_of(i);
    return at.x * part_len() + at.y;
}

// Whether divisions are exact: not behind a norm, whose sum of squares isn't; they take as long as a read of shared memory.
fn is_exact() -> bool {
    return NORM == 0u;
}

fn inverse_of(x: f32) -> f32 {
    if is_exact() {
        return divide(1.0, x);
    }
    return 1.0 / x;
}

// Vectors of a part, and its share of the gaps.
fn part_len() -> u32 {
    return Q_LEN / PARTS + 8u / PARTS;
}

fn largest(v: vec4<f32>) -> f32 {
    let a = abs(v);
    return max(max(a.x, a.y), max(a.z, a.w));
}

fn pack(codes: vec4<i32>) -> u32 {
    let bytes = bitcast<vec4<u32>>(codes) & vec4<u32>(255u);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

// Where those of a row begin.
fn row_slot(t: u32) -> u32 {
    return t * (Q_LEN + 8u);
}

// Which of the rows a token is.
fn place_of_token(token: u32) -> u32 {
    return select(token - params.token, 0u, TOKENS == 1u);
}

// Several rows, with SCALING 0. A team takes a row at a time, and reads it twice.
fn prepare_rows(at: Invocation) {
    let team = thread_of(at) / TEAM;
    let lane = thread_of(at) % TEAM;
    let vectors = Q_LEN * 4u;
    let last = params.k / 4u - 1u;
    for (var first = 0u; first < TOKENS; first += WG / TEAM) {
        let t = min(first + team, TOKENS - 1u);
        let is_own = first + team < TOKENS;
        let begin = (params.x_offset + row_in(t) * params.x_stride) / 4u;
        var squares = 0.0;
        var top = 0.0;
        for (var turn = 0u; turn < vectors; turn += TEAM) {
            let i = turn + lane;
            var v = select(vec4<f32>(), x[begin + min(i, last)], i <= last);
            squares += dot(v, v);
            if NORM == 1u {
                v *= norm[min(i, last)];
            }
            top = max(top, largest(v));
        }
        let both = team_sum_and_max(at, squares, top);
        if is_own && lane == 0u {
            let inverse = 1.0 / sqrt(both.x / f32(params.k) + params.eps);
            inverses[t] = select(1.0, inverse, NORM == 1u);
            tops[t] = both.y;
        }
    }
    workgroupBarrier();
    for (var first = 0u; first < TOKENS; first += WG / TEAM) {
        let t = min(first + team, TOKENS - 1u);
        let is_own = first + team < TOKENS;
        let begin = (params.x_offset + row_in(t) * params.x_stride) / 4u;
        let inverse = inverses[t];
        let scale = inverse_of(max(tops[t] * inverse, 1e-5)) * 127.0;
        var sum = 0;
        for (var turn = 0u; turn < vectors; turn += TEAM) {
            let i = turn + lane;
            var v = select(vec4<f32>(), x[begin + min(i, last)], i <= last);
            if NORM == 1u {
                v = v * norm[min(i, last)] * inverse;
            }
            let codes = vec4<i32>(round(v * scale));
            if is_own && i < vectors {
                own_q[row_slot(t) + slot_of(i / 4u)][i % 4u] = pack(codes);
            }
            sum += codes.x + codes.y + codes.z + codes.w;
        }
        sum = team_sum_i32(at, sum);
        if is_own && lane == 0u {
            own_steps[t] = vec2<u32>(bitcast<u32>(scale), bitcast<u32>(sum));
        }
    }
    workgroupBarrier();
}

// Whether `prepare` has something to do.
const PREPARES: bool = true;

// An invocation owns the vectors thread, thread + WG and so on. Eight consecutive ones are a run of 32.
fn prepare(at: Invocation) {
    if TOKENS > 1u {
        prepare_rows(at);
        return;
    }
    let thread = thread_of(at);
    let vectors = Q_LEN * 4u;
    let last = params.k / 4u - 1u;
    let begin = (params.x_offset + row_in(0u) * params.x_stride) / 4u;
    // All are loaded before the first is used.
    var v = array<vec4<f32>, 8>();
    for (var j = 0u; j < TURNS; j++) {
        v[j] = x[begin + min(j * WG + thread, last)];
    }
    var weights = array<vec4<f32>, 8>();
    if NORM == 1u {
        for (var j = 0u; j < TURNS; j++) {
            weights[j] = norm[min(j * WG + thread, last)];
        }
    }
    var squares = 0.0;
    var top = 0.0;
    for (var j = 0u; j < TURNS; j++) {
        v[j] = select(vec4<f32>(), v[j], j * WG + thread <= last);
        if NORM == 1u {
            squares += dot(v[j], v[j]);
            v[j] *= weights[j];
        }
        if SCALING == 0u {
            top = max(top, largest(v[j]));
        } else {
            let i = j * WG + thread;
            let of_run = eight_max_f32(at, largest(v[j]));
            if i < vectors && i % 8u == 0u {
                maxima[i / 8u] = of_run;
            }
        }
    }
    var inverse = 1.0;
    if NORM == 1u || SCALING == 0u {
        // Its barrier makes the maxima visible, too.
        let both = workgroup_sum_and_max(at, squares, top);
        top = both.y;
        if NORM == 1u {
            inverse = 1.0 / sqrt(both.x / f32(params.k) + params.eps);
        }
    } else {
        workgroupBarrier();
    }
    if SCALING == 0u {
        own_scale = inverse_of(max(top * inverse, 1e-5)) * 127.0;
        var sum = 0;
        for (var j = 0u; j < TURNS; j++) {
            let i = j * WG + thread;
            let codes = vec4<i32>(round(v[j] * inverse * own_scale));
            sum += codes.x + codes.y + codes.z + codes.w;
            if i < vectors {
                own_q[slot_of(i / 4u)][i % 4u] = pack(codes);
            }
        }
        // Its barrier makes the codes visible, too.
        own_sum = workgroup_sum_i32(at, sum);
        return;
    }
    for (var j = 0u; j < TURNS; j++) {
        let i = j * WG + thread;
        let run = min(i, vectors - 1u) / 8u;
        var of_block = maxima[run];
        if SCALING == 1u {
            for (var m = 0u; m < 8u; m++) {
                of_block = max(of_block, maxima[run / 8u * 8u + m]);
            }
        }
        let scale = inverse_of(max(of_block * inverse, 1e-20)) * 127.0;
        let step = inverse_of(scale);
        let codes = vec4<i32>(round(v[j] * inverse * scale));
        let sum = eight_sum_i32(at, codes.x + codes.y + codes.z + codes.w);
        if i < vectors {
            own_q[slot_of(i / 4u)][i % 4u] = pack(codes);
            if i % 8u == 0u {
                own_steps[i / 8u] = vec2<u32>(bitcast<u32>(step), bitcast<u32>(sum));
            }
        }
    }
    workgroupBarrier();
}

fn q_at(token: u32, i: u32) -> vec4<u32> {
    return own_q[row_slot(place_of_token(token)) + slot_of(i)];
}

// What vector v of a row of trits is multiplied with in quarter `quarter` of its block.
fn q_quarter(token: u32, v: u32, quarter: u32) -> vec4<u32> {
    return own_q[row_slot(place_of_token(token)) + quarter * part_len() + v];
}

// Scale and sum of a row.
fn row_step(token: u32) -> vec2<u32> {
    if TOKENS > 1u {
        return own_steps[place_of_token(token)];
    }
    return vec2<u32>(bitcast<u32>(own_scale), bitcast<u32>(own_sum));
}

// Step and sum of a run.
fn run_step(token: u32, run: u32) -> vec2<u32> {
    return own_steps[run];
}
