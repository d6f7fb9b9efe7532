// The entry point of two shaders whose workgroups follow one another.

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    if group.id.x < params.first_groups {
        first_main(at, group);
    } else {
        second_main(at, Group(group.id - vec3<u32>(params.first_groups, 0u, 0u), group.count));
    }
}
