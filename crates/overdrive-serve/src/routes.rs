//! The routes of the server, and what every request passes.

use std::sync::Arc;

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodFilter, MethodRouter, get, on};
use serde_json::{Value, json};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use crate::ServerOptions;
use crate::api_error::{ApiError, ApiResult, json_response};
use crate::chat::chat_completions;
use crate::completions::completions;
use crate::embeddings::embeddings;
use crate::rerank::{rerank, score};
use crate::responses::responses;
use crate::shared::Shared;
use crate::tokenization::{detokenize, tokenize, tokenizer_info};

const MODELS: &str = "/v1/models";
const HEALTH: &str = "/health";
const METRICS: &str = "/metrics";

/// Returns the handler of a route for requests of one method.
type Handler = fn(MethodFilter) -> MethodRouter<Arc<Shared>>;

struct Route {
    path: &'static str,
    method: MethodFilter,
    handler: Handler,
    /// `true` if a request of a file may have it.
    in_batch: bool,
}

impl Route {
    const fn get(path: &'static str, handler: Handler) -> Route {
        Route {
            path,
            method: MethodFilter::GET,
            handler,
            in_batch: false,
        }
    }

    const fn post(path: &'static str, handler: Handler) -> Route {
        Route {
            method: MethodFilter::POST,
            ..Route::get(path, handler)
        }
    }

    const fn batch(path: &'static str, handler: Handler) -> Route {
        Route {
            in_batch: true,
            ..Route::post(path, handler)
        }
    }

    /// Returns the route of a path.
    fn of(path: &str) -> Option<&'static Route> {
        // The names of models contain slashes.
        let is_model = path.starts_with("/v1/models/");
        let path = if is_model { MODELS } else { path };
        ROUTES.iter().find(|route| route.path == path)
    }
}

/// All routes, in the order in which they are listed.
static ROUTES: [Route; 15] = [
    Route::get(MODELS, |method| on(method, models)),
    Route::batch("/v1/completions", |method| on(method, completions)),
    Route::batch("/v1/chat/completions", |method| {
        on(method, chat_completions)
    }),
    Route::batch("/v1/responses", |method| on(method, responses)),
    Route::batch("/v1/embeddings", |method| on(method, embeddings)),
    Route::batch("/v1/rerank", |method| on(method, rerank)),
    Route::batch("/rerank", |method| on(method, rerank)),
    Route::batch("/v2/rerank", |method| on(method, rerank)),
    Route::batch("/v1/score", |method| on(method, score)),
    Route::batch("/score", |method| on(method, score)),
    Route::post("/tokenize", |method| on(method, tokenize)),
    Route::post("/detokenize", |method| on(method, detokenize)),
    Route::get("/tokenizer_info", |method| on(method, tokenizer_info)),
    Route::get(HEALTH, |method| on(method, health)),
    Route::get(METRICS, |method| on(method, metrics)),
];

/// Returns the routes that a request of a file may have.
pub(crate) fn batch_routes() -> Vec<&'static str> {
    let routes = ROUTES.iter().filter(|route| route.in_batch);
    routes.map(|route| route.path).collect()
}

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    let routes = ROUTES.iter().fold(Router::new(), |router, route| {
        router.route(route.path, (route.handler)(route.method))
    });
    let routes = routes
        .route("/v1/models/{*name}", get(model))
        .fallback(unknown_path)
        .method_not_allowed_fallback(wrong_method)
        .layer(from_fn_with_state(Arc::clone(&shared), guard))
        .with_state(Arc::clone(&shared));
    with_cors(routes, &shared.options)
}

/// Lets web pages of the origins in the options use the routes. The layer is the outermost one: a browser asks for
/// permission without the key.
fn with_cors(routes: Router, options: &ServerOptions) -> Router {
    let origins = &options.allowed_origins;
    if origins.is_empty() {
        return routes;
    }
    let allowed = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::any(),
        false => AllowOrigin::list(origins.iter().filter_map(|origin| origin.parse().ok())),
    };
    routes.layer(
        CorsLayer::new()
            .allow_origin(allowed)
            .allow_methods([Method::GET, Method::POST])
            // Not `*`, which does not include `Authorization`.
            .allow_headers(AllowHeaders::mirror_request()),
    )
}

