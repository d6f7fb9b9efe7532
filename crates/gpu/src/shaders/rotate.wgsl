// out[t] ← H(signs · x[t]), its heads in the order of a matrix; or, INVERSE, out[t] ← signs · H(x[t])
//
// Agrees with `sterna_kernels::hadamard`.
// Shapes: rows of `width` f32, signs [width]; H is applied to runs of BLOCK, a power of two. One workgroup of WG for a run
// of a row. `io_*.wgsl` has `x` and `out`.

override WG: u32 = 128u;
override BLOCK: u32 = 256u;
override INVERSE: u32 = 0u;
// 1: head i of the input, one of every group and then the next of each, goes where all of a group are side by side.
override REGROUP: u32 = 0u;

@group(0) @binding(0) var<storage, read> signs: array<f32>;

struct Params {
    width: u32,
    n_rows: u32,
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    out_stride: u32,
    n_groups: u32,
    n_each: u32,
    head_dim: u32,
    scale: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

var<workgroup> run: array<f32, BLOCK>;

// The element of the input that element `i` of the row is.
fn source_of(i: u32) -> u32 {
    if REGROUP == 0u {
        return i;
    }
    let place = i / params.head_dim;
    let head = place % params.n_each * params.n_groups + place / params.n_each;
    return head * params.head_dim + i % params.head_dim;
}

@compute @workgroup_size(WG)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let n_runs = params.width / BLOCK;
    let index = group.y * groups.x + group.x;
    let is_own = index < n_runs * params.n_rows;
    let row = min(index / n_runs, params.n_rows - 1u);
    let first = index % n_runs * BLOCK;
    let begin = params.x_offset + row * params.x_stride;
    for (var i = thread; i < BLOCK; i += WG) {
        var value = load(begin + source_of(first + i));
        if INVERSE == 0u {
            value *= signs[first + i];
        }
        run[i] = value;
    }
    workgroupBarrier();
    for (var half = 1u; half < BLOCK; half *= 2u) {
        for (var i = thread; i < BLOCK / 2u; i += WG) {
            let a = i / half * 2u * half + i % half;
            let x = run[a];
            let y = run[a + half];
            run[a] = x + y;
            run[a + half] = x - y;
        }
        workgroupBarrier();
    }
    if !is_own {
        return;
    }
    let to = params.out_offset + row * params.out_stride + first;
    for (var i = thread; i < BLOCK; i += WG) {
        var value = run[i] * params.scale;
        if INVERSE == 1u {
            value *= signs[first + i];
        }
        out[to + i] = value;
    }
}
