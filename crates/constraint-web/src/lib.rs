//! Constrained output in WebAssembly, apart from the engine: the Worker loads it with the first schema.
//!
//! The engine's module gives the vocabulary; before each token it asks a `Constraint` what is allowed.
//! `packages/sterna/src/constraint.d.ts` has the types of all exports; every failure is an `Error` with a `code`.

#![cfg(target_family = "wasm")]

use js_sys::{Error as JsError, Reflect};
use sterna_constraint::{ConstraintError, Grammar};
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

/// The tokens of a model.
#[wasm_bindgen]
pub struct Vocabulary(sterna_constraint::Vocabulary);

#[wasm_bindgen]
impl Vocabulary {
    /// Token `i` spells `bytes` from the end of the one before up to `ends[i]`.
    #[wasm_bindgen(constructor)]
    pub fn new(bytes: &[u8], ends: &[u32]) -> Result<Vocabulary, JsValue> {
        let starts = std::iter::once(&0).chain(ends);
        let spans = starts
            .zip(ends)
            .map(|(&start, &end)| start as usize..end as usize);
        let tokens = spans.map(|span| bytes.get(span).map(<[u8]>::to_vec));
        let tokens: Option<Vec<Vec<u8>>> = tokens.collect();
        let tokens = tokens.ok_or_else(|| failure("expected ends of tokens in order"))?;
        let made = sterna_constraint::Vocabulary::new(tokens);
        Ok(Vocabulary(made.map_err(refused)?))
    }

    /// Output that matches a grammar of the kind `schema`, `object`, `regex` or `grammar`.
    pub fn constraint(&self, kind: &str, text: String) -> Result<Constraint, JsValue> {
        let grammar = match kind {
            "schema" => Grammar::JsonSchema(text),
            "object" => Grammar::JsonObject,
            "regex" => Grammar::Regex(text),
            "grammar" => Grammar::Lark(text),
            kind => {
                let found = format!("expected a kind of grammar, found {kind:?}");
                return Err(failure(&found));
            }
        };
        let made = sterna_constraint::Constraint::new(&self.0, &grammar);
        Ok(Constraint(made.map_err(refused)?))
    }
}

/// Output that follows a grammar.
#[wasm_bindgen]
pub struct Constraint(sterna_constraint::Constraint);

#[wasm_bindgen]
impl Constraint {
    /// A bit for each token, the lowest first: whether it may come next. One more word is 1 if the output may end.
    pub fn allowed(&mut self) -> Result<Vec<u32>, JsValue> {
        let allowed = self.0.allowed().map_err(refused)?;
        let mut words = allowed.tokens;
        words.push(u32::from(allowed.end));
        Ok(words)
    }

    /// Appends a token.
    pub fn accept(&mut self, id: u32) -> Result<(), JsValue> {
        self.0.accept(id).map_err(refused)
    }
}

fn refused(error: ConstraintError) -> JsValue {
    failure(&error.to_string())
}

/// The `Error` that JavaScript is thrown.
fn failure(message: &str) -> JsValue {
    let error = JsError::new(message);
    // A property of an object that was just made can be set.
    let _ = Reflect::set(&error, &"code".into(), &"invalid_request".into());
    error.into()
}
