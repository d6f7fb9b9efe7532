// c + Σ a[i] · b[i] over four signed bytes, in one instruction where the device has one.
fn dot4(a: u32, b: u32, c: i32) -> i32 {
    return dot4I8Packed(a, b) + c;
}
