@group(0) @binding(5) var<storage, read> experts: array<u32>;

