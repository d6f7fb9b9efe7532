// out[t, i] ← Σ_b (weights of block b) · (activations of block b), for many rows t
//
// Agrees with `sterna_kernels::gemm` as block_gemv.wgsl does.
// Shapes: weights as `codes_*.wgsl` says; q [m, q_len] of 16 int8; steps [m, q_len / 2] of the step and
// the sum of each run of 32; out f32.
// Workgroups of 256: 64 rows of weights by 64 of activations, four by four per invocation, two runs of 32
// columns at a time.

@group(0) @binding(2) var<storage, read> q: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read> steps: array<vec2<u32>>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

@group(1) @binding(0) var<uniform> params: Params;

// Two runs of 64 rows, 17 words apart, so that rows are in different banks; of activations 4 vectors.
var<workgroup> tile_w: array<u32, 1088>;
var<workgroup> tile_s: array<vec3<f32>, 128>;
var<workgroup> tile_q: array<vec4<u32>, 256>;
var<workgroup> tile_steps: array<vec2<f32>, 128>;

fn four_words(i: u32) -> vec4<u32> {
    return vec4<u32>(tile_w[i], tile_w[i + 1u], tile_w[i + 2u], tile_w[i + 3u]);
}

@compute @workgroup_size(256)
fn main(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let row0 = group.x * 64u;
    let token0 = group.y * 64u;
    // See `gemm_tile.wgsl`.
    let x = thread % 16u;
    let y = thread / 16u;
    // One vector for each token, of the four rows.
    var sums = array<vec4<f32>, 4>();
    for (var run0 = 0u; run0 < params.runs; run0 += 2u) {
        if thread < 128u {
            let r = thread / 2u;
            let row = stored_row(row0 + r);
            let run = run0 + thread % 2u;
            var w = array<vec4<u32>, 2>();
            var s = vec3<f32>();
            if run < params.runs {
                w = run_codes(row, run);
                s = run_scales(row, run);
            }
            let to = r * 17u + thread % 2u * 8u;
            for (var i = 0u; i < 8u; i++) {
                tile_w[to + i] = w[i / 4u][i % 4u];
            }
            tile_s[thread] = s;
        } else {
            let i = thread - 128u;
            let token = min(token0 + i / 2u, params.m - 1u);
            // Rows of activations are padded to eight runs.
            let step = steps[token * params.q_len / 2u + run0 + i % 2u];
            tile_steps[i] = vec2<f32>(bitcast<f32>(step.x), f32(bitcast<i32>(step.y)));
        }
        let token = min(token0 + thread / 4u, params.m - 1u);
        tile_q[thread] = q[token * params.q_len + run0 * 2u + thread % 4u];
        workgroupBarrier();
        for (var run = 0u; run < 2u; run++) {
            // The four rows' words and scales, by name: as elements of arrays they might not stay in
            // registers.
            let r0 = 2u * x;
            let r1 = r0 + 1u;
            let r2 = r0 + 32u;
            let r3 = r0 + 33u;
            let w00 = four_words(r0 * 17u + run * 8u);
            let w01 = four_words(r0 * 17u + run * 8u + 4u);
            let w10 = four_words(r1 * 17u + run * 8u);
            let w11 = four_words(r1 * 17u + run * 8u + 4u);
            let w20 = four_words(r2 * 17u + run * 8u);
            let w21 = four_words(r2 * 17u + run * 8u + 4u);
            let w30 = four_words(r3 * 17u + run * 8u);
            let w31 = four_words(r3 * 17u + run * 8u + 4u);
            let s0 = tile_s[r0 * 2u + run];
            let s1 = tile_s[r1 * 2u + run];
            let s2 = tile_s[r2 * 2u + run];
            let s3 = tile_s[r3 * 2u + run];
            let first = vec4<f32>(s0.x, s1.x, s2.x, s3.x);
            let second = vec4<f32>(s0.y, s1.y, s2.y, s3.y);
            let least = vec4<f32>(s0.z, s1.z, s2.z, s3.z);
            for (var t = 0u; t < 4u; t++) {
                let at = t * 16u + y;
                let a0 = tile_q[at * 4u + run * 2u];
                let a1 = tile_q[at * 4u + run * 2u + 1u];
                let step = tile_steps[at * 2u + run];
                let lows = vec4<i32>(
                    dot16(w00, a0, 0),
                    dot16(w10, a0, 0),
                    dot16(w20, a0, 0),
                    dot16(w30, a0, 0),
                );
                if HALVES {
                    let highs = vec4<i32>(
                        dot16(w01, a1, 0),
                        dot16(w11, a1, 0),
                        dot16(w21, a1, 0),
                        dot16(w31, a1, 0),
                    );
                    sums[t] += step.x * (vec4<f32>(lows) * first + vec4<f32>(highs) * second);
                } else {
                    let both = vec4<i32>(
                        dot16(w01, a1, lows.x),
                        dot16(w11, a1, lows.y),
                        dot16(w21, a1, lows.z),
                        dot16(w31, a1, lows.w),
                    );
                    sums[t] += step.x * (vec4<f32>(both) * first - step.y * least);
                }
            }
        }
        workgroupBarrier();
    }
    put_tile(row0, token0, x, y, sums);
}
