
// The same over sixteen.
fn dot16(a: vec4<u32>, b: vec4<u32>, c: i32) -> i32 {
    return dot4(a.w, b.w, dot4(a.z, b.z, dot4(a.y, b.y, dot4(a.x, b.x, c))));
}
