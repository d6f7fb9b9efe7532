//! A browser's timer, as a future.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use js_sys::{Function, Promise};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;
use wasm_bindgen_futures::JsFuture;

#[wasm_bindgen]
extern "C" {
    #[wasm_bindgen(js_name = setTimeout)]
    fn set_timeout(callback: &Function, milliseconds: f64) -> JsValue;
    #[wasm_bindgen(js_name = clearTimeout)]
    fn clear_timeout(timer: &JsValue);
}

/// Ready once its time is over; stopped where it is dropped before.
#[derive(Debug)]
pub(crate) struct Timer {
    id: JsValue,
    over: JsFuture,
}

impl Timer {
    pub(crate) fn new(time: Duration) -> Timer {
        let mut id = JsValue::UNDEFINED;
        let over = Promise::new(&mut |resolve, _| {
            id = set_timeout(&resolve, time.as_secs_f64() * 1000.0);
        });
        Timer {
            id,
            over: JsFuture::from(over),
        }
    }
}

impl Future for Timer {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.over).poll(cx).map(|_| ())
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        clear_timeout(&self.id);
    }
}
