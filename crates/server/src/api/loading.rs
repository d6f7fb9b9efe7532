//! Loading and unloading models while the server runs, and replacing groups of their weights.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use sterna::ErrorCode;
use sterna::swap::GroupRevision;

use super::adapters::expect_admin;
use super::json::{At, Checked};
use super::shape::{Field, SAID, Shape, field, items, required};
use super::{ApiError, Caller, Shared, models};
use crate::catalog::{MAX_MODELS, NotAdded};
use crate::engine::NotSwapped;

/// The name of a model, or, to load one that isn't known, what the command line calls it.
const NAMES: &[Field] = &[required("model", SAID)];

/// What a request to load one may have.
pub(super) const LOAD: Shape = Shape::Object(&[NAMES, &[field("pin", Shape::Flag)]]);

/// What a request to unload one may have.
pub(super) const UNLOAD: Shape = Shape::Object(&[NAMES]);

/// What a request to replace groups of its weights may have.
pub(super) const SWAP: Shape = Shape::Object(&[
    NAMES,
    &[
        // What the command line calls the other revision.
        required("revision", SAID),
        // Without any, all that differ.
        field("groups", items(&SAID, "names of groups")),
    ],
]);

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
    Ok(Json(told(&app, &caller, "load", number)).into_response())
}

pub(super) async fn unload(
    app: Shared,
    caller: Caller,
    body: Checked,
) -> Result<Response, ApiError> {
    let at = body.at();
    expect_admin(&app, &caller)?;
    let field = at.get("model");
    let number = expect_known(&app, &field)?;
    let name = field.required_text()?;
    if !app.engines.unload(number).await {
        return Err(field.refused(format!("the model `{name}` is there to stay")));
    }
    Ok(Json(told(&app, &caller, "unload", number)).into_response())
}

pub(super) async fn swap(app: Shared, caller: Caller, body: Checked) -> Result<Response, ApiError> {
    let at = body.at();
    expect_admin(&app, &caller)?;
    let number = expect_known(&app, &at.get("model"))?;
    let field = at.get("revision");
    let revision = field.required_text()?.to_owned();
    let groups = at.get("groups").items();
    let ids = groups.iter().map(|id| Ok(id.required_text()?.to_owned()));
    let ids: Vec<String> = ids.collect::<Result<_, ApiError>>()?;
    let swapping = {
        let app = app.clone();
        move || app.catalog.swap(number, &revision, &ids)
    };
    let swapped = app.aside(swapping).await?;
    let swapped = swapped.map_err(|error| match error {
        NotSwapped::Fixed => at
            .get("model")
            .refused("the weights of this model stay as they are".to_owned()),
        NotSwapped::Unloaded => at
            .get("model")
            .refused("the model isn't loaded: expected one that is".to_owned()),
        NotSwapped::Unfit(error) => match error.code() {
            // It isn't the revision's fault.
            ErrorCode::OutOfMemory | ErrorCode::DeviceLost => ApiError::from(error),
            _ => field.refused(format!("{error:#}")),
        },
    })?;
    let mut model = told(&app, &caller, "swap", number);
    let revision = |group: &GroupRevision| {
        let hash = group.hash.map(|hash| hash.to_string());
        json!({"version": group.version, "hash": hash})
    };
    let swapped = swapped.iter().map(|group| {
        json!({
            "group": group.to.id,
            "from": group.from.as_ref().map(revision),
            "to": revision(&group.to),
        })
    });
    model["swapped"] = swapped.collect();
    Ok(Json(model).into_response())
}

/// The number of the model that `field` names.
fn expect_known(app: &Shared, field: &At<'_>) -> Result<usize, ApiError> {
    let name = field.required_text()?;
    known(app, name).ok_or_else(|| {
        let message = format!("the model `{name}` does not exist");
        ApiError::new(StatusCode::NOT_FOUND, message)
            .at(field.path())
            .with_code("model_not_found")
    })
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
        NotAdded::Failed(error) => ApiError::from(error).at(field.path()),
    }
}

/// The model `number` as it is now; who did what to it is logged.
fn told(app: &Shared, caller: &Caller, action: &str, number: usize) -> Value {
    let named = app.named(number, None);
    app.log(json!({
        "event": "models",
        "request_id": caller.request_id,
        "key": caller.key_name,
        "action": action,
        "model": named.name,
    }));
    models::of_openai(app, &named)
}
