// groups ← the routes ordered by expert, and tiles of at most TOKENS routes to one expert
//
// Shapes: experts [n_routes]; groups [n_tiles, 3] of expert, first route and number of routes, and then [n_routes], the
// ordered routes, those of an expert in any order. There are enough tiles; those that aren't needed have no routes and
// an expert that doesn't exist.
// One workgroup of 256.

override TOKENS: u32 = 64u;

@group(0) @binding(0) var<storage, read> experts: array<u32>;
@group(0) @binding(1) var<storage, read_write> groups: array<u32>;

struct Params {
    n_routes: u32,
    n_experts: u32,
    n_tiles: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Routes of each expert, and how many of them have been placed.
var<workgroup> counts: array<atomic<u32>, 1024>;
var<workgroup> placed: array<atomic<u32>, 1024>;
// Routes to experts before each.
var<workgroup> begins: array<u32, 1024>;

@compute @workgroup_size(256)
fn main(@builtin(local_invocation_index) thread: u32) {
    for (var i = thread; i < params.n_experts; i += 256u) {
        atomicStore(&counts[i], 0u);
        atomicStore(&placed[i], 0u);
    }
    for (var i = thread; i < params.n_tiles; i += 256u) {
        groups[3u * i] = 0xffffffffu;
        groups[3u * i + 1u] = 0u;
        groups[3u * i + 2u] = 0u;
    }
    storageBarrier();
    workgroupBarrier();
    for (var i = thread; i < params.n_routes; i += 256u) {
        let expert = experts[i];
        if expert < params.n_experts {
            atomicAdd(&counts[expert], 1u);
        }
    }
    workgroupBarrier();
    for (var expert = thread; expert < params.n_experts; expert += 256u) {
        var begin = 0u;
        var tile = 0u;
        for (var i = 0u; i < expert; i++) {
            let n = atomicLoad(&counts[i]);
            begin += n;
            tile += (n + TOKENS - 1u) / TOKENS;
        }
        begins[expert] = begin;
        let n = atomicLoad(&counts[expert]);
        for (var first = 0u; first < n && tile < params.n_tiles; first += TOKENS) {
            groups[3u * tile] = expert;
            groups[3u * tile + 1u] = begin + first;
            groups[3u * tile + 2u] = min(n - first, TOKENS);
            tile += 1u;
        }
    }
    workgroupBarrier();
    for (var i = thread; i < params.n_routes; i += 256u) {
        let expert = experts[i];
        if expert < params.n_experts {
            let at = begins[expert] + atomicAdd(&placed[expert], 1u);
            groups[3u * params.n_tiles + at] = i;
        }
    }
}
