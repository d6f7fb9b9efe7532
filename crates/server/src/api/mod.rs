//! The HTTP side: routes, who is let in, and what all dialects share.

mod adapters;
mod anthropic;
mod auth;
mod embeddings;
mod error;
mod json;
mod limits;
mod loading;
mod models;
mod openai;
mod openapi;
mod operations;
mod rerank;
mod responses;
mod routes;
mod shape;
mod stream;
mod tokens;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::Response;
use futures_util::StreamExt;
use serde_json::{Map, Value, json};
use tokio::sync::Semaphore;
use tokio::task::JoinError;
use tokio::time::timeout;
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

use crate::adapters::{Offered, Shelf};
use crate::answer::{Answers, Ask, Prepared, Summary, prepare};
use crate::catalog::Catalog;
use crate::engine::{AdapterKey, Engines, Job, Outputs, Work, replies};
use crate::metrics::Metrics;
use crate::model::ModelText;
use crate::settings::{Settings, tell};
use crate::trace::Tracing;
use json::{At, Checked};
use limits::{Limited, Limits, Spent};
use shape::Shape;

pub use auth::{Keys, KeysError};
pub(crate) use error::{ApiError, Dialect};

/// What every handler needs.
pub(crate) struct App {
    pub(crate) engines: Engines,
    pub(crate) catalog: Catalog,
    /// Their adapters.
    pub(crate) shelf: Arc<Shelf>,
    pub(crate) settings: Settings,
    pub(crate) metrics: Arc<Metrics>,
    /// What keys have left.
    pub(crate) limits: Limits,
    /// What earlier responses can be continued from.
    pub(crate) store: responses::Store,
    /// Prompts are computed by so many at once.
    preparing: Arc<Semaphore>,
    /// And grammars by so many others, as some take long.
    compiling: Arc<Semaphore>,
    is_draining: AtomicBool,
}

pub(crate) type Shared = Arc<App>;

/// Who asks.
#[derive(Debug, Clone)]
pub(crate) struct Caller {
    /// The number of the key.
    key: usize,
    key_name: String,
    pub(crate) request_id: String,
    /// The trace of the request.
    tracing: Option<Arc<Tracing>>,
}

/// A model that a request names.
#[derive(Clone)]
pub(crate) struct Named {
    pub(crate) index: usize,
    /// What the request calls it.
    pub(crate) name: String,
    pub(crate) text: Arc<ModelText>,
    pub(crate) adapter: Option<Offered>,
}

impl Named {
    /// What the engine knows its adapter by.
    fn key(&self) -> Option<Arc<AdapterKey>> {
        self.adapter
            .as_ref()
            .map(|adapter| Arc::clone(&adapter.key))
    }
}

impl App {
    pub(crate) fn new(
        engines: Engines,
        catalog: Catalog,
        shelf: Arc<Shelf>,
        settings: Settings,
        metrics: Arc<Metrics>,
    ) -> App {
        let n_preparing = std::thread::available_parallelism().map_or(1, |n| n.get());
        App {
            engines,
            catalog,
            shelf,
            limits: Limits::new(settings.keys.quotas()),
            settings,
            metrics,
            store: responses::Store::default(),
            preparing: Arc::new(Semaphore::new(n_preparing)),
            compiling: Arc::new(Semaphore::new((n_preparing / 2).max(1))),
            is_draining: AtomicBool::new(false),
        }
    }

