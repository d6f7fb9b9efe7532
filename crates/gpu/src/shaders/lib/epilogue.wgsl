// What becomes of the results of a linear layer. Needs `activation.wgsl`, and a buffer `out`.

// 0: out ← value. 1: out ← out + value. 2: of rows 2i and 2i + 1, out[i] ← activation(first) · second.
override EPILOGUE: u32 = 0u;

// Puts the results of rows `row` and `row + 1`, of which `n` exist; `base` is where the token's row
// of the output begins. `row` is even.
fn put(base: u32, row: u32, n: u32, value: vec2<f32>) {
    if EPILOGUE == 2u {
        if row + 1u < n {
            out[base + row / 2u] = activate(value.x) * value.y;
        }
        return;
    }
    if row < n {
        let old = select(0.0, out[base + row], EPILOGUE == 1u);
        out[base + row] = select(value.x, old + value.x, EPILOGUE == 1u);
    }
    if row + 1u < n {
        let old = select(0.0, out[base + row + 1u], EPILOGUE == 1u);
        out[base + row + 1u] = select(value.y, old + value.y, EPILOGUE == 1u);
    }
}
