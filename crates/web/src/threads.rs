//! Workers of JavaScript as threads of the engine.

#![allow(unsafe_code)] // of the generated calls

use js_sys::{Reflect, global};
use sterna_kernels::threads;
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_namespace = performance, js_name = now)]
    fn since_origin() -> f64;
}

thread_local! {
    /// When this Worker's clock began, in milliseconds.
    static ORIGIN: f64 = {
        let performance = Reflect::get(&global(), &JsValue::from("performance"));
        let origin = performance.and_then(|it| Reflect::get(&it, &JsValue::from("timeOrigin")));
        origin.ok().and_then(|origin| origin.as_f64()).unwrap_or_default()
    };
}

/// Makes the calling Worker a thread of the engine; doesn't return.
#[wasm_bindgen(js_name = lendThread)]
pub fn lend_thread() {
    threads::set_clock(|| ORIGIN.with(|origin| origin + since_origin()));
    threads::lend();
}

/// Threads that wait for something to do.
#[wasm_bindgen(js_name = idleThreads)]
pub fn idle_threads() -> usize {
    threads::n_idle()
}