    /// Takes no more requests.
    pub(crate) fn drain(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Relaxed)
    }

    /// The model called what `field` says.
    pub(crate) fn model(&self, field: &At<'_>) -> Result<Named, ApiError> {
        let name = field.required_text()?;
        self.model_named(name).ok_or_else(|| {
            let names = self.names().join(" or ");
            let message = format!("the model `{name}` does not exist; expected {names}");
            ApiError::new(StatusCode::NOT_FOUND, message)
                .at(field.path())
                .with_code("model_not_found")
        })
    }

    /// The same; the first one if none is named.
    pub(crate) fn model_or_first(&self, field: &At<'_>) -> Result<Named, ApiError> {
        match (field.is_absent(), self.catalog.texts().is_empty()) {
            (true, false) => Ok(self.named(0, None)),
            _ => self.model(field),
        }
    }

    /// All that requests may name: the models, each before its adapters.
    pub(crate) fn all(&self) -> Vec<Named> {
        let adapters = self.shelf.all();
        let of = |index: usize| {
            let own = adapters
                .iter()
                .filter(move |adapter| adapter.model == index);
            let own = own.map(move |adapter| self.named(index, Some(adapter.clone())));
            [self.named(index, None)].into_iter().chain(own)
        };
        (0..self.catalog.texts().len()).flat_map(of).collect()
    }

    /// What they are called.
    pub(crate) fn names(&self) -> Vec<String> {
        self.all().into_iter().map(|named| named.name).collect()
    }

    /// The one called `name`. Adapters may also be named without their model, if no other is called so.
    pub(crate) fn model_named(&self, name: &str) -> Option<Named> {
        let mut all = self.all();
        let whole = all.iter().position(|named| named.name == name);
        let at = whole.or_else(|| {
            let is_called = |named: &Named| {
                let adapter = named.adapter.as_ref();
                adapter.is_some_and(|adapter| adapter.key.name == name)
            };
            let mut found = all.iter().enumerate().filter(|(_, named)| is_called(named));
            match (found.next(), found.next()) {
                (Some((at, _)), None) => Some(at),
                _ => None,
            }
        })?;
        Some(Named {
            name: name.to_owned(),
            ..all.swap_remove(at)
        })
    }

    fn named(&self, index: usize, adapter: Option<Offered>) -> Named {
        let text = Arc::clone(&self.catalog.texts()[index]);
        Named {
            index,
            name: match &adapter {
                None => text.name.clone(),
                Some(adapter) => format!("{}:{}", text.name, adapter.key.name),
            },
            text,
            adapter,
        }
    }

    /// Computes `work`, which takes a moment, where it stalls no connection.
    pub(crate) async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let permit = Arc::clone(&self.preparing).acquire_owned().await;
        // The thread goes on if nobody waits any more.
        let done = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(permit);
            done
        });
        done.await.map_err(|error| unprepared(&error))
    }

    /// What `asks` ask of the model of `text`. Those who have grammars wait for each other, and nobody else does.
    ///
    /// Errors: also, a grammar takes longer than it may, or others do.
    async fn prepared(
        &self,
        text: Arc<ModelText>,
        asks: Vec<Ask>,
    ) -> Result<Vec<Prepared>, ApiError> {
        let has_grammar = asks.iter().any(has_grammar);
        let given_up = GivenUp::default();
        let is_given_up = Arc::clone(&given_up.0);
        let prepare = move || {
            let awaited = |_: &Ask| !is_given_up.load(Ordering::Relaxed);
            let all = asks.into_iter().take_while(awaited);
            let all = all.map(|ask| prepare(&text, ask));
            all.collect::<Result<Vec<_>, _>>()
        };
        if !has_grammar {
            return Ok(self.aside(prepare).await??);
        }
        let limit = self.settings.grammar_timeout;
        let permit = Arc::clone(&self.compiling).acquire_owned();
        let Ok(permit) = timeout(limit, permit).await else {
            let message = "the grammars of other requests take too long; try again later";
            let busy = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message);
            return Err(busy.with_code("grammars_busy").retry_after(limit));
        };
        // Nothing stops it within a grammar, whose size its own limits bound: it has its place for as long.
        let prepared = tokio::task::spawn_blocking(move || {
            let prepared = prepare();
            drop(permit);
            prepared
        });
        let Ok(prepared) = timeout(limit, prepared).await else {
            let seconds = limit.as_secs_f64();
            let message = format!(
                "what the answer has to match: expected what takes at most {seconds} s to prepare, found what takes longer"
            );
            return Err(ApiError::invalid(message).with_code("grammar_too_slow"));
        };
        Ok(prepared.map_err(|error| unprepared(&error))??)
    }

    /// The answers to `asks`, of which each has as many as it says.
    pub(crate) async fn answers(
        self: &Arc<App>,
        caller: &Caller,
        model: &Named,
        dialect: &'static str,
        asks: Vec<Ask>,
    ) -> Result<Answers, ApiError> {
        let text = Arc::clone(&model.text);
        let receipt = asks.iter().any(|ask| ask.receipt);
        if text.is_encoder {
            return Err(ApiError::invalid(format!(
                "the model `{}` makes vectors of texts: expected a request to /v1/embeddings",
                text.name
            ))
            .at("model"));
        }
        let prepared = self.prepared(text, asks).await?;
        let (mut requests, mut readers) = (Vec::new(), Vec::new());
        let mut n_prompt = 0;
        for prepared in prepared {
            // However many answers a prompt has.
            let prompt = prepared.requests.first().map(|request| &request.prompt);
            n_prompt += prompt.map_or(0, Vec::len);
            requests.extend(prepared.requests);
            readers.extend(prepared.readers);
        }
        let (replies, outputs) = replies(requests.len());
        let jobs = requests
            .into_iter()
            .zip(replies)
            .map(|(request, reply)| Job {
                model: model.index,
                adapter: model.key(),
                key: caller.key,
                work: Work::Generate(Box::new(request)),
                receipt,
                reply,
            });
        self.engines.submit(jobs.collect())?;
        self.spend(caller, n_prompt, "prompt");
        if let Some(tracing) = &caller.tracing {
            tracing.say("gen_ai.request.model", model.name.as_str());
        }
        let log = Arc::clone(&self.settings.log);
        let (app, caller) = (Arc::clone(self), caller.clone());
        let head = json!({
            "event": "answer",
            "request_id": caller.request_id,
            "key": caller.key_name,
            "dialect": dialect,
            "model": model.name,
        });
        let sign = self.settings.sign.clone();
        Ok(Answers::new(
            outputs,
            readers,
            sign,
            move |summary: &Summary| {
                let mut record = match head {
                    Value::Object(members) => members,
                    _ => Map::new(),
                };
                summary.add_to(&mut record);
                app.spend(&caller, summary.n_read, "generated");
                if let Some(tracing) = &caller.tracing {
                    summary.trace(tracing);
                }
                log(&record);
            },
        ))
    }

    /// Logs `record`, an object.
    pub(crate) fn log(&self, record: Value) {
        tell(&self.settings.log, record);
    }

    /// Counts `n` tokens of the kind `kind` that `caller` used.
    fn spend(&self, caller: &Caller, n: usize, kind: &str) {
        if !self.settings.keys.is_empty() {
            self.limits.spend(caller.key, n);
            self.metrics.count_tokens(&caller.key_name, kind, n);
        }
    }

    /// Submits one piece of work that isn't an answer, of `n_tokens`; its outputs.
    pub(crate) fn submit(
        &self,
        caller: &Caller,
        model: &Named,
        work: Work,
        n_tokens: usize,
    ) -> Result<Outputs, ApiError> {
        let (replies, outputs) = replies(1);
        let jobs = replies.into_iter().zip([work]).map(|(reply, work)| Job {
            model: model.index,
            adapter: model.key(),
            key: caller.key,
            work,
            receipt: false,
            reply,
        });
        self.engines.submit(jobs.collect())?;
        self.spend(caller, n_tokens, "prompt");
        Ok(outputs)
    }
}

