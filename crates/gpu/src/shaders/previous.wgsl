// out[s] ← the row before the first of sequence s, which its state has; the state becomes its last row
//
// Shapes: rows of x [width], those of a sequence as `sequences.wgsl` says; out [n_all, width], of all sequences in the table; states as
// `states.wgsl` says, [width] from `first` on. Both states may be in one slot: an element is read and written by one
// invocation.
// One element per invocation; workgroups of 64, as many for each sequence.

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> sequences: array<u32>;
@group(0) @binding(2) var<storage, read_write> states: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

struct Params {
    width: u32,
    n_sequences: u32,
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    sequences: u32,
    places: u32,
    first: u32,
    state_len: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

@compute @workgroup_size(64)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let n_groups = (params.width + 63u) / 64u;
    let at = group.y * groups.x + group.x;
    let s = at / n_groups;
    let i = at % n_groups * 64u + thread;
    if s >= params.n_sequences || i >= params.width {
        return;
    }
    let own = sequence_of(s);
    let states_at = states_of(s) + params.first + i;
    var before = 0.0;
    if own.position > 0u {
        before = states[state_at(states_at, own.position)];
    }
    out[params.out_offset + s * params.width + i] = before;
    let last = own.first_row + max(own.n_rows, 1u) - 1u;
    states[state_at(states_at, own.position + own.n_rows)] = x[params.x_offset + last * params.x_stride + i];
}
