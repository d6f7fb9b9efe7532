//! Loading and unloading adapters while the server runs, in the form that vLLM has.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::json::Checked;
use super::shape::{Field, SAID, Shape, field, required};
use super::{ApiError, Caller, Named, Shared, models};
use crate::adapters::{MAX_ADAPTERS, NotLoaded};

const NAMES: &[Field] = &[
    required("lora_name", Shape::Name),
    // Of several models, the first one's.
    field("model", Shape::Model),
];

/// What a request to load one may have.
pub(super) const LOAD: Shape = Shape::Object(&[
    NAMES,
    &[
        required("lora_path", SAID),
        field("scale", Shape::Number(-1e3, 1e3)),
        field("load_inplace", Shape::Flag),
    ],
]);

/// What a request to unload one may have.
pub(super) const UNLOAD: Shape = Shape::Object(&[NAMES]);

pub(super) async fn load(app: Shared, caller: Caller, body: Checked) -> Result<Response, ApiError> {
    let at = body.at();
    expect_admin(&app, &caller)?;
    let model = app.model_or_first(&at.get("model"))?;
    let name = at.get("lora_name").required_text()?.to_owned();
    let path = at.get("lora_path").required_text()?.to_owned();
    let scale = at.get("scale").number().unwrap_or(1.0);
    let replaces = at.get("load_inplace").flag().unwrap_or(false);
    let shelf = {
        let (app, name) = (app.clone(), name.clone());
        move || app.shelf.load(model.index, &name, &path, scale, replaces)
    };
    app.aside(shelf).await?.map_err(|error| match error {
        NotLoaded::Fixed => {
            ApiError::invalid("this server loads no adapters but those that it began with")
        }
        NotLoaded::Unloaded => at
            .get("model")
            .refused("the model isn't loaded: expected one that is".to_owned()),
        NotLoaded::Taken => at.get("lora_name").refused(format!(
            "there is an adapter `{name}`: expected another name, or load_inplace to be true"
        )),
        NotLoaded::Full => ApiError::invalid(format!(
            "expected at most {MAX_ADAPTERS} adapters, found more: unload one first"
        )),
        NotLoaded::Unfit(message) => at.get("lora_path").refused(message),
    })?;
    app.engines
        .set_adapters(model.index, app.shelf.n_loaded(model.index));
    record(&app, &caller, "load", &model, &name);
    let whole = app.model_named(&format!("{}:{name}", model.text.name));
    let whole = whole.map(|named| models::of_openai(&app, &named));
    Ok(Json(whole).into_response())
}

pub(super) async fn unload(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    expect_admin(&app, &caller)?;
    let model = app.model_or_first(&at.get("model"))?;
    let name = at.get("lora_name");
    let text = name.required_text()?;
    if !app.shelf.unload(model.index, text) {
        let message = format!("the adapter `{text}` does not exist");
        return Err(ApiError::new(StatusCode::NOT_FOUND, message)
            .at(name.path())
            .with_code("model_not_found"));
    }
    app.engines
        .set_adapters(model.index, app.shelf.n_loaded(model.index));
    record(&app, &caller, "unload", &model, text);
    let id = format!("{}:{text}", model.text.name);
    Ok(Json(json!({"id": id, "object": "model", "deleted": true})).into_response())
}

/// Lets only keys in that may change what is served.
pub(super) fn expect_admin(app: &Shared, caller: &Caller) -> Result<(), ApiError> {
    match app.settings.keys.is_admin(caller.key) {
        true => Ok(()),
        false => Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "expected a key that may change what is served: one with `admin` in the list of keys",
        )
        .with_code("permission_denied")),
    }
}

/// Logs who changed what.
fn record(app: &Shared, caller: &Caller, action: &str, model: &Named, name: &str) {
    app.log(json!({
        "event": "adapter",
        "request_id": caller.request_id,
        "key": caller.key_name,
        "action": action,
        "model": model.text.name,
        "adapter": name,
    }));
}
