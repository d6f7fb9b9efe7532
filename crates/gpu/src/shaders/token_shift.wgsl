// out[t] ← (1 − f) · x[t] + f · x[t − 1], or the other way round, with f = factors + added[t]
//
// Agrees with `sterna_kernels::rwkv::token_shift`.
// Shapes: rows of x, added and out [width], those of a sequence as `sequences.wgsl` says; factors [width]; previous,
// the row before the first of each sequence in the table, [n_all, width].
// One element per invocation; workgroups of 64, as many for each sequence.

// 1: factors are the share of the position itself. 0: of the one before.
override ITSELF: u32 = 0u;
override ADDED: u32 = 0u;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> previous: array<f32>;
@group(0) @binding(2) var<storage, read> factors: array<f32>;
@group(0) @binding(3) var<storage, read> added: array<f32>;
@group(0) @binding(4) var<storage, read> sequences: array<u32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

struct Params {
    width: u32,
    n_sequences: u32,
    // The most of a sequence.
    n_rows: u32,
    sequences: u32,
    previous_offset: u32,
    x_offset: u32,
    x_stride: u32,
    added_offset: u32,
    added_stride: u32,
    out_offset: u32,
    out_stride: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let n_groups = (params.n_rows * params.width + 63u) / 64u;
    let group_at = group.y * groups.x + group.x;
    let s = group_at / n_groups;
    if s >= params.n_sequences {
        return;
    }
    let sequence = sequence_of(s);
    let at = group_at % n_groups * 64u + thread;
    if at / params.width >= sequence.n_rows {
        return;
    }
    let t = sequence.first_row + at / params.width;
    let i = at % params.width;
    let here = params.x_offset + t * params.x_stride + i;
    let own = x[here];
    var before = previous[params.previous_offset + s * params.width + i];
    if t > sequence.first_row {
        before = x[here - params.x_stride];
    }
    var factor = factors[i];
    if ADDED == 1u {
        factor += added[params.added_offset + t * params.added_stride + i];
    }
    let first = select(own, before, ITSELF == 1u);
    let second = select(before, own, ITSELF == 1u);
    out[params.out_offset + t * params.out_stride + i] = first + (second - first) * factor;
}
