// Division with the same bits as a CPU: WGSL allows 2.5 units in the last place of error.

// One step towards the correctly rounded a / b from a quotient at most three units off. Exact unless a power
// of two is between the two.
fn nudge(quotient: f32, a: f32, b: f32) -> f32 {
    let bits = bitcast<u32>(quotient);
    let a_bits = bitcast<u32>(a);
    let b_bits = bitcast<u32>(b);
    let mantissa_a = (a_bits & 0x7fffffu) | 0x800000u;
    let mantissa_b = (b_bits & 0x7fffffu) | 0x800000u;
    let mantissa = (bits & 0x7fffffu) | 0x800000u;
    let shift = (a_bits >> 23u) + 150u - (b_bits >> 23u) - (bits >> 23u);
    // The remainder in units of the last place of the product. It is small, so its low 32 bits are all of it.
    let rest = 2 * bitcast<i32>((mantissa_a << shift) - mantissa * mantissa_b);
    let unit = i32(mantissa_b);
    let more = u32(rest > unit) + u32(rest > 3 * unit) + u32(rest > 5 * unit);
    let less = u32(rest < -unit) + u32(rest < -3 * unit) + u32(rest < -5 * unit);
    return bitcast<f32>(bits + more - less);
}

// a / b, correctly rounded, for positive a and b whose quotient is a normal number; with the device's
// precision for all others.
fn divide(a: f32, b: f32) -> f32 {
    let quotient = a / b;
    let exponents = vec3<u32>(bitcast<u32>(a), bitcast<u32>(b), bitcast<u32>(quotient)) >> vec3<u32>(23u);
    // Of a negative number too, the exponent with the sign is out of this range.
    let is_special = any(exponents < vec3<u32>(2u)) || any(exponents > vec3<u32>(253u));
    let once = nudge(quotient, a, b);
    if is_special || (bitcast<u32>(once) ^ bitcast<u32>(quotient)) >> 23u == 0u {
        return select(once, quotient, is_special);
    }
    // There was a power of two between the two.
    return nudge(once, a, b);
}
