// ln(1 + e^x)
fn softplus(x: f32) -> f32 {
    let e = exp(min(x, 20.0));
    // The sum with 1 would lose most of a small exponential.
    let small = e * (1.0 - e * (0.5 - e * (0.33333334 - e * 0.25)));
    return select(select(log(1.0 + e), small, e < 0.03), x, x > 20.0);
}
