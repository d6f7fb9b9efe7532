// Where a workgroup is in its grid. Apart from the invocation: browsers' compilers take a struct to differ
// between invocations if one of its members does, and allow no barrier behind a condition that depends on it.
struct Group {
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
}

// The number of a workgroup in a grid that was folded to stay within the limit of a dimension.
fn group_of(group: Group) -> u32 {
    return group.id.y * group.count.x + group.id.x;
}
