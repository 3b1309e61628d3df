//! The routes of the server, and what every request passes.

use std::sync::Arc;

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
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
const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const EMBEDDINGS: &str = "/v1/embeddings";
const RERANK: [&str; 3] = ["/v1/rerank", "/rerank", "/v2/rerank"];
const SCORE: [&str; 2] = ["/v1/score", "/score"];
const TOKENIZE: &str = "/tokenize";
const DETOKENIZE: &str = "/detokenize";
const TOKENIZER_INFO: &str = "/tokenizer_info";
const HEALTH: &str = "/health";
const METRICS: &str = "/metrics";

/// All routes, in the order in which they are listed.
const ROUTES: [&str; 15] = [
    MODELS,
    COMPLETIONS,
    CHAT,
    RESPONSES,
    EMBEDDINGS,
    RERANK[0],
    RERANK[1],
    RERANK[2],
    SCORE[0],
    SCORE[1],
    TOKENIZE,
    DETOKENIZE,
    TOKENIZER_INFO,
    HEALTH,
    METRICS,
];

/// The routes that a request of a file may have.
pub(crate) const BATCH_ROUTES: [&str; 9] = [
    CHAT,
    COMPLETIONS,
    RESPONSES,
    EMBEDDINGS,
    RERANK[0],
    RERANK[1],
    RERANK[2],
    SCORE[0],
    SCORE[1],
];

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    let router = RERANK.into_iter().fold(Router::new(), |router, path| {
        router.route(path, post(rerank))
    });
    let router = SCORE
        .into_iter()
        .fold(router, |router, path| router.route(path, post(score)));
    let routes = router
        .route(HEALTH, get(health))
        .route(METRICS, get(metrics))
        .route(MODELS, get(models))
        // The names of models contain slashes.
        .route("/v1/models/{*name}", get(model))
        .route(COMPLETIONS, post(completions))
        .route(CHAT, post(chat_completions))
        .route(RESPONSES, post(responses))
        .route(EMBEDDINGS, post(embeddings))
        .route(TOKENIZE, post(tokenize))
        .route(DETOKENIZE, post(detokenize))
        .route(TOKENIZER_INFO, get(tokenizer_info))
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
    let path = request.uri().path();
    let route = ROUTES
        .into_iter()
        // Paths come from clients; a counter for each unknown path would stay forever.
        .find(|route| path == *route || (*route == MODELS && path.starts_with("/v1/models/")))
        .unwrap_or("other");
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
    let message = format!("there is no {path}; this server has {}", ROUTES.join(", "));
    ApiError::new(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn wrong_method(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let right = match path {
        COMPLETIONS | CHAT | RESPONSES | EMBEDDINGS | TOKENIZE | DETOKENIZE => "POST",
        path if RERANK.contains(&path) || SCORE.contains(&path) => "POST",
        _ => "GET",
    };
    let message = format!("{path} does not support {method}; use {right}");
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        message,
    )
}
