// Heads as caches store them. The shader provides element e of the head in a slot, zero beyond its end: `fn
// element(slot: u32, e: u32) -> f32`.

// 0: f32. 1: f16. 2: int8.
override CACHE: u32 = 0u;

// Scale of the 32 elements from `first` on: max|x| / 127 as an f16. Only int8 has one.
fn block_scale(slot: u32, first: u32) -> f32 {
    var top = 0.0;
    for (var i = 0u; i < 32u; i++) {
        top = max(top, abs(element(slot, first + i)));
    }
    return unpack2x16float(pack2x16float(vec2<f32>(min(divide(top, 127.0), 65504.0), 0.0))).x;
}

// Four elements as int8, of a block with this scale.
fn codes_of(x: vec4<f32>, scale: f32) -> vec4<f32> {
    let inverse = select(0.0, divide(1.0, scale), scale > 0.0);
    return clamp(round(x * inverse), vec4<f32>(-127.0), vec4<f32>(127.0));
}

// The four elements of a head from e on.
fn elements(slot: u32, e: u32) -> vec4<f32> {
    return vec4<f32>(element(slot, e), element(slot, e + 1u), element(slot, e + 2u), element(slot, e + 3u));
}

// Word i of a cached head; `scale` is that of its block.
fn word(slot: u32, i: u32, scale: f32) -> u32 {
    if CACHE == 0u {
        return bitcast<u32>(element(slot, i));
    }
    if CACHE == 1u {
        return pack2x16float(vec2<f32>(element(slot, 2u * i), element(slot, 2u * i + 1u)));
    }
    let codes = vec4<i32>(codes_of(elements(slot, 4u * i), scale));
    let bytes = bitcast<vec4<u32>>(codes) & vec4<u32>(255u);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}
