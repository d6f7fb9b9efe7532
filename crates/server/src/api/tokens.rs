//! Texts to tokens, and back.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use sterna_text::{Decode, Encode};

use super::json::Checked;
use super::shape::{Field, Shape, TEXT, field, required};
use super::{ApiError, Caller, Shared, openai};
use crate::model::Conversation;

/// What a request for tokens may have.
pub(super) const TOKENIZE: Shape = Shape::OneOf(&[
    Shape::Object(&[&[openai::fields::MESSAGES], TOKENIZE_FIELDS]),
    Shape::Object(&[&[required("prompt", TEXT)], TOKENIZE_FIELDS]),
    Shape::Object(&[&[required("content", TEXT)], TOKENIZE_FIELDS]),
    Shape::Object(&[&[required("text", TEXT)], TOKENIZE_FIELDS]),
]);

const TOKENIZE_FIELDS: &[Field] = &[
    field("model", Shape::Model),
    field("add_special_tokens", Shape::Flag),
    field("add_special", Shape::Flag),
    field("parse_special", Shape::Flag),
    field("with_pieces", Shape::Flag),
    field("return_token_strs", Shape::Flag),
];

/// What a request for text may have.
pub(super) const DETOKENIZE: Shape = Shape::Object(&[&[
    field("model", Shape::Model),
    required("tokens", openai::fields::IDS),
]]);

/// Of a text or a conversation.
pub(super) async fn tokenize(app: Shared, _: Caller, body: Checked) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model_or_first(&at.get("model"))?.text;
    let ids = if at.get("messages").is_absent() {
        let text = at.get_any(&["content", "prompt", "text"]).required_text()?;
        let text = text.to_owned();
        let encode = Encode {
            add_special: at
                .get_any(&["add_special_tokens", "add_special"])
                .flag()
                .unwrap_or(true),
            parse_special: at.get("parse_special").flag().unwrap_or(false),
        };
        let model = model.clone();
        let ids = app.aside(move || model.tokenizer.encode(&text, encode));
        ids.await?.map_err(sterna::Error::from)?
    } else {
        let conversation = Conversation {
            messages: openai::messages(&at.get("messages"))?,
            ..Conversation::default()
        };
        let model = model.clone();
        app.aside(move || model.prompt(&conversation)).await??.ids
    };
    let pieces = at.get_any(&["with_pieces", "return_token_strs"]);
    let pieces = pieces.flag().unwrap_or(false).then(|| {
        let piece = |id: &u32| openai::token_text(&model.tokenizer, *id);
        ids.iter().map(piece).collect::<Vec<_>>()
    });
    Ok(Json(json!({
        "tokens": ids,
        "count": ids.len(),
        "max_model_len": model.ctx_len,
        "token_strs": pieces,
    }))
    .into_response())
}

/// The text of tokens.
pub(super) async fn detokenize(
    app: Shared,
    _: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    let model = app.model_or_first(&at.get("model"))?.text;
    let ids = at.get("tokens").ids(model.n_vocab)?;
    let text = app.aside(move || {
        model.tokenizer.decode(
            &ids,
            Decode {
                skip_special: false,
            },
        )
    });
    let text = text.await?;
    Ok(Json(json!({"content": text, "prompt": text})).into_response())
}
