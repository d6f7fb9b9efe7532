// out ← the row before the first of x, which the state has; the state becomes the last row
//
// Shapes: x [n_rows, width]; out [width]; states [SLOTS, state_len], of which [width] from `first` on; position[0] is
// that of the first row. Both states may be in one slot: an element is read and written by one invocation.
// One element per invocation; workgroups of 64.

override SLOTS: u32 = 4u;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> position: array<u32>;
@group(0) @binding(2) var<storage, read_write> states: array<f32>;
@group(0) @binding(3) var<storage, read_write> out: array<f32>;

struct Params {
    width: u32,
    n_rows: u32,
    x_offset: u32,
    x_stride: u32,
    position: u32,
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
    let i = (group.y * groups.x + group.x) * 64u + thread;
    if i >= params.width {
        return;
    }
    let now = position[params.position];
    var before = 0.0;
    if now > 0u {
        before = states[now % SLOTS * params.state_len + params.first + i];
    }
    out[i] = before;
    let last = x[params.x_offset + (params.n_rows - 1u) * params.x_stride + i];
    states[(now + params.n_rows) % SLOTS * params.state_len + params.first + i] = last;
}
