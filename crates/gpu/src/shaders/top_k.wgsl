// The best `k` of every 1024 candidates, best first; of two that are equal, the one with the lower id
//
// Agrees with the order of the CPU's sampler: NaN is the worst, -0 equals 0.
// Shapes: FIRST 1: logits rows of [n] f32, whose ids are their numbers. FIRST 0: candidates [samplers, n] of
// value and id. States as `samplers.wgsl` says; best [samplers, ceil(n / 1024), k] of value and id; padded with
// candidates of -∞ with no id.
// Workgroups of 256, one per 1024 candidates of a sampler.

override FIRST: u32 = 1u;

@group(0) @binding(0) var<storage, read> logits: array<u32>;
@group(0) @binding(1) var<storage, read> states: array<u32>;
@group(0) @binding(2) var<storage, read_write> best: array<vec2<u32>>;

struct Params {
    sampler: u32,
    n: u32,
    offset: u32,
    stride: u32,
    k: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Order of the value, and the id: the best has the largest order, then the smallest id.
var<workgroup> candidates: array<vec2<u32>, 1024>;

const NONE: vec2<u32> = vec2<u32>(0u, 0xffffffffu);

// Maps a float to an integer of the same order. NaN is 0, below -∞.
fn order_of(bits: u32) -> u32 {
    if (bits & 0x7fffffffu) > 0x7f800000u {
        return 0u;
    }
    if bits == 0x80000000u {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

fn bits_of(order: u32) -> u32 {
    if order == 0u {
        return 0xff800000u;
    }
    return select(~order, order & 0x7fffffffu, order >= 0x80000000u);
}

fn comes_before(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    var first = group.y * params.n;
    if FIRST == 1u {
        first = params.offset + sampler_of(group.y).row * params.stride;
    }
    for (var i = thread; i < 1024u; i += 256u) {
        let id = group.x * 1024u + i;
        var candidate = NONE;
        if id < params.n {
            if FIRST == 1u {
                candidate = vec2<u32>(order_of(logits[first + id]), id);
            } else {
                candidate = vec2<u32>(order_of(logits[2u * (first + id)]), logits[2u * (first + id) + 1u]);
            }
        }
        candidates[i] = candidate;
    }
    workgroupBarrier();
    if params.k == 1u {
        for (var half = 512u; half > 0u; half /= 2u) {
            for (var i = thread; i < half; i += 256u) {
                if comes_before(candidates[i + half], candidates[i]) {
                    candidates[i] = candidates[i + half];
                }
            }
            workgroupBarrier();
        }
    } else {
        // Bitonic: runs of `run` are sorted in alternating directions, then merged.
        for (var run = 2u; run <= 1024u; run *= 2u) {
            for (var reach = run / 2u; reach > 0u; reach /= 2u) {
                for (var pair = thread; pair < 512u; pair += 256u) {
                    let a = pair / reach * reach * 2u + pair % reach;
                    let b = a + reach;
                    let one = candidates[a];
                    let other = candidates[b];
                    let falling = (a & run) == 0u;
                    if comes_before(other, one) == falling {
                        candidates[a] = other;
                        candidates[b] = one;
                    }
                }
                workgroupBarrier();
            }
        }
    }
    let to = (group.y * ((params.n + 1023u) / 1024u) + group.x) * params.k;
    for (var i = thread; i < params.k; i += 256u) {
        let candidate = candidates[i];
        best[to + i] = vec2<u32>(bits_of(candidate.x), candidate.y);
    }
}
