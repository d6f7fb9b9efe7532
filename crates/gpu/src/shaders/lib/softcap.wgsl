// 1 if scores are bounded by cap · tanh(score / cap).
override SOFTCAP: u32 = 0u;

// Below all scores.
const LOWEST: f32 = -3.0e38;

fn bounded(score: vec4<f32>) -> vec4<f32> {
    if SOFTCAP == 1u {
        let c = params.softcap;
        // Beyond this the exponential overflows, and tanh is 1.
        let e = exp(2.0 * clamp(score / c, vec4<f32>(-40.0), vec4<f32>(40.0)));
        return c * (1.0 - 2.0 / (e + 1.0));
    }
    return score;
}