/// Is told when nobody waits any more.
#[derive(Default)]
struct GivenUp(Arc<AtomicBool>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Whether the answers to `ask` have to match something.
fn has_grammar(ask: &Ask) -> bool {
    ask.grammar.is_some() || ask.calls.have_grammar()
}

fn unprepared(error: &JoinError) -> ApiError {
    ApiError::new(
        StatusCode::INTERNAL_SERVER_ERROR,
        format!("preparing the request: {error}"),
    )
}

/// All routes.
pub(crate) fn router(app: Shared) -> Router {
    let cors = cors(&app.settings.cors);
    let routes = routes::router()
        .with_state(Arc::clone(&app))
        .layer(middleware::from_fn_with_state(app, gate));
    match cors {
        Some(cors) => routes.layer(cors),
        None => routes,
    }
}

/// What pages of `origins` may do, which is all that others may.
fn cors(origins: &[String]) -> Option<CorsLayer> {
    if origins.is_empty() {
        return None;
    }
    let allowed = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.iter().filter_map(|origin| origin.parse().ok())),
    };
    Some(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods(Any)
            .allow_headers(Any)
            .expose_headers(Any),
    )
}

async fn no_such_path(request: Request) -> Response {
    let dialect = dialect_of(&request);
    let path = request.uri().path();
    let message = format!("{} {path}: there is nothing here", request.method());
    drain(request.into_body()).await;
    ApiError::new(StatusCode::NOT_FOUND, message).respond(dialect)
}

/// Reads what comes with a request that is refused, if it is short and comes soon: its connection can be kept then.
async fn drain(body: Body) {
    const LIMIT: usize = 64 << 10;
    const TIMEOUT: Duration = Duration::from_secs(2);
    let _ = timeout(TIMEOUT, bytes(body, LIMIT)).await;
}

