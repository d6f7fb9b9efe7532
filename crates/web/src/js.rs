//! What JavaScript implements for this side, and how values and errors pass between both.

use std::ops::Range;

use js_sys::{Array, Error as JsError, Function, JSON, Promise, Reflect, Uint8Array, WebAssembly};
use serde::Serialize;
use serde::de::DeserializeOwned;
use sterna::generate::{Allowed, TokenConstraint};
use sterna::{Error, ErrorCode, Result};
use sterna_delivery::fetch::Fault;
use wasm_bindgen::prelude::wasm_bindgen;
use wasm_bindgen::{JsCast, JsValue};
use wasm_bindgen_futures::JsFuture;

#[wasm_bindgen]
extern "C" {
    /// A model's files as the engine asks for them.
    pub type Files;
    #[wasm_bindgen(method, catch, js_name = len)]
    fn js_len(this: &Files, name: &str) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch, js_name = read)]
    fn js_read(this: &Files, name: &str, start: f64, end: f64) -> Result<JsValue, JsValue>;

    /// The folder of one model: complete files, and arriving ones.
    #[wasm_bindgen(extends = Files)]
    pub type Disk;
    #[wasm_bindgen(method, catch, js_name = journal)]
    fn js_journal(this: &Disk, name: &str) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch, js_name = writeAt)]
    fn js_write_at(
        this: &Disk,
        name: &str,
        offset: f64,
        bytes: &Uint8Array,
    ) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch, js_name = readBack)]
    fn js_read_back(this: &Disk, name: &str, start: f64, end: f64) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch, js_name = note)]
    fn js_note(this: &Disk, name: &str, journal: &str) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch, js_name = commit)]
    fn js_commit(this: &Disk, name: &str) -> Result<JsValue, JsValue>;
    #[wasm_bindgen(method, catch, js_name = remove)]
    fn js_remove(this: &Disk, name: &str) -> Result<JsValue, JsValue>;

    /// `fetch`.
    pub type Http;
    #[wasm_bindgen(method, catch, js_name = open)]
    fn js_open(
        this: &Http,
        url: &str,
        start: Option<f64>,
        end: Option<f64>,
    ) -> Result<JsValue, JsValue>;

    /// Bytes that arrive.
    pub type Body;
    #[wasm_bindgen(method, catch, js_name = read)]
    fn js_read_body(this: &Body) -> Result<JsValue, JsValue>;
    /// Ends the transfer.
    #[wasm_bindgen(method)]
    pub fn cancel(this: &Body);

    /// The answer to a request.
    #[wasm_bindgen(extends = Body)]
    pub type HttpAnswer;
    /// The status.
    #[wasm_bindgen(method, getter)]
    pub fn status(this: &HttpAnswer) -> u16;
    /// The value of a header.
    #[wasm_bindgen(method)]
    pub fn header(this: &HttpAnswer, name: &str) -> Option<String>;

    /// Another tab that has the package.
    #[derive(Clone)]
    pub type Peer;
    #[wasm_bindgen(method, catch, js_name = ask)]
    fn js_ask(this: &Peer, request: &str) -> Result<JsValue, JsValue>;

    /// Its answer to a request.
    #[wasm_bindgen(extends = Body)]
    pub type PeerAnswer;
    /// The head.
    #[wasm_bindgen(method, getter)]
    pub fn reply(this: &PeerAnswer) -> String;

    /// What an answer has to match, in a module of its own: made for one answer.
    #[derive(Clone, Debug)]
    pub type Constraint;
    #[wasm_bindgen(method, catch, js_name = allowed)]
    fn js_allowed(this: &Constraint) -> Result<Vec<u32>, JsValue>;
    #[wasm_bindgen(method, catch, js_name = accept)]
    fn js_accept(this: &Constraint, id: u32) -> Result<(), JsValue>;

    #[wasm_bindgen(js_namespace = performance, js_name = now)]
    fn performance_now() -> f64;
    #[wasm_bindgen(js_name = setTimeout)]
    fn set_timeout(run: &Function, milliseconds: f64) -> JsValue;
}

