// Words as f16.

// The f16 with the bits of a word's halves. naga has no bitcast for it; compilers optimise this to one.
fn pair_of(word: u32) -> vec2<f16> {
    return vec2<f16>(unpack2x16float(word));
}

// The four bytes of a word as f16: the first and third, and the second and fourth.
fn halves_of(word: u32) -> vec4<f16> {
    // Offset by 128, they are the last bits of 1024 and more.
    let bytes = word ^ 0x80808080u;
    let even = pair_of((bytes & 0x00ff00ffu) | 0x64006400u);
    let odd = pair_of(((bytes >> 8u) & 0x00ff00ffu) | 0x64006400u);
    return vec4<f16>(even, odd) - vec4<f16>(1152.0h);
}
