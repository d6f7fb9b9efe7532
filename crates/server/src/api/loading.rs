//! Loading and unloading models while the server runs.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;

use super::adapters::expect_admin;
use super::json::{At, Checked};
use super::shape::{Field, SAID, Shape, field, required};
use super::{ApiError, Caller, Shared, models};
use crate::catalog::{MAX_MODELS, NotAdded};

/// The name of a model, or, to load one that isn't known, what the command line calls it.
const NAMES: &[Field] = &[required("model", SAID)];

/// What a request to load one may have.
pub(super) const LOAD: Shape = Shape::Object(&[NAMES, &[field("pin", Shape::Flag)]]);

/// What a request to unload one may have.
pub(super) const UNLOAD: Shape = Shape::Object(&[NAMES]);

pub(super) async fn load(app: Shared, caller: Caller, body: Checked) -> Result<Response, ApiError> {
    let at = body.at();
    expect_admin(&app, &caller)?;
    let field = at.get("model");
    let name = field.required_text()?.to_owned();
    let number = match known(&app, &name) {
        Some(number) => number,
        None => {
            let adding = {
                let app = app.clone();
                move || app.catalog.add(&name)
            };
            let added = app.aside(adding).await?;
            added.map_err(|error| refusal(&field, error))?
        }
    };
    let pin = at.get("pin").flag();
    app.engines.load(number, pin).await?;
    Ok(told(&app, &caller, "load", number))
}

pub(super) async fn unload(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    expect_admin(&app, &caller)?;
    let field = at.get("model");
    let name = field.required_text()?;
    let number = known(&app, name).ok_or_else(|| {
        ApiError::new(
            StatusCode::NOT_FOUND,
            format!("the model `{name}` does not exist"),
        )
        .at(field.path())
        .with_code("model_not_found")
    })?;
    if !app.engines.unload(number).await {
        return Err(field.refused(format!("the model `{name}` is there to stay")));
    }
    Ok(told(&app, &caller, "unload", number))
}

/// The number of the model called `name`.
fn known(app: &Shared, name: &str) -> Option<usize> {
    let texts = app.catalog.texts();
    texts.iter().position(|text| text.name == name)
}

fn refusal(field: &At<'_>, error: NotAdded) -> ApiError {
    match error {
        NotAdded::Fixed => {
            field.refused("this server has no models but those that it began with".to_owned())
        }
        NotAdded::Full => {
            ApiError::invalid(format!("expected at most {MAX_MODELS} models, found more"))
                .at(field.path())
        }
        NotAdded::Taken(name) => field.refused(format!(
            "there is a model `{name}`: expected that name, or a model of another one"
        )),
        NotAdded::Unfit(message) => field.refused(message),
    }
}

/// The model `number` as it is now; who did what to it is logged.
fn told(app: &Shared, caller: &Caller, action: &str, number: usize) -> Response {
    let named = app.named(number, None);
    app.log(json!({
        "event": "models",
        "request_id": caller.request_id,
        "key": caller.key_name,
        "action": action,
        "model": named.name,
    }));
    Json(models::of_openai(app, &named)).into_response()
}
