// c + Σ a[i] · b[i] over four signed bytes, one by one.
fn dot4(a: u32, b: u32, c: i32) -> i32 {
    let shifts = vec4<u32>(24u, 16u, 8u, 0u);
    let x = bitcast<vec4<i32>>(vec4<u32>(a) << shifts) >> vec4<u32>(24u);
    let y = bitcast<vec4<i32>>(vec4<u32>(b) << shifts) >> vec4<u32>(24u);
    return dot(x, y) + c;
}