/// The time since some fixed moment.
pub(crate) fn now() -> std::time::Duration {
    std::time::Duration::from_secs_f64(performance_now().max(0.0) / 1000.0)
}

/// Bytes of this module's memory.
pub(crate) fn memory_bytes() -> u64 {
    let memory: WebAssembly::Memory = wasm_bindgen::memory().unchecked_into();
    let buffer = memory.buffer();
    let bytes = Reflect::get(&buffer, &"byteLength".into()).ok();
    bytes.and_then(|bytes| bytes.as_f64()).unwrap_or(0.0) as u64
}

/// Waits for `milliseconds`; other tasks run meanwhile.
pub(crate) async fn sleep(milliseconds: f64) {
    let promise = Promise::new(&mut |resolve, _| {
        set_timeout(&resolve, milliseconds);
    });
    // It is never rejected.
    let _ = JsFuture::from(promise).await;
}

/// The value, once it is there.
async fn settled(value: Result<JsValue, JsValue>) -> Result<JsValue, JsValue> {
    let value = value?;
    match value.dyn_into::<Promise>() {
        Ok(promise) => JsFuture::from(promise).await,
        Err(value) => Ok(value),
    }
}

/// What JavaScript threw, as an error of this library.
fn thrown(error: &JsValue) -> Error {
    let text = |name: &str| {
        let value = Reflect::get(error, &name.into()).ok()?;
        value.as_string()
    };
    let message = text("message").or_else(|| error.as_string());
    let message = message.unwrap_or_else(|| "JavaScript threw something else than an error".into());
    let code = match text("name").as_deref() {
        Some("NotFoundError") => ErrorCode::NotFound,
        _ => ErrorCode::Io,
    };
    Error::new(code, message)
}

async fn value(value: Result<JsValue, JsValue>) -> Result<JsValue> {
    settled(value).await.map_err(|error| thrown(&error))
}

async fn bytes(result: Result<JsValue, JsValue>) -> Result<Vec<u8>> {
    let found = value(result).await?;
    let array = found.dyn_into::<Uint8Array>();
    let array = array.map_err(|_| unexpected("a Uint8Array"))?;
    Ok(array.to_vec())
}

fn unexpected(expected: &str) -> Error {
    let message = format!("expected {expected} of JavaScript, found something else");
    Error::new(ErrorCode::Io, message)
}

impl Files {
    /// The length of a complete file.
    pub(crate) async fn len(&self, name: &str) -> Result<Option<u64>> {
        let found = value(self.js_len(name)).await?;
        if found.is_undefined() || found.is_null() {
            return Ok(None);
        }
        let len = found.as_f64().filter(|len| *len >= 0.0);
        Ok(Some(len.ok_or_else(|| unexpected("a length"))? as u64))
    }

    /// Bytes of `range`: at least one, unless that is empty.
    pub(crate) async fn read(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        bytes(self.js_read(name, range.start as f64, range.end as f64)).await
    }
}

impl Disk {
    /// The journal that an earlier download left for the arriving file.
    pub(crate) async fn journal(&self, name: &str) -> Result<Option<String>> {
        Ok(value(self.js_journal(name)).await?.as_string())
    }

    /// Stores bytes of the arriving file.
    pub(crate) async fn write_at(&self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        let bytes = Uint8Array::from(bytes);
        value(self.js_write_at(name, offset as f64, &bytes)).await?;
        Ok(())
    }

    /// Reads bytes of the arriving file.
    pub(crate) async fn read_back(&self, name: &str, range: Range<u64>) -> Result<Vec<u8>> {
        bytes(self.js_read_back(name, range.start as f64, range.end as f64)).await
    }

    /// Flushes the arriving file, then replaces its journal.
    pub(crate) async fn note(&self, name: &str, journal: &str) -> Result<()> {
        value(self.js_note(name, journal)).await?;
        Ok(())
    }

    /// Makes the arriving file a complete one.
    pub(crate) async fn commit(&self, name: &str) -> Result<()> {
        value(self.js_commit(name)).await?;
        Ok(())
    }

