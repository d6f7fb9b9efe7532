// What is done with the results of a linear layer. Needs `activation.wgsl`, and a buffer `out`.

// 0: out ← value. 1: out ← out + value. 2: of results 2i and 2i + 1, out[i] ← activation(first) · second.
override EPILOGUE: u32 = 0u;

// What results `row` and `row + 1`, of which `n` exist, are added to; `base` is where the token's row of the
// output begins. Call it early: this loads from memory.
fn residual(base: u32, row: u32, n: u32) -> vec2<f32> {
    var old = vec2<f32>();
    if EPILOGUE == 1u && row < n {
        old.x = out[base + row];
    }
    if EPILOGUE == 1u && row + 1u < n {
        old.y = out[base + row + 1u];
    }
    return old;
}

// Stores results `row` and `row + 1`. `row` is even, `old` is their residual.
fn put_sum(base: u32, row: u32, n: u32, value: vec2<f32>, old: vec2<f32>) {
    if EPILOGUE == 2u {
        if row + 1u < n {
            out[base + row / 2u] = gated(value.x, value.y);
        }
        return;
    }
    if row < n {
        out[base + row] = select(value.x, old.x + value.x, EPILOGUE == 1u);
    }
    if row + 1u < n {
        out[base + row + 1u] = select(value.y, old.y + value.y, EPILOGUE == 1u);
    }
}

// The same, whatever they are added to.
fn put(base: u32, row: u32, n: u32, value: vec2<f32>) {
    put_sum(base, row, n, value, residual(base, row, n));
}
