//! The OpenAPI document: of each route what its requests may have, by the tables that they are checked with.

use axum::Json;
use axum::extract::State;
use serde_json::{Map, Value, json};

use super::routes::{self, Answer, Route};
use super::shape::{Field, Served, Shape, TEXT, field, items, required};
use super::{ANTHROPIC_VERSION, Dialect, METRICS, Shared};
use crate::VERSION;

/// The document, of the models that are served now.
pub(super) async fn document(State(app): State<Shared>) -> Json<Value> {
    let served = Served {
        models: app.names(),
        n_vocab: {
            let models = app.catalog.texts();
            let smallest = models.iter().map(|model| model.n_vocab).min();
            smallest.unwrap_or_default()
        },
    };
    let mut paths = Map::new();
    for route in routes::all() {
        let method = match route.request {
            Some(_) => "post",
            None => "get",
        };
        let operation = operation(&route, &served);
        paths.insert(route.path.to_owned(), json!({ method: operation }));
    }
    let schemas = ANSWERS.iter().map(|(name, shape)| {
        let schema = shape.schema(&served);
        ((*name).to_owned(), schema)
    });
    let mut document = json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Sterna",
            "version": VERSION,
            "summary": "Low-bit language models, in the dialects of OpenAI and Anthropic",
            "license": {"name": "MIT OR Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas.collect::<Map<_, _>>(),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    });
    if !app.settings.keys.is_empty() {
        document["security"] = json!([{"bearer": []}, {"key": []}]);
    }
    if app.settings.public_metrics {
        document["paths"][METRICS]["get"]["security"] = json!([]);
    }
    Json(document)
}

fn operation(route: &Route, served: &Served) -> Value {
    let mut parameters = Vec::new();
    if route.path.contains("{name}") {
        parameters.push(json!({
            "name": "name", "in": "path", "required": true, "schema": Shape::Model.schema(served),
        }));
    }
    if route.path.starts_with("/v1/models") {
        parameters.push(json!({
            "name": ANTHROPIC_VERSION, "in": "header", "required": false, "schema": {"type": "string"},
            "description": "With it, the answer has Anthropic's shape",
        }));
    }
    let reference = |name: &str| json!({"$ref": format!("#/components/schemas/{name}")});
    let content = match route.answer {
        Answer::Text(kind) => json!({ kind: {} }),
        Answer::Json(name) => json!({"application/json": {"schema": reference(name)}}),
        Answer::JsonOrEvents(name) => json!({
            "application/json": {"schema": reference(name)},
            "text/event-stream": {"schema": EVENT.schema(served)},
        }),
    };
    let error = match (route.dialect, parameters.is_empty()) {
        (Dialect::OpenAi, true) => reference("Error"),
        (Dialect::OpenAi, false) => {
            json!({"anyOf": [reference("Error"), reference("AnthropicError")]})
        }
        (Dialect::Anthropic, _) => reference("AnthropicError"),
    };
    let mut responses = Map::new();
    responses.insert(
        "200".to_owned(),
        json!({"description": route.about, "content": content}),
    );
    let needs_body = route.request.is_some();
    for (status, about, is_possible) in [
        ("400", "The request is wrong", needs_body),
        ("401", "No key that is let in", !route.is_open),
        (
            "403",
            match route.is_admin {
                true => "The key has no permission, or the server isn't called so",
                false => "The server isn't called so",
            },
            !route.is_open,
        ),
        (
            "404",
            "There is no such model",
            needs_body || !parameters.is_empty(),
        ),
        ("408", "The request took too long to arrive", needs_body),
        ("413", "The request is too large", needs_body),
        ("415", "The request isn't JSON", needs_body),
        (
            "429",
            "Too much is asked; Retry-After says when to come back",
            needs_body,
        ),
        ("500", "The server failed", needs_body),
        ("503", "The server stops, or its device is lost", true),
    ] {
        // Health is told in the same shape, whatever it is.
        let schema = match route.is_open {
            true => content.clone(),
            false => json!({"application/json": {"schema": error}}),
        };
        if is_possible {
            let response = json!({"description": about, "content": schema});
            responses.insert(status.to_owned(), response);
        }
    }
    let id = route.path.replace(['/', '{', '}', '.'], "_");
    let mut operation = json!({
        "operationId": id.trim_matches('_'),
        "summary": route.about,
        "responses": responses,
    });
    if !parameters.is_empty() {
        operation["parameters"] = parameters.into();
    }
    if let Some(shape) = route.request {
        let schema = shape.schema(served);
        operation["requestBody"] = json!({
            "required": true, "content": {"application/json": {"schema": schema}},
        });
    }
    if route.is_open {
        operation["security"] = json!([]);
    }
    operation
}

/// An event of a stream.
const EVENT: Shape = Shape::Object(&[&[field("event", TEXT), field("data", TEXT)]]);
const N: Shape = Shape::Whole(0, u64::MAX);
const ANYTHING: Shape = Shape::Object(&[]);
const OBJECTS: Shape = items(&ANYTHING, "objects");

const HEAD: &[Field] = &[
    required("id", TEXT),
    required("object", TEXT),
    required("created", N),
    required("model", TEXT),
];

const USAGE: Shape = Shape::Object(&[&[
    required("prompt_tokens", N),
    field("completion_tokens", N),
    required("total_tokens", N),
]]);

const MODEL: Shape = Shape::Object(&[&[
    required("id", TEXT),
    field("object", TEXT),
    field("type", TEXT),
    field("status", Shape::Object(&[&[required("value", TEXT)]])),
    field("pinned", Shape::Flag),
    field("generation", N),
    field("swapped", OBJECTS),
]]);

const CHAT_CHOICE: Shape = Shape::Object(&[&[
    required("index", N),
    required("finish_reason", TEXT),
    required(
        "message",
        Shape::Object(&[&[
            required("role", TEXT),
            field("content", TEXT),
            field("reasoning", TEXT),
            field("tool_calls", OBJECTS),
        ]]),
    ),
    field("logprobs", ANYTHING),
    field("receipt", ANYTHING),
]]);

const TEXT_CHOICE: Shape = Shape::Object(&[&[
    required("index", N),
    required("text", TEXT),
    required("finish_reason", TEXT),
    field("logprobs", ANYTHING),
    field("receipt", ANYTHING),
]]);

/// What is answered, by the names that routes have for it.
const ANSWERS: &[(&str, Shape)] = &[
    (
        "ChatCompletion",
        Shape::Object(&[
            HEAD,
            &[
                required("choices", items(&CHAT_CHOICE, "choices")),
                required("usage", USAGE),
            ],
        ]),
    ),
    (
        "Completion",
        Shape::Object(&[
            HEAD,
            &[
                required("choices", items(&TEXT_CHOICE, "choices")),
                required("usage", USAGE),
            ],
        ]),
    ),
    (
        "Response",
        Shape::Object(&[&[
            required("id", TEXT),
            required("object", TEXT),
            required("created_at", N),
            required("status", TEXT),
            required("model", TEXT),
            required("output", OBJECTS),
            required("usage", ANYTHING),
        ]]),
    ),
    (
        "Embeddings",
        Shape::Object(&[&[
            required("object", TEXT),
            required("model", TEXT),
            required(
                "data",
                items(
                    &Shape::Object(&[&[
                        required("object", TEXT),
                        required("index", N),
                        required(
                            "embedding",
                            Shape::OneOf(&[
                                TEXT,
                                items(&Shape::Number(f32::MIN, f32::MAX), "numbers"),
                            ]),
                        ),
                    ]]),
                    "vectors",
                ),
            ),
            required("usage", USAGE),
        ]]),
    ),
    (
        "Ranking",
        Shape::Object(&[&[
            required("id", TEXT),
            required("model", TEXT),
            required(
                "results",
                items(
                    &Shape::Object(&[&[
                        required("index", N),
                        required("relevance_score", Shape::Number(f32::MIN, f32::MAX)),
                        field("document", ANYTHING),
                    ]]),
                    "results",
                ),
            ),
            required("usage", USAGE),
        ]]),
    ),
    (
        "Message",
        Shape::Object(&[&[
            required("id", TEXT),
            required("type", TEXT),
            required("role", TEXT),
            required("model", TEXT),
            required("content", OBJECTS),
            field("stop_reason", TEXT),
            field("stop_sequence", TEXT),
            required("usage", ANYTHING),
        ]]),
    ),
    (
        "TokenCount",
        Shape::Object(&[&[required("input_tokens", N)]]),
    ),
    (
        "Tokens",
        Shape::Object(&[&[
            required("tokens", items(&N, "ids")),
            required("count", N),
            required("max_model_len", N),
            field("token_strs", items(&TEXT, "texts")),
        ]]),
    ),
    (
        "Text",
        Shape::Object(&[&[required("content", TEXT), required("prompt", TEXT)]]),
    ),
    (
        "Models",
        Shape::Object(&[&[required("data", items(&MODEL, "models"))]]),
    ),
    ("Model", MODEL),
    (
        "Deleted",
        Shape::Object(&[&[required("id", TEXT), required("deleted", Shape::Flag)]]),
    ),
    ("Health", Shape::Object(&[&[required("status", TEXT)]])),
    (
        "Document",
        Shape::Object(&[&[required("openapi", TEXT), required("paths", ANYTHING)]]),
    ),
    (
        "Error",
        Shape::Object(&[&[required(
            "error",
            Shape::Object(&[&[
                required("message", TEXT),
                required("type", TEXT),
                field("param", TEXT),
                field("code", TEXT),
            ]]),
        )]]),
    ),
    (
        "AnthropicError",
        Shape::Object(&[&[
            required("type", TEXT),
            required(
                "error",
                Shape::Object(&[&[required("type", TEXT), required("message", TEXT)]]),
            ),
        ]]),
    ),
];
