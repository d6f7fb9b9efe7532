// Sums and maxima over invocations through shared memory: for devices without subgroups.
// A segment is LANES consecutive invocations, a team TEAM of them, powers of two; all invocations must call together.

override WG: u32 = 256u;
override LANES: u32 = 8u;
override TEAM: u32 = 8u;

struct Invocation {
    @builtin(local_invocation_index) index: u32,
}

var<workgroup> exchange: array<vec2<u32>, WG>;

// The invocation's index in the workgroup, as segments are numbered.
fn thread_of(at: Invocation) -> u32 {
    return at.index;
}

fn segment_sum_i32(at: Invocation, value: vec2<i32>) -> vec2<i32> {
    let i = at.index;
    exchange[i] = bitcast<vec2<u32>>(value);
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        if i % LANES < half {
            exchange[i] += exchange[i + half];
        }
        workgroupBarrier();
    }
    let sum = bitcast<vec2<i32>>(exchange[i - i % LANES]);
    workgroupBarrier();
    return sum;
}

fn segment_sum_f32(at: Invocation, value: vec2<f32>) -> vec2<f32> {
    let i = at.index;
    exchange[i] = bitcast<vec2<u32>>(value);
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        if i % LANES < half {
            let sum = bitcast<vec2<f32>>(exchange[i]) + bitcast<vec2<f32>>(exchange[i + half]);
            exchange[i] = bitcast<vec2<u32>>(sum);
        }
        workgroupBarrier();
    }
    let sum = bitcast<vec2<f32>>(exchange[i - i % LANES]);
    workgroupBarrier();
    return sum;
}

// The sums over a segment, of eight invocations or more, of each of eight values: invocation l of it gets that of number l % 8.
fn segment_sum_of_eight(at: Invocation, low: vec4<f32>, high: vec4<f32>) -> f32 {
    let first = vec4<f32>(segment_sum_f32(at, low.xy), segment_sum_f32(at, low.zw));
    let second = vec4<f32>(segment_sum_f32(at, high.xy), segment_sum_f32(at, high.zw));
    return select(first, second, at.index % 8u >= 4u)[at.index % 4u];
}

// The value of invocation `first` of a segment, and those of four from there on.
fn one_of_segment(at: Invocation, value: f32, first: u32) -> f32 {
    return four_of_segment(at, value, first).x;
}

fn four_of_segment(at: Invocation, value: f32, first: u32) -> vec4<f32> {
    let i = at.index;
    exchange[i].x = bitcast<u32>(value);
    workgroupBarrier();
    let at_first = i - i % LANES + first;
    let words = vec4<u32>(
        exchange[at_first].x,
        exchange[at_first + 1u].x,
        exchange[at_first + 2u].x,
        exchange[at_first + 3u].x,
    );
    workgroupBarrier();
    return bitcast<vec4<f32>>(words);
}

// The largest value of four consecutive invocations, and their sum.
fn four_max_f32(at: Invocation, value: f32) -> f32 {
    let four = four_of_segment(at, value, at.index % LANES / 4u * 4u);
    return max(max(four.x, four.y), max(four.z, four.w));
}

fn four_sum_f32(at: Invocation, value: f32) -> f32 {
    let four = four_of_segment(at, value, at.index % LANES / 4u * 4u);
    return (four.x + four.y) + (four.z + four.w);
}

fn segment_max_f32(at: Invocation, value: f32) -> f32 {
    let i = at.index;
    exchange[i].x = bitcast<u32>(value);
    workgroupBarrier();
    var top = value;
    for (var j = 0u; j < LANES; j++) {
        top = max(top, bitcast<f32>(exchange[i - i % LANES + j].x));
    }
    workgroupBarrier();
    return top;
}

// The largest value of eight consecutive invocations.
fn eight_max_f32(at: Invocation, value: f32) -> f32 {
    let i = at.index;
    exchange[i].x = bitcast<u32>(value);
    workgroupBarrier();
    var top = value;
    for (var j = 0u; j < 8u; j++) {
        top = max(top, bitcast<f32>(exchange[i / 8u * 8u + j].x));
    }
    workgroupBarrier();
    return top;
}

