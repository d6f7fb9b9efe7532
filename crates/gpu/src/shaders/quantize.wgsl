// Quantizes rows of f32 to int8, normalised first if NORM is 1.
//
// Agrees with `sterna_kernels::quant::q8` (SCALING 0: a scale for a row, 127 / max(|x|, 1e-5)) and with
// the blocks of `sterna_kernels::gemm` (SCALING 1: blocks of 256; 2: blocks of 32): the same bits for
// the same floats. With NORM the sum of squares is added in another order, and divisions are those of the device.
// Shapes: x [n_rows, k], weight [k]; q [n_rows, padded / 4] words of four int8, padded with zeros; steps [n_rows] for
// SCALING 0, of scale and sum; else [n_rows, padded / 32] of the step of the block and the sum of these 32
// values. `padded` is a multiple of 256. With HALVES also halves [n_rows, padded / 4] of four values as products by
// cooperative matrices take them: as f16, in the order in which these kernels unpack codes, the second after the third;
// for SCALING 0 those of 256 columns in the order in which columns_ternary.wgsl multiplies them.
// Needs `half_range.wgsl`, `x_*.wgsl` and `weights_*.wgsl`. Rows that x_of_sums.wgsl stores have a norm, and no more words than a
// workgroup has at once; all others have x_read_only.wgsl.
// LANES invocations, from 8 to 32, take a block of 256 at a time: the more, the sooner a row is done, and the fewer, the sooner
// many are. SHARING workgroups of WG, a power of two, at least 64, per row: one, unless blocks are quantized without a norm.

// 0, 1 or 2.
override SCALING: u32 = 0u;
override NORM: u32 = 0u;
override HALVES: u32 = 0u;
// Workgroups of a row.
override SHARING: u32 = 1u;

@group(0) @binding(0) var<storage, read_write> q: array<u32>;
@group(0) @binding(3) var<storage, read_write> steps: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> halves: array<vec2<u32>>;

struct Params {
    k: u32,
    padded: u32,
    n_rows: u32,
    x_offset: u32,
    x_stride: u32,
    eps: f32,
    // Where the scales of a product begin that is added first.
    begin: u32,
}
@group(1) @binding(0) var<uniform> params: Params;

// Whether the row of this workgroup is its own.
var<private> has_row: bool;

// An invocation's words of a block, multiplied with the weights of the norm.
struct Words {
    v: array<vec4<f32>, 8>, // 64 / LANES of them
    // The sum of squares before that, and the largest magnitude.
    squares: f32,
    top: f32,
}

// Exact, but behind a norm, whose sum of squares isn't.
fn inverse_of(x: f32) -> f32 {
    if NORM == 0u {
        return divide(1.0, x);
    }
    return 1.0 / x;
}

fn largest(v: vec4<f32>) -> f32 {
    let a = abs(v);
    return max(max(a.x, a.y), max(a.z, a.w));
}

fn pack(codes: vec4<i32>) -> u32 {
    let bytes = bitcast<vec4<u32>>(codes) & vec4<u32>(255u);
    return bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
}

// Those of an invocation; zeros beyond the end of the row.
fn words_of(row: u32, block: u32, lane: u32) -> Words {
    var words = Words();
    // All are loaded before the first is used.
    for (var t = 0u; t < 64u / LANES; t++) {
        words.v[t] = x_at(row, block * 64u + t * LANES + lane);
    }
    var weights = array<vec4<f32>, 8>();
    if NORM == 1u {
        for (var t = 0u; t < 64u / LANES; t++) {
            weights[t] = weights_at(block * 64u + t * LANES + lane);
        }
    }
    for (var t = 0u; t < 64u / LANES; t++) {
        keep_x(row, block * 64u + t * LANES + lane, words.v[t]);
        if NORM == 1u {
            words.squares += dot(words.v[t], words.v[t]);
            words.v[t] *= weights[t];
        }
        words.top = max(words.top, largest(words.v[t]));
    }
    return words;
}

// Where columns_ternary.wgsl has the four columns of word `i` of 64: its turns take a word of each vector of codes of two
// blocks, in which these columns share bits with three other quarters of their block.
fn place_in_turns(i: u32) -> u32 {
    let vector = i / 32u * 2u + i % 8u / 4u;
    let quarter = i % 32u / 8u;
    return i % 4u * 16u + vector * 4u + quarter;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let row = group_of(group) / SHARING;
    // Workgroups beyond the last row repeat it, and write nothing.
    has_row = row < params.n_rows;
    let source = min(row, params.n_rows - 1u);
    let thread = thread_of(at);
    let lane = thread % LANES;
    let blocks = params.padded / 256u;
    let first = group_of(group) % SHARING * (WG / LANES) + thread / LANES;
    let at_once = SHARING * (WG / LANES);
    // The first block stays in registers. Most rows have no more for each segment.
    var words = words_of(source, first, lane);
    var inverse = 1.0;
    var scale = 1.0;
    if NORM == 1u || SCALING == 0u {
        var both = vec2<f32>(words.squares, words.top);
        for (var block = first + at_once; block < blocks; block += at_once) {
            let next = words_of(source, block, lane);
            both = vec2<f32>(both.x + next.squares, max(both.y, next.top));
        }
        both = workgroup_sum_and_max(at, both.x, both.y);
        if NORM == 1u {
            inverse = 1.0 / sqrt(both.x / f32(params.k) + params.eps);
        }
        scale = inverse_of(max(both.y * inverse, 1e-5)) * 127.0;
    }
    var step = 1.0;
    var row_sum = 0;
    // Every invocation has a block in every iteration, so that all take part in exchanges.
    for (var turn = 0u; turn * at_once < blocks; turn++) {
        let block = first + turn * at_once;
        let live = has_row && block < blocks;
        if turn > 0u {
            words = words_of(source, block, lane);
        }
        if SCALING == 1u {
            scale = inverse_of(max(segment_max_f32(at, words.top * inverse), 1e-20)) * 127.0;
            step = inverse_of(scale);
        }
        for (var t = 0u; t < 64u / LANES; t++) {
            let v = words.v[t] * inverse;
            if SCALING == 2u {
                scale = inverse_of(max(eight_max_f32(at, largest(v)), 1e-20)) * 127.0;
                step = inverse_of(scale);
            }
            let codes = vec4<i32>(round(v * scale));
            var sum = codes.x + codes.y + codes.z + codes.w;
            if SCALING == 0u {
                row_sum += sum;
            } else {
                sum = eight_sum_i32(at, sum);
            }
            if live {
                let i = (row * blocks + block) * 64u + t * LANES + lane;
                q[i] = pack(codes);
                if HALVES == 1u {
                    var x = vec4<f32>(codes);
                    var to = i;
                    if SCALING == 0u {
                        to = i / 64u * 64u + place_in_turns(i % 64u);
                    } else {
                        // In f32: steps of small activations would be too small for f16.
                        x *= step / SHRINK;
                    }
                    halves[to] = vec2<u32>(pack2x16float(x.xz), pack2x16float(x.yw));
                }
                if SCALING != 0u && lane % 8u == 0u {
                    steps[i / 8u] = vec2<u32>(bitcast<u32>(step), bitcast<u32>(sum));
                }
            }
        }
    }
    if SCALING == 0u {
        let total = workgroup_sum_i32(at, row_sum);
        if has_row && thread == 0u {
            steps[row] = vec2<u32>(bitcast<u32>(scale), bitcast<u32>(total));
        }
    }
}