/// The routes of a connection beyond `max_connections`: only those of the operator, whose probes would otherwise kill a
/// server for being full.
pub(crate) fn router_when_full(shared: Arc<Shared>) -> Router {
    let routes = Router::new()
        .route(HEALTH, get(health))
        .route(METRICS, get(metrics))
        .fallback(full)
        .layer(from_fn_with_state(Arc::clone(&shared), guard))
        .with_state(Arc::clone(&shared));
    with_cors(routes, &shared.options)
}

async fn full(State(shared): State<Arc<Shared>>) -> ApiError {
    let message = format!(
        "the server is full: {} connections are open (`max_connections`); try again later",
        shared.options.max_connections
    );
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "max_connections", message)
}

/// Checks the key of requests, which only the operator's routes do without, and counts the answers.
async fn guard(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    // Paths come from clients; a counter for each unknown path would stay forever.
    let route = Route::of(request.uri().path()).map_or("other", |route| route.path);
    let needs_key = !matches!(route, HEALTH | METRICS);
    let given = request.headers().get(header::AUTHORIZATION);
    let response = match &shared.options.api_key {
        Some(key) if needs_key && !key.admits(given.map(HeaderValue::as_bytes)) => {
            let message = match given {
                None => "the request has no API key; send it as `Authorization: Bearer KEY`",
                Some(_) => "the API key is wrong; send the value of the server's OVERDRIVE_API_KEY",
            };
            let status = StatusCode::UNAUTHORIZED;
            ApiError::new(status, "invalid_api_key", message).into_response()
        }
        _ => next.run(request).await,
    };
    shared.metrics.responded(route, response.status().as_u16());
    response
}

async fn health(State(shared): State<Arc<Shared>>) -> ApiResult<Response> {
    shared.backend.check_running()?;
    Ok(json_response(StatusCode::OK, &json!({"status": "ok"})))
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let (statistics, limit) = (shared.backend.statistics(), shared.options.max_queue);
    let text = shared.metrics.text(&statistics, shared.in_flight(), limit);
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Returns the description of the model, or of the adapter `name`.
fn card(shared: &Shared, name: &str) -> Value {
    let model = &*shared.model.name;
    json!({
        "id": name,
        "object": "model",
        "created": shared.created,
        "owned_by": "overdrive",
        "parent": (name != model).then_some(model),
        "max_model_len": shared.backend.max_model_len(),
        // `true` if an answer has the same bits whatever else is in the batch.
        "batch_invariant": shared.backend.is_batch_invariant(),
    })
}

async fn models(State(shared): State<Arc<Shared>>) -> Response {
    let names = std::iter::once(&shared.model.name).chain(shared.backend.adapters());
    let cards: Vec<Value> = names.map(|name| card(&shared, name)).collect();
    json_response(StatusCode::OK, &json!({"object": "list", "data": cards}))
}

async fn model(
    State(shared): State<Arc<Shared>>,
    name: Result<Path<String>, PathRejection>,
) -> ApiResult<Response> {
    let Path(name) = name.map_err(|_| {
        let message = "the name of the model in the path is not UTF-8; `/v1/models` has the names";
        ApiError::field("model", message)
    })?;
    let chosen = shared.choose_model(Some(name))?;
    Ok(json_response(StatusCode::OK, &card(&shared, &chosen.name)))
}

async fn unknown_path(request: Request) -> ApiError {
    let path = crate::fields::shorten(request.uri().path());
    let routes = ROUTES.iter().map(|route| route.path).collect::<Vec<_>>();
    let message = format!("there is no {path}; this server has {}", routes.join(", "));
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let is_post = Route::of(path).is_some_and(|route| route.method == MethodFilter::POST);
    let right = if is_post { "POST" } else { "GET" };
    let message = format!("{path} does not support {method}; use {right}");
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        message,
    )
}
