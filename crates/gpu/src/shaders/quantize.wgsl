// Quantizes rows of f32 to int8, normalised first if NORM is 1.
//
// Agrees with `sterna_kernels::quant::q8` (SCALING 0: a scale for a row, 127 / max(|x|, 1e-5)) and with
// the blocks of `sterna_kernels::gemm` (SCALING 1: blocks of 256; 2: blocks of 32): the same bits for
// the same floats. With NORM the sum of squares is added in another order.
// Shapes: x [n_rows, width]; q [n_rows, padded / 4] words of four int8, padded with zeros; steps [n_rows] for
// SCALING 0, of scale and sum; else [n_rows, padded / 32] of the step of the block and the sum of these 32
// values. `padded` is a multiple of 256. With HALVES also halves [n_rows, padded / 4] of four values as products by
// cooperative matrices take them: as f16, in the order in which these kernels unpack codes, the second after the third.
// Needs `half_range.wgsl`.
// `parts` workgroups of WG, a multiple of 64, per row: one, unless blocks are quantized without a norm.

// 0, 1 or 2.
override SCALING: u32 = 0u;
override NORM: u32 = 0u;
override HALVES: u32 = 0u;

@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> q: array<u32>;
@group(0) @binding(3) var<storage, read_write> steps: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> halves: array<vec2<u32>>;

struct Params {
    width: u32,
    padded: u32,
    n_rows: u32,
    x_offset: u32,
    x_stride: u32,
    parts: u32,
    eps: f32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Maxima of runs of 32, to be shared by blocks of 256.
var<workgroup> maxima: array<f32, 128>;

fn element(begin: u32, i: u32) -> f32 {
    if i >= params.width {
        return 0.0;
    }
    return x[begin + i];
}

// Word i of the row that begins at `begin`: four elements, zeros beyond its end.
fn word_at(begin: u32, i: u32) -> vec4<f32> {
    return vec4<f32>(
        element(begin, 4u * i),
        element(begin, 4u * i + 1u),
        element(begin, 4u * i + 2u),
        element(begin, 4u * i + 3u),
    );
}

fn weight_of(i: u32) -> f32 {
    if NORM == 0u || i >= params.width {
        return 1.0;
    }
    return weight[i];
}

// What word i is multiplied with after it is divided by the root mean square.
fn weights_at(i: u32) -> vec4<f32> {
    return vec4<f32>(
        weight_of(4u * i),
        weight_of(4u * i + 1u),
        weight_of(4u * i + 2u),
        weight_of(4u * i + 3u),
    );
}

fn largest(v: vec4<f32>) -> f32 {
    let a = abs(v);
    return max(max(a.x, a.y), max(a.z, a.w));
}

fn pack(codes: vec4<i32>) -> u32 {
    let bytes = bitcast<vec4<u32>>(codes) & vec4<u32>(255u);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let row = group_of(group) / params.parts;
    // Workgroups beyond the last row repeat it, and write nothing.
    let live = row < params.n_rows;
    let begin = params.x_offset + min(row, params.n_rows - 1u) * params.x_stride;
    let thread = thread_of(at);
    let part = group_of(group) % params.parts;
    let words = params.padded / 4u;
    // An invocation's first word stays in registers. Most rows have no more for each.
    let own = part * WG + thread;
    let own_word = word_at(begin, own);
    let own_weights = weights_at(own);
    var inverse = 1.0;
    if NORM == 1u {
        var squares = dot(own_word, own_word);
        for (var i = own + WG; i < words; i += WG) {
            let v = word_at(begin, i);
            squares += dot(v, v);
        }
        let mean = workgroup_sum_f32(at, squares) / f32(params.width);
        inverse = 1.0 / sqrt(mean + params.eps);
    }
    let own_values = own_word * inverse * own_weights;
    if SCALING == 0u {
        var top = max(1e-5, largest(own_values));
        for (var i = own + WG; i < words; i += WG) {
            top = max(top, largest(word_at(begin, i) * inverse * weights_at(i)));
        }
        let scale = divide(1.0, workgroup_max_f32(at, top)) * 127.0;
        var sum = 0;
        for (var i = own; i < words; i += WG) {
            var v = own_values;
            if i != own {
                v = word_at(begin, i) * inverse * weights_at(i);
            }
            let codes = vec4<i32>(round(v * scale));
            sum += codes.x + codes.y + codes.z + codes.w;
            if live {
                q[row * words + i] = pack(codes);
            }
        }
        let total = workgroup_sum_i32(at, sum);
        if live && thread == 0u {
            steps[row] = vec2<u32>(bitcast<u32>(scale), bitcast<u32>(total));
        }
        return;
    }
    // Every invocation has a word in every iteration, so that all take part in exchanges.
    for (var turn = 0u; turn * params.parts * WG < words; turn++) {
        let i = turn * params.parts * WG + own;
        var v = own_values;
        if turn > 0u {
            v = word_at(begin, i) * inverse * weights_at(i);
        }
        var top = eight_max_f32(at, largest(v));
        if SCALING == 1u {
            if thread % 8u == 0u {
                maxima[thread / 8u] = top;
            }
            workgroupBarrier();
            for (var j = 0u; j < 8u; j++) {
                top = max(top, maxima[thread / 64u * 8u + j]);
            }
            workgroupBarrier();
        }
        let scale = divide(1.0, max(top, 1e-20)) * 127.0;
        let codes = vec4<i32>(round(v * scale));
        let sum = eight_sum_i32(at, codes.x + codes.y + codes.z + codes.w);
        if live && i < words {
            q[row * words + i] = pack(codes);
            let step = divide(1.0, scale);
            if HALVES == 1u {
                // In f32: steps of small activations would be too small for f16.
                let x = step / SHRINK * vec4<f32>(codes);
                halves[row * words + i] = vec2<u32>(pack2x16float(x.xz), pack2x16float(x.yw));
            }
            if thread % 8u == 0u {
                steps[(row * words + i) / 8u] = vec2<u32>(bitcast<u32>(step), bitcast<u32>(sum));
            }
        }
    }
}
