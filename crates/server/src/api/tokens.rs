//! Texts to tokens, and back.

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use sterna_text::{Decode, Encode};

use super::json::At;
use super::{ApiError, Caller, Shared, openai};
use crate::model::Conversation;

/// Of a text or a conversation.
pub(super) async fn tokenize(app: Shared, _: Caller, body: Value) -> Result<Response, ApiError> {
    let at = At::body(&body);
    let model = app.model_or_first(&at.get("model"))?.text;
    let ids = if at.get("messages").is_absent() {
        let text = at.get_any(&["content", "prompt", "text"]).required_text()?;
        let text = text.to_owned();
        let encode = Encode {
            add_special: at
                .get_any(&["add_special_tokens", "add_special"])
                .flag()?
                .unwrap_or(true),
            parse_special: at.get("parse_special").flag()?.unwrap_or(false),
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
    let pieces = pieces.flag()?.unwrap_or(false).then(|| {
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
pub(super) async fn detokenize(app: Shared, _: Caller, body: Value) -> Result<Response, ApiError> {
    let at = At::body(&body);
    let model = app.model_or_first(&at.get("model"))?.text;
    let ids = openai::ids(&at.get("tokens"), &model)?;
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