// The sum over eight consecutive invocations.
fn eight_sum_i32(at: Invocation, value: i32) -> i32 {
    let i = at.index;
    exchange[i].x = bitcast<u32>(value);
    workgroupBarrier();
    var sum = 0;
    for (var j = 0u; j < 8u; j++) {
        sum += bitcast<i32>(exchange[i / 8u * 8u + j].x);
    }
    workgroupBarrier();
    return sum;
}

// A sum and a maximum at once.
fn workgroup_sum_and_max(at: Invocation, value: f32, other: f32) -> vec2<f32> {
    let i = at.index;
    exchange[i] = bitcast<vec2<u32>>(vec2<f32>(value, other));
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half /= 2u) {
        if i < half {
            let own = bitcast<vec2<f32>>(exchange[i]);
            let next = bitcast<vec2<f32>>(exchange[i + half]);
            exchange[i] = bitcast<vec2<u32>>(vec2<f32>(own.x + next.x, max(own.y, next.y)));
        }
        workgroupBarrier();
    }
    let both = bitcast<vec2<f32>>(exchange[0]);
    workgroupBarrier();
    return both;
}

fn workgroup_sum_f32(at: Invocation, value: f32) -> f32 {
    let i = at.index;
    exchange[i].x = bitcast<u32>(value);
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half /= 2u) {
        if i < half {
            let sum = bitcast<f32>(exchange[i].x) + bitcast<f32>(exchange[i + half].x);
            exchange[i].x = bitcast<u32>(sum);
        }
        workgroupBarrier();
    }
    let sum = bitcast<f32>(exchange[0].x);
    workgroupBarrier();
    return sum;
}

fn workgroup_sum_i32(at: Invocation, value: i32) -> i32 {
    let i = at.index;
    exchange[i].x = bitcast<u32>(value);
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half /= 2u) {
        if i < half {
            exchange[i].x += exchange[i + half].x;
        }
        workgroupBarrier();
    }
    let sum = bitcast<i32>(exchange[0].x);
    workgroupBarrier();
    return sum;
}

fn workgroup_max_f32(at: Invocation, value: f32) -> f32 {
    let i = at.index;
    exchange[i].x = bitcast<u32>(value);
    workgroupBarrier();
    for (var half = WG / 2u; half > 0u; half /= 2u) {
        if i < half {
            let top = max(bitcast<f32>(exchange[i].x), bitcast<f32>(exchange[i + half].x));
            exchange[i].x = bitcast<u32>(top);
        }
        workgroupBarrier();
    }
    let top = bitcast<f32>(exchange[0].x);
    workgroupBarrier();
    return top;
}

// The same for teams of TEAM invocations, which take rows side by side, of f32 and a maximum at once.
fn team_sum_and_max(at: Invocation, value: f32, other: f32) -> vec2<f32> {
    let i = at.index;
    exchange[i] = bitcast<vec2<u32>>(vec2<f32>(value, other));
    workgroupBarrier();
    for (var half = TEAM / 2u; half > 0u; half /= 2u) {
        if i % TEAM < half {
            let own = bitcast<vec2<f32>>(exchange[i]);
            let next = bitcast<vec2<f32>>(exchange[i + half]);
            exchange[i] = bitcast<vec2<u32>>(vec2<f32>(own.x + next.x, max(own.y, next.y)));
        }
        workgroupBarrier();
    }
    let both = bitcast<vec2<f32>>(exchange[i - i % TEAM]);
    workgroupBarrier();
    return both;
}

fn team_sum_i32(at: Invocation, value: i32) -> i32 {
    let i = at.index;
    exchange[i].x = bitcast<u32>(value);
    workgroupBarrier();
    for (var half = TEAM / 2u; half > 0u; half /= 2u) {
        if i % TEAM < half {
            exchange[i].x += exchange[i + half].x;
        }
        workgroupBarrier();
    }
    let sum = bitcast<i32>(exchange[i - i % TEAM].x);
    workgroupBarrier();
    return sum;
}
