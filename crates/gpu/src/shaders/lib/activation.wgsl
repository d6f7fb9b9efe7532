// The activation functions of `sterna_kernels::activation`, by its formulas.

// 0 SiLU, 1 ReLU², 2 ReLU, 3 GELU by tanh, 4 GELU by erf, 5 clamped SwiGLU.
override ACTIVATION: u32 = 0u;

fn tanh_of(x: f32) -> f32 {
    return 1.0 - 2.0 / (exp(2.0 * min(x, 40.0)) + 1.0);
}

fn erf_of(x: f32) -> f32 {
    let a = abs(x);
    let t = 1.0 / (1.0 + 0.3275911 * a);
    let p = (((1.0614054 * t - 1.453152) * t + 1.4214137) * t - 0.28449674) * t + 0.2548296;
    return sign(x) * (1.0 - p * t * exp(-a * a));
}

// activation(x) · up
fn gated(x: f32, up: f32) -> f32 {
    if ACTIVATION == 5u {
        let g = select(x, 7.0, x > 7.0);
        // As below.
        let s = select(g / (1.0 + exp(-1.702 * g)), 0.0, g < -51.0);
        return s * (clamp(up, -7.0, 7.0) + 1.0);
    }
    return activate(x) * up;
}

fn activate(x: f32) -> f32 {
    switch ACTIVATION {
        case 0u: {
            // Beyond this the exponential would overflow, and the result rounds to -0 anyway.
            return select(x / (1.0 + exp(-x)), 0.0, x < -87.0);
        }
        case 1u: {
            let r = max(x, 0.0);
            return r * r;
        }
        case 2u: {
            return max(x, 0.0);
        }
        case 3u: {
            return 0.5 * x * (1.0 + tanh_of(0.7978846 * (x + 0.044715 * x * x * x)));
        }
        default: {
            return 0.5 * x * (1.0 + erf_of(x * 0.70710677));
        }
    }
}
