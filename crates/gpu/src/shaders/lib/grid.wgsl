// Where a workgroup is in its grid. Separate from the invocation: browsers' compilers treat a struct as
// non-uniform if one of its members is, and allow no barrier in non-uniform control flow.
struct Group {
    @builtin(workgroup_id) id: vec3<u32>,
    @builtin(num_workgroups) count: vec3<u32>,
}

// The index of a workgroup in a grid that was folded to stay within the limit per dimension.
fn group_of(group: Group) -> u32 {
    return group.id.y * group.count.x + group.id.x;
}
