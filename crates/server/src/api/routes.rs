//! Every route, what its requests have and what it answers: the router and the OpenAPI document are made of this.

use axum::Router;
use axum::extract::{Request, State};
use axum::routing::{MethodRouter, any, get, post};

use super::shape::Shape;
use super::{
    Dialect, Shared, adapters, anthropic, embeddings, handle, loading, models, no_such_path,
    openai, openapi, operations, rerank, responses, tokens,
};

/// A route.
pub(super) struct Route {
    /// In it, `{name}` is the name of a model.
    pub(super) path: &'static str,
    /// What it does.
    pub(super) about: &'static str,
    /// Whose shape its errors have.
    pub(super) dialect: Dialect,
    /// What the body of a request has; routes without one are for GET.
    pub(super) request: Option<Shape>,
    pub(super) answer: Answer,
    /// Whether everybody may ask.
    pub(super) is_open: bool,
    /// Whether only keys with the permission may ask.
    pub(super) is_admin: bool,
    handler: MethodRouter<Shared>,
}

/// What a route answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    /// JSON that the document describes under this name.
    Json(&'static str),
    /// The same, or events if the request asks for a stream.
    JsonOrEvents(&'static str),
    /// Text of this type.
    Text(&'static str),
}

/// All of them.
pub(super) fn all() -> Vec<Route> {
    use Answer::{Json, JsonOrEvents};
    use Dialect::{Anthropic, OpenAi};

    /// A route for requests with a body.
    macro_rules! to {
        ($path:literal, $dialect:ident, $shape:path, $handler:path, $answer:expr, $about:literal) => {
            Route {
                path: $path,
                about: $about,
                dialect: $dialect,
                request: Some($shape),
                answer: $answer,
                is_open: false,
                is_admin: false,
                handler: post(|State(app): State<Shared>, request: Request| async move {
                    handle($dialect, app, request, $shape, $handler).await
                }),
            }
        };
    }
    let read = |path, answer, handler, about| Route {
        path,
        about,
        dialect: OpenAi,
        request: None,
        answer,
        is_open: false,
        is_admin: false,
        handler,
    };
    vec![
        to!(
            "/v1/chat/completions",
            OpenAi,
            openai::chat::REQUEST,
            openai::chat::answer,
            JsonOrEvents("ChatCompletion"),
            "Answers a conversation"
        ),
        to!(
            "/v1/completions",
            OpenAi,
            openai::completions::REQUEST,
            openai::completions::answer,
            JsonOrEvents("Completion"),
            "Continues texts"
        ),
        to!(
            "/v1/responses",
            OpenAi,
            responses::REQUEST,
            responses::answer,
            JsonOrEvents("Response"),
            "Answers a conversation, which later requests may continue"
        ),
        to!(
            "/v1/embeddings",
            OpenAi,
            embeddings::REQUEST,
            embeddings::answer,
            Json("Embeddings"),
            "Makes vectors of texts"
        ),
        to!(
            "/v1/rerank",
            OpenAi,
            rerank::REQUEST,
            rerank::answer,
            Json("Ranking"),
            "Sorts documents by how near they are to a query"
        ),
        to!(
            "/rerank",
            OpenAi,
            rerank::REQUEST,
            rerank::answer,
            Json("Ranking"),
            "The same"
        ),
        to!(
            "/v1/messages",
            Anthropic,
            anthropic::REQUEST,
            anthropic::answer,
            JsonOrEvents("Message"),
            "Answers a conversation"
        ),
        to!(
            "/v1/messages/count_tokens",
            Anthropic,
            anthropic::COUNT_REQUEST,
            anthropic::count_tokens,
            Json("TokenCount"),
            "Counts the tokens of a conversation"
        ),
        to!(
            "/tokenize",
            OpenAi,
            tokens::TOKENIZE,
            tokens::tokenize,
            Json("Tokens"),
            "Tokens of a text or a conversation"
        ),
        to!(
            "/detokenize",
            OpenAi,
            tokens::DETOKENIZE,
            tokens::detokenize,
            Json("Text"),
            "The text of tokens"
        ),
        Route {
            is_admin: true,
            ..to!(
                "/v1/load_lora_adapter",
                OpenAi,
                adapters::LOAD,
                adapters::load,
                Json("Model"),
                "Loads an adapter, for keys with the permission"
            )
        },
        Route {
            is_admin: true,
            ..to!(
                "/v1/unload_lora_adapter",
                OpenAi,
                adapters::UNLOAD,
                adapters::unload,
                Json("Deleted"),
                "Unloads an adapter, for keys with the permission"
            )
        },
        Route {
            is_admin: true,
            ..to!(
                "/v1/models/load",
                OpenAi,
                loading::LOAD,
                loading::load,
                Json("Model"),
                "Loads a model, for keys with the permission"
            )
        },
        Route {
            is_admin: true,
            ..to!(
                "/v1/models/unload",
                OpenAi,
                loading::UNLOAD,
                loading::unload,
                Json("Model"),
                "Unloads a model, for keys with the permission"
            )
        },
        Route {
            is_admin: true,
            ..to!(
                "/v1/models/swap",
                OpenAi,
                loading::SWAP,
                loading::swap,
                Json("Model"),
                "Replaces groups of a model's weights, for keys with the permission"
            )
        },
        read(
            "/v1/models",
            Json("Models"),
            get(models::list),
            "The models",
        ),
        read(
            "/v1/models/{name}",
            Json("Model"),
            get(models::one),
            "A model",
        ),
        read(
            super::METRICS,
            Answer::Text(operations::METRICS_TYPE),
            get(operations::metrics),
            "What Prometheus reads",
        ),
        read(
            "/openapi.json",
            Json("Document"),
            get(openapi::document),
            "This document",
        ),
        Route {
            is_open: true,
            ..read(
                "/health",
                Json("Health"),
                get(operations::health),
                "Whether requests are answered",
            )
        },
        Route {
            is_open: true,
            ..read(
                "/health/live",
                Json("Health"),
                get(operations::live),
                "Whether the server should be left alone: it answers, ends, or opens a lost device again",
            )
        },
    ]
}

/// The router of all of them.
pub(super) fn router() -> Router<Shared> {
    let routes = all().into_iter();
    let routes = routes.fold(Router::new(), |router, route| {
        // Names of models may have slashes.
        let path = route.path.replace("{name}", "{*name}");
        router.route(&path, route.handler)
    });
    routes.route("/v1/{*path}", any(no_such_path))
}
