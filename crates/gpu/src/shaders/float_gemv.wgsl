// out[t, i] ← Σ_j w[i, j] · x[t, j], for few rows t
//
// Agrees with `sterna_kernels::gemm` for floats, except for the order of the sum, and for the bits that the
// CPU drops of activations with F16 and BF16 weights.
// Shapes: weights as `floats_*.wgsl` says; x rows of k f32; out f32. LANES invocations per two rows;
// workgroups of WG. With NORM rows are normalised first, by weights [k]: each segment has the sum of squares of its row,
// which the product is divided by.

override NORM: u32 = 0u;
// Rows of activations, at most 8.
override TOKENS: u32 = 1u;

@group(0) @binding(3) var<storage, read_write> out: array<f32>;
@group(0) @binding(4) var<storage, read> norm: array<vec4<f32>>;

@group(1) @binding(0) var<uniform> params: Params;

// Sums of the products with two rows, and of the squares of the activations.
struct Sums {
    products: vec2<f32>,
    squares: f32,
}

// Eight elements of two rows.
struct Weights {
    a: array<vec4<f32>, 2>,
    b: array<vec4<f32>, 2>,
}

// The sums with eight elements more, from 8i on, of a row of activations.
fn add(w: Weights, token: u32, i: u32, before: Sums) -> Sums {
    var x0 = x_at(token, 2u * i);
    var x1 = x_at(token, 2u * i + 1u);
    var squares = before.squares;
    if NORM == 1u {
        squares += dot(x0, x0) + dot(x1, x1);
        x0 *= norm[2u * i];
        // Beyond the end of the row x is zero.
        x1 *= norm[min(2u * i + 1u, (params.k - 1u) / 4u)];
    }
    let products = vec2<f32>(
        dot(w.a[0], x0) + dot(w.a[1], x1),
        dot(w.b[0], x0) + dot(w.b[1], x1),
    );
    return Sums(before.products + products, squares);
}

// The products with a whole row, of what the lanes have of them.
fn total(at: Invocation, sums: Sums) -> vec2<f32> {
    let sum = segment_sum_f32(at, sums.products);
    if NORM == 1u {
        let mean = segment_sum_f32(at, vec2<f32>(sums.squares, 0.0)).x / f32(params.k);
        return sum * (1.0 / sqrt(mean + params.eps));
    }
    return sum;
}

@compute @workgroup_size(WG)
fn main(at: Invocation, group: Group) {
    let thread = thread_of(at);
    find_matrix(at, group);
    let lane = thread % LANES;
    let eighths = share_of((params.k + 7u) / 8u);
    let row = 2u * (place_of(group) * (WG / LANES) + thread / LANES);
    let a = matrix_begin() + stored_row(row);
    let b = matrix_begin() + stored_row(row + 1u);
    // One by one: sums in an array that a loop indexes are kept in memory.
    var s0 = Sums();
    var s1 = Sums();
    var s2 = Sums();
    var s3 = Sums();
    var s4 = Sums();
    var s5 = Sums();
    var s6 = Sums();
    var s7 = Sums();
    for (var i = lane; i < eighths; i += LANES) {
        let w = Weights(eight_floats(a, i), eight_floats(b, i));
        s0 = add(w, row_in(0u), i, s0);
        if TOKENS > 1u {
            s1 = add(w, row_in(1u), i, s1);
        }
        if TOKENS > 2u {
            s2 = add(w, row_in(2u), i, s2);
        }
        if TOKENS > 3u {
            s3 = add(w, row_in(3u), i, s3);
        }
        if TOKENS > 4u {
            s4 = add(w, row_in(4u), i, s4);
        }
        if TOKENS > 5u {
            s5 = add(w, row_in(5u), i, s5);
        }
        if TOKENS > 6u {
            s6 = add(w, row_in(6u), i, s6);
        }
        if TOKENS > 7u {
            s7 = add(w, row_in(7u), i, s7);
        }
    }
    var own = total(at, s0);
    if TOKENS > 1u {
        own = select(own, total(at, s1), lane == 1u);
    }
    if TOKENS > 2u {
        own = select(own, total(at, s2), lane == 2u);
    }
    if TOKENS > 3u {
        own = select(own, total(at, s3), lane == 3u);
    }
    if TOKENS > 4u {
        own = select(own, total(at, s4), lane == 4u);
    }
    if TOKENS > 5u {
        own = select(own, total(at, s5), lane == 5u);
    }
    if TOKENS > 6u {
        own = select(own, total(at, s6), lane == 6u);
    }
    if TOKENS > 7u {
        own = select(own, total(at, s7), lane == 7u);
    }
    // Lane t puts the sums of row t of the activations.
    if lane < TOKENS && row < share_of(params.n) {
        let place = params.out_offset + row_out(lane) * params.out_stride;
        put(place, params.first + row, params.first + params.n, own);
    }
}
