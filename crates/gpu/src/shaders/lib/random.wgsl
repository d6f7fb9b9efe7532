// Pseudorandom numbers, equal for equal arguments.

// A well-mixed number for a seed, a position and more: two rounds of the generator PCG4D of Jarzynski and
// Olano's "Hash functions for GPU rendering".
fn random(seed: vec2<u32>, position: u32, more: u32) -> u32 {
    var v = vec4<u32>(seed, position, more) * 1664525u + 1013904223u;
    for (var turn = 0u; turn < 2u; turn++) {
        v.x += v.y * v.w;
        v.y += v.z * v.x;
        v.z += v.x * v.y;
        v.w += v.y * v.z;
        v ^= v >> vec4<u32>(16u);
    }
    return v.x;
}