/// What may be asked while the server stops, and isn't logged.
const METRICS: &str = "/metrics";

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// The same, as Anthropic's clients know it.
const ANTHROPIC_REQUEST_ID: HeaderName = HeaderName::from_static("request-id");
/// What tells Anthropic's clients from OpenAI's.
const ANTHROPIC_VERSION: &str = "anthropic-version";

fn dialect_of(request: &Request) -> Dialect {
    let of_path = request.uri().path().starts_with("/v1/messages");
    match of_path || request.headers().contains_key(ANTHROPIC_VERSION) {
        true => Dialect::Anthropic,
        false => Dialect::OpenAi,
    }
}

/// Lets requests in that may come in, and gives each a name in logs.
async fn gate(State(app): State<Shared>, mut request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let request_id = request_id(request.headers());
    let dialect = dialect_of(&request);
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let is_health = matches!(&path[..], "/health" | "/health/live");
    let is_public = is_health || app.settings.public_metrics && path == METRICS;
    let caller = app.settings.keys.find(request.headers());
    // What is only looked at isn't traced, nor is who isn't let in.
    let tracer = app.settings.tracer.as_ref();
    let tracer = tracer.filter(|_| !is_health && path != METRICS && caller.is_some());
    let tracing = tracer
        .and_then(|tracer| Tracing::begin(tracer, format!("{method} {path}"), request.headers()));
    let caller = caller.map(|(key, name)| Caller {
        key,
        key_name: name.to_owned(),
        request_id: request_id.clone(),
        tracing: tracing.clone(),
    });
    let mut key_name = String::new();
    let hosts = &app.settings.hosts;
    let unknown_host = hosts.check(request.headers(), request.uri()).err();
    let refused = match (&unknown_host, &caller) {
        (Some(host), _) => Some(refused_host(host)),
        (_, None) if !is_public => Some(
            ApiError::new(
                StatusCode::UNAUTHORIZED,
                "expected a key that is let in, as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            )
            .with_code("invalid_api_key"),
        ),
        _ if app.is_draining() && !is_health && path != METRICS => Some(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "the server is about to stop",
        )),
        // What is only looked at isn't counted.
        (_, Some(caller)) if method == Method::POST => {
            let spent = app.limits.admit(caller.key).err();
            spent.map(|spent| {
                let limit = spent.what.name();
                app.metrics.count_limited(&caller.key_name, limit);
                refusal(&caller.key_name, spent)
            })
        }
        _ => None,
    };
    let key = caller.as_ref().map(|caller| caller.key);
    let mut response = match refused {
        Some(error) => {
            drain(request.into_body()).await;
            error.respond(dialect)
        }
        None => {
            if let Some(caller) = caller {
                key_name.clone_from(&caller.key_name);
                request.extensions_mut().insert(caller);
            }
            next.run(request).await
        }
    };
    if let Ok(value) = HeaderValue::try_from(&request_id) {
        let headers = response.headers_mut();
        headers.insert(ANTHROPIC_REQUEST_ID, value.clone());
        headers.insert(REQUEST_ID, value);
    }
    if let Some(key) = key {
        tell_limits(&app, key, dialect, response.headers_mut());
    }
    let status = response.status().as_u16();
    if let Some(tracing) = tracing {
        tracing.say("http.request.method", method.as_str());
        tracing.say("url.path", path.as_str());
        tracing.say("http.response.status_code", status);
        tracing.say("sterna.request_id", request_id.as_str());
        tracing.say("sterna.key", key_name.as_str());
        if response.status().is_server_error() {
            tracing.fail();
        }
    }
    if !is_health && path != METRICS {
        let name = match dialect {
            Dialect::OpenAi => "openai",
            Dialect::Anthropic => "anthropic",
        };
        app.metrics.count(name, status);
        let record = json!({
            "event": "request",
            "request_id": request_id,
            "key": key_name,
            "method": method.as_str(),
            "path": path,
            "status": status,
            "ms": begun.elapsed().as_millis() as u64,
        });
        app.log(record);
    }
    response
}

/// What is said to who asks by the name `host`, which isn't one of the server's.
fn refused_host(host: &str) -> ApiError {
    let message = format!(
        "expected a name of this server in `Host`, such as localhost or one of --allow-host, found {host:?}"
    );
    ApiError::new(StatusCode::FORBIDDEN, message).with_code("host_not_allowed")
}

