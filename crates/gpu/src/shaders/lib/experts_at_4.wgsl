@group(0) @binding(4) var<storage, read> experts: array<u32>;

