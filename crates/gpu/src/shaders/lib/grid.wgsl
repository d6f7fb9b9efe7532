// The number of a workgroup in a grid that was folded to stay within the limit of a dimension.
fn group_of(at: Invocation) -> u32 {
    return at.group.y * at.groups.x + at.group.x;
}