    /// Deletes the complete and the arriving file.
    pub(crate) async fn remove(&self, name: &str) -> Result<()> {
        value(self.js_remove(name)).await?;
        Ok(())
    }
}

impl Http {
    /// Sends a request. Errors: the message of a failure without any answer.
    pub(crate) async fn open(
        &self,
        url: &str,
        range: Option<Range<u64>>,
    ) -> Result<HttpAnswer, String> {
        let (start, end) = range.map(|r| (r.start as f64, r.end as f64)).unzip();
        let answer = settled(self.js_open(url, start, end)).await;
        let answer = answer.map_err(|error| thrown(&error).to_string())?;
        Ok(answer.unchecked_into())
    }
}

impl Peer {
    /// Asks for bytes. Errors: it is gone, or doesn't answer.
    pub(crate) async fn ask(&self, request: &str) -> Result<PeerAnswer, Fault> {
        let answer = settled(self.js_ask(request)).await;
        let answer = answer.map_err(|error| {
            let error = thrown(&error);
            let message = error.to_string();
            match error.code() {
                ErrorCode::NotFound => Fault::Missing { message },
                _ => Fault::Unreachable { message },
            }
        })?;
        Ok(answer.unchecked_into())
    }
}

impl Body {
    /// The next piece of the body; `None` at its end. Errors: the message of a broken connection.
    pub(crate) async fn read(&self) -> Result<Option<Vec<u8>>, String> {
        let piece = settled(self.js_read_body()).await;
        let piece = piece.map_err(|error| thrown(&error).to_string())?;
        match piece.dyn_into::<Uint8Array>() {
            Ok(bytes) => Ok(Some(bytes.to_vec())),
            Err(_) => Ok(None),
        }
    }
}

impl TokenConstraint for Constraint {
    fn allowed(&mut self) -> Result<Allowed> {
        let mut tokens = self.js_allowed().map_err(|error| misfit(&error))?;
        let end = tokens.pop() == Some(1);
        Ok(Allowed { tokens, end })
    }

    fn accept(&mut self, id: u32) -> Result<()> {
        self.js_accept(id).map_err(|error| misfit(&error))
    }

    /// Nothing is drafted in a browser.
    fn n_allowed(&mut self, _: &[u32]) -> usize {
        0
    }

    fn boxed(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}

/// What a constraint threw: its limits, or a trap.
fn misfit(error: &JsValue) -> Error {
    let message = thrown(error).to_string();
    Error::new(ErrorCode::InvalidRequest, message).context("the schema")
}

/// The `Error` that JavaScript is thrown.
pub(crate) fn failure(error: &Error) -> JsValue {
    coded(error.code().as_str(), &format!("{error:#}"))
}

/// An `Error` with a code.
pub(crate) fn coded(code: &str, message: &str) -> JsValue {
    let error = JsError::new(message);
    // A property of an object that was just made can be set.
    let _ = Reflect::set(&error, &"code".into(), &code.into());
    error.into()
}

/// `value` as a JavaScript value.
pub(crate) fn to_js(value: &impl Serialize) -> Result<JsValue, JsValue> {
    let text = serde_json::to_string(value);
    let text = text.map_err(|error| coded("invalid_request", &error.to_string()))?;
    JSON::parse(&text)
}

/// What JavaScript passed as `what`.
pub(crate) fn from_js<T: DeserializeOwned>(what: &str, value: &JsValue) -> Result<T, JsValue> {
    let text = match value.is_undefined() {
        true => "{}".to_owned(),
        false => JSON::stringify(value)?.into(),
    };
    serde_json::from_str(&text)
        .map_err(|error| coded("invalid_request", &format!("{what}: {error}")))
}

/// Calls a JavaScript function that returns nothing; what it throws is its own concern.
pub(crate) fn call(function: &Function, arguments: &[JsValue]) {
    let arguments: Array = arguments.iter().collect();
    let _ = function.apply(&JsValue::UNDEFINED, &arguments);
}