/// What is said to `key`, which has spent what it may.
fn refusal(key: &str, spent: Spent) -> ApiError {
    let Spent {
        what,
        limit,
        retry_after,
    } = spent;
    let verb = match what {
        Limited::Requests => "send",
        Limited::Tokens => "use",
    };
    let seconds = retry_after.as_secs_f64().ceil();
    let message = format!(
        "the key `{key}` may {verb} {limit} {} a minute: try again in {seconds} s",
        what.name()
    );
    ApiError::new(StatusCode::TOO_MANY_REQUESTS, message)
        .with_code("rate_limit_exceeded")
        .retry_after(retry_after)
}

/// Says in `headers` what `key` has left, as clients of OpenAI read it, and those of Anthropic.
fn tell_limits(app: &App, key: usize, dialect: Dialect, headers: &mut HeaderMap) {
    for left in app.limits.left(key) {
        let what = left.what.name();
        let reset = left.reset.as_secs_f64();
        let mut all = vec![
            (format!("x-ratelimit-limit-{what}"), left.limit.to_string()),
            (
                format!("x-ratelimit-remaining-{what}"),
                left.remaining.to_string(),
            ),
            (format!("x-ratelimit-reset-{what}"), format!("{reset:.3}s")),
        ];
        if dialect == Dialect::Anthropic {
            let at = openai::now() + left.reset.as_secs_f64().ceil() as u64;
            let of = |name| format!("anthropic-ratelimit-{what}-{name}");
            all.extend([
                (of("limit"), left.limit.to_string()),
                (of("remaining"), left.remaining.to_string()),
                (of("reset"), models::rfc3339(at)),
            ]);
        }
        for (name, value) in all {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), value.parse()) {
                headers.insert(name, value);
            }
        }
    }
}

/// The id that a client gave its request, if it is fit for a log, or a new one.
fn request_id(headers: &HeaderMap) -> String {
    const MAX_LEN: usize = 64;
    let is_fit = |id: &&str| {
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
        (1..=MAX_LEN).contains(&id.len()) && id.chars().all(fits)
    };
    let given = headers.get(REQUEST_ID).and_then(|id| id.to_str().ok());
    let given = given.filter(is_fit).map(str::to_owned);
    given.unwrap_or_else(|| crate::id::new("req_"))
}

/// Answers `request`, whose body is JSON of the shape `shape`, by `answer`.
async fn handle<F, A>(
    dialect: Dialect,
    app: Shared,
    request: Request,
    shape: Shape,
    answer: F,
) -> Response
where
    F: FnOnce(Shared, Caller, Checked) -> A,
    A: Future<Output = Result<Response, ApiError>>,
{
    let answered = async {
        let caller = request.extensions().get::<Caller>().cloned();
        let caller = caller
            .ok_or_else(|| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "nobody asked"))?;
        let Settings {
            max_body,
            body_timeout,
            ..
        } = app.settings;
        let body = body(request, max_body, body_timeout).await?;
        answer(app, caller, Checked::new(body, shape)?).await
    };
    match answered.await {
        Ok(response) => response,
        Err(error) => error.respond(dialect),
    }
}

/// The JSON that `request` has, of at most `limit` bytes, which may take `patience` to arrive.
async fn body(request: Request, limit: usize, patience: Duration) -> Result<Value, ApiError> {
    let (parts, body) = request.into_parts();
    let kind = parts.headers.get(header::CONTENT_TYPE);
    let kind = kind.and_then(|kind| kind.to_str().ok());
    // Pages of any site may send forms and plain text; JSON they may not, unless CORS lets them.
    if let Some(kind) = kind.filter(|kind| !kind.to_ascii_lowercase().contains("json")) {
        return Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            format!("content-type: expected application/json, found {kind}"),
        ));
    }
    let said = parts.headers.get(header::CONTENT_LENGTH);
    let said = said.and_then(|len| len.to_str().ok()?.parse::<usize>().ok());
    if said.is_some_and(|len| len > limit) {
        return Err(too_large(limit));
    }
    let bytes = timeout(patience, bytes(body, limit)).await;
    let bytes = bytes.map_err(|_| {
        ApiError::new(
            StatusCode::REQUEST_TIMEOUT,
            "the request took too long to arrive",
        )
    })??;
    serde_json::from_slice(&bytes)
        .map_err(|error| ApiError::invalid(format!("the body: expected JSON: {error}")))
}

async fn bytes(body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let mut stream = body.into_data_stream();
    let mut bytes = Vec::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.map_err(|error| ApiError::invalid(format!("the body: {error}")))?;
        if bytes.len() + chunk.len() > limit {
            return Err(too_large(limit));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes.into())
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        format!("the body: expected at most {limit} bytes, found more"),
    )
}
