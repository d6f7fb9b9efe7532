// Sums and maxima over invocations by subgroups. Agrees with reduce_shared.wgsl, except for the order in
// which floats are added.
// A segment is LANES consecutive invocations, a team TEAM of them, powers of two no larger than the smallest subgroup;
// all invocations must call together.

override WG: u32 = 256u;
override LANES: u32 = 8u;
override TEAM: u32 = 8u;

struct Invocation {
    @builtin(local_invocation_index) index: u32,
    @builtin(subgroup_invocation_id) lane: u32,
    @builtin(subgroup_size) subgroup_size: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(num_subgroups) subgroups: u32,
}

var<workgroup> exchange: array<u32, WG>;
// Used once in a kernel, so that no barrier has to protect its readers.
var<workgroup> exchange_two: array<vec2<f32>, WG>;

// The invocation's index in the workgroup, as segments are numbered: those of a subgroup are adjacent,
// whatever the device's own order.
fn thread_of(at: Invocation) -> u32 {
    return at.subgroup * at.subgroup_size + at.lane;
}

fn segment_sum_i32(at: Invocation, value: vec2<i32>) -> vec2<i32> {
    var sum = value;
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        sum += subgroupShuffleXor(sum, half);
    }
    return sum;
}

fn segment_sum_f32(at: Invocation, value: vec2<f32>) -> vec2<f32> {
    var sum = value;
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        sum += subgroupShuffleXor(sum, half);
    }
    return sum;
}

// The sums over a segment, of eight invocations or more, of each of eight values: invocation l of it gets that of number l % 8.
fn segment_sum_of_eight(at: Invocation, low: vec4<f32>, high: vec4<f32>) -> f32 {
    let third = (at.lane & 4u) != 0u;
    let four = select(low, high, third) + subgroupShuffleXor(select(high, low, third), 4u);
    let second = (at.lane & 2u) != 0u;
    let two = select(four.xy, four.zw, second) + subgroupShuffleXor(select(four.zw, four.xy, second), 2u);
    let first = (at.lane & 1u) != 0u;
    var sum = select(two.x, two.y, first) + subgroupShuffleXor(select(two.y, two.x, first), 1u);
    for (var half = 8u; half < LANES; half *= 2u) {
        sum += subgroupShuffleXor(sum, half);
    }
    return sum;
}

// The value of invocation `first` of a segment, and those of four from there on.
fn one_of_segment(at: Invocation, value: f32, first: u32) -> f32 {
    return subgroupShuffle(value, at.lane - at.lane % LANES + first);
}

fn four_of_segment(at: Invocation, value: f32, first: u32) -> vec4<f32> {
    return vec4<f32>(
        one_of_segment(at, value, first),
        one_of_segment(at, value, first + 1u),
        one_of_segment(at, value, first + 2u),
        one_of_segment(at, value, first + 3u),
    );
}

// The largest value of four consecutive invocations, and their sum.
fn four_max_f32(at: Invocation, value: f32) -> f32 {
    let top = max(value, subgroupShuffleXor(value, 1u));
    return max(top, subgroupShuffleXor(top, 2u));
}

fn four_sum_f32(at: Invocation, value: f32) -> f32 {
    let sum = value + subgroupShuffleXor(value, 1u);
    return sum + subgroupShuffleXor(sum, 2u);
}

fn segment_max_f32(at: Invocation, value: f32) -> f32 {
    var top = value;
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        top = max(top, subgroupShuffleXor(top, half));
    }
    return top;
}

// The largest value of eight consecutive invocations.
fn eight_max_f32(at: Invocation, value: f32) -> f32 {
    var top = max(value, subgroupShuffleXor(value, 4u));
    top = max(top, subgroupShuffleXor(top, 2u));
    return max(top, subgroupShuffleXor(top, 1u));
}

// The sum over eight consecutive invocations.
fn eight_sum_i32(at: Invocation, value: i32) -> i32 {
    var sum = value + subgroupShuffleXor(value, 4u);
    sum += subgroupShuffleXor(sum, 2u);
    return sum + subgroupShuffleXor(sum, 1u);
}

// A sum and a maximum at once.
fn workgroup_sum_and_max(at: Invocation, value: f32, other: f32) -> vec2<f32> {
    let own = vec2<f32>(subgroupAdd(value), subgroupMax(other));
    if at.lane == 0u {
        exchange_two[at.subgroup] = own;
    }
    workgroupBarrier();
    // Eight at once, whose loads don't wait for one another; the last may be repeated.
    var both = vec2<f32>(0.0, exchange_two[0].y);
    for (var first = 0u; first < at.subgroups; first += 8u) {
        for (var i = first; i < first + 8u; i++) {
            let next = exchange_two[min(i, at.subgroups - 1u)];
            both = vec2<f32>(both.x + select(0.0, next.x, i < at.subgroups), max(both.y, next.y));
        }
    }
    return both;
}

fn workgroup_sum_f32(at: Invocation, value: f32) -> f32 {
    let own = subgroupAdd(value);
    if at.lane == 0u {
        exchange[at.subgroup] = bitcast<u32>(own);
    }
    workgroupBarrier();
    // Every subgroup adds up what all have side by side: one by one, 32 are slower.
    let last = at.subgroups - 1u;
    var sum = 0.0;
    for (var first = 0u; first <= last; first += at.subgroup_size) {
        let next = bitcast<f32>(exchange[min(first + at.lane, last)]);
        sum += select(0.0, next, first + at.lane <= last);
    }
    workgroupBarrier();
    return subgroupAdd(sum);
}

// The last use of `exchange` in a kernel, so that no barrier has to protect its readers.
fn workgroup_sum_i32(at: Invocation, value: i32) -> i32 {
    let own = subgroupAdd(value);
    if at.lane == 0u {
        exchange[at.subgroup] = bitcast<u32>(own);
    }
    workgroupBarrier();
    var sum = 0;
    for (var first = 0u; first < at.subgroups; first += 8u) {
        for (var i = first; i < first + 8u; i++) {
            sum += select(0, bitcast<i32>(exchange[min(i, at.subgroups - 1u)]), i < at.subgroups);
        }
    }
    return sum;
}

fn workgroup_max_f32(at: Invocation, value: f32) -> f32 {
    let own = subgroupMax(value);
    if at.lane == 0u {
        exchange[at.subgroup] = bitcast<u32>(own);
    }
    workgroupBarrier();
    let last = at.subgroups - 1u;
    var top = bitcast<f32>(exchange[min(at.lane, last)]);
    for (var first = at.subgroup_size; first <= last; first += at.subgroup_size) {
        top = max(top, bitcast<f32>(exchange[min(first + at.lane, last)]));
    }
    workgroupBarrier();
    return subgroupMax(top);
}

// The same for teams of TEAM invocations, which take rows side by side, of f32 and a maximum at once.
fn team_sum_and_max(at: Invocation, value: f32, other: f32) -> vec2<f32> {
    var both = vec2<f32>(value, other);
    for (var half = TEAM / 2u; half > 0u; half /= 2u) {
        let next = subgroupShuffleXor(both, half);
        both = vec2<f32>(both.x + next.x, max(both.y, next.y));
    }
    return both;
}

fn team_sum_i32(at: Invocation, value: i32) -> i32 {
    var sum = value;
    for (var half = TEAM / 2u; half > 0u; half /= 2u) {
        sum += subgroupShuffleXor(sum, half);
    }
    return sum;
}
