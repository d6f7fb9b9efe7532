//! Workers of JavaScript as threads of the engine.

use std::time::Duration;

use js_sys::{Reflect, global};
use sterna_kernels::threads;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::js;

thread_local! {
    /// When this Worker's clock began.
    static ORIGIN: Duration = {
        let performance = Reflect::get(&global(), &"performance".into());
        let origin = performance.and_then(|it| Reflect::get(&it, &"timeOrigin".into()));
        let ms = origin.ok().and_then(|origin| origin.as_f64()).unwrap_or_default();
        Duration::try_from_secs_f64(ms / 1000.0).unwrap_or_default()
    };
}

/// Makes the calling Worker a thread of the engine; doesn't return.
#[wasm_bindgen(js_name = lendThread)]
pub fn lend_thread() {
    threads::set_clock(|| ORIGIN.with(|origin| *origin + js::now()));
    threads::lend();
}

/// Threads that wait for something to do.
#[wasm_bindgen(js_name = idleThreads)]
pub fn idle_threads() -> usize {
    threads::n_idle()
}
