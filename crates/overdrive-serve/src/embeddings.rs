//! `/v1/embeddings`.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use overdrive_generation::{EngineHandle, EngineModel, Error};
use overdrive_nn::AdapterRows;
use overdrive_transformer::{PoolingMode, TokenSequence};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tokio::sync::oneshot;

use crate::api_error::{ApiError, ApiResult, json_response};
use crate::completions::{Prompt, Prompts};
use crate::fields::{Fields, shorten};
use crate::pooler::Pooler;
use crate::shared::{Backend, Shared, blocking};

pub(crate) async fn embeddings(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> ApiResult<Response> {
    let started = Instant::now();
    let mut fields = Fields::read(request, &shared.options).await?;
    let model = shared.choose_model(fields.take("model")?)?;
    fields.refuse(&["truncate_prompt_tokens"])?;
    let format: Option<String> = fields.take("encoding_format")?;
    let is_base64 = match format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let found = shorten(other);
            return Err(ApiError::range("encoding_format", found, "float or base64"));
        }
    };
    let dimensions = match &shared.backend {
        Backend::Engine(_) => {
            // A model for text has no shorter embeddings, nor prompts of its own.
            fields.refuse(&["dimensions", "prompt_name"])?;
            None
        }
        Backend::Pooler(pooler) => dimensions(&mut fields, pooler, &shared)?,
    };
    let prompt_name: Option<String> = fields.take("prompt_name")?;
    let prompt = shared.model.format.prompt(prompt_name.as_deref())?;
    let inputs = Prompts::take(&mut fields, "input")?;
    if inputs.len() == 0 {
        let expected = "a list with at least one input";
        return Err(ApiError::range("input", "[]", expected));
    }
    let seats = shared.seats("input", inputs.len())?;
    let inputs = inputs.after(prompt);
    let encoding = Arc::clone(&shared);
    let work = move || check(inputs.encode(&encoding, true)?, &encoding);
    // Kept until the end of this function, or until the client disconnects.
    let (_seats, inputs) = blocking(seats, work).await?;
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    shared.metrics.prompt(tokens);
    let pooling = shared.options.pooling;
    let compute = async {
        match &shared.backend {
            Backend::Pooler(pooler) => {
                let sequences = inputs.into_iter().map(TokenSequence::new).collect();
                let mut vectors = pooler.compute(sequences).await?;
                if let Some(dimensions) = dimensions {
                    for vector in &mut vectors {
                        vector.truncate(dimensions);
                        if pooler.normalized {
                            normalize(vector)?;
                        }
                    }
                }
                Ok(vectors)
            }
            Backend::Engine(engine) => {
                // Submitted one by one, so that the engine can run steps of other requests between them.
                let mut vectors = Vec::with_capacity(inputs.len());
                for ids in inputs {
                    vectors.push(embed(engine, ids, pooling, model.adapter.clone()).await?);
                }
                Ok(vectors)
            }
        }
    };
    let vectors = within_max_time(&shared, compute).await?;
    shared.metrics.whole_request(started.elapsed());
    let data = vectors.into_iter().enumerate();
    let data: Vec<Value> = data
        .map(|(index, embedding)| {
            let value = match is_base64 {
                true => {
                    let bytes: Vec<u8> = embedding.iter().flat_map(|x| x.to_le_bytes()).collect();
                    Value::String(STANDARD.encode(bytes))
                }
                false => json!(embedding),
            };
            json!({"object": "embedding", "index": index, "embedding": value})
        })
        .collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    let answer = json!({"object": "list", "data": data, "model": *model.name, "usage": usage});
    Ok(json_response(StatusCode::OK, &answer))
}

/// Takes the number of elements to keep of each embedding, if a model of embeddings is asked for one.
fn dimensions(fields: &mut Fields, pooler: &Pooler, shared: &Shared) -> ApiResult<Option<usize>> {
    if pooler.reranker.is_some() {
        return Err(shared.not_served("scores pairs of texts: use /v1/rerank or /v1/score"));
    }
    let dimensions: Option<usize> = fields.take("dimensions")?;
    if let Some(count) = dimensions.filter(|count| !(1..=pooler.dimension).contains(count)) {
        let expected = format!("from 1 to {}, the size of an embedding", pooler.dimension);
        return Err(ApiError::range("dimensions", count, &expected));
    }
    Ok(dimensions)
}

/// Waits for `compute` no longer than the server's limit.
pub(crate) async fn within_max_time<T>(
    shared: &Shared,
    compute: impl Future<Output = ApiResult<T>>,
) -> ApiResult<T> {
    let limit = shared.options.max_time;
    tokio::time::timeout(limit, compute).await.map_err(|_| {
        let limit = limit.as_secs_f64();
        let message = format!(
            "the request was not answered within {limit} seconds (`max_time`); give fewer or shorter inputs"
        );
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "max_time", message)
    })?
}

/// Checks that the model can read a text of `tokens` tokens of the field `param`.
pub(crate) fn check_length(param: &str, tokens: usize, shared: &Shared) -> ApiResult<()> {
    let longest = shared.backend.max_prompt_len();
    if tokens == 0 {
        let message = format!("`{param}` has a text without tokens; give at least one token");
        return Err(ApiError::field(param, message));
    }
    if tokens > longest {
        let found = format_args!("and `{param}` has a text of {tokens} tokens; shorten it");
        return Err(ApiError::context(param, longest, found));
    }
    Ok(())
}

/// Returns the ids of the inputs, if the model can read each of them.
fn check(inputs: Vec<Prompt>, shared: &Shared) -> ApiResult<Vec<Vec<i64>>> {
    let vocabulary = shared.backend.vocab_size();
    let known = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < vocabulary);
    let one = |(_, ids): Prompt| {
        check_length("input", ids.len(), shared)?;
        if let Some(id) = ids.iter().find(|id| !known(id)) {
            let expected = format!("token ids in 0..{vocabulary}");
            return Err(ApiError::range("input", id, &expected));
        }
        Ok(ids)
    };
    inputs.into_iter().map(one).collect()
}

/// Computes an embedding on the engine's thread, which owns the model.
async fn embed(
    engine: &EngineHandle,
    ids: Vec<i64>,
    pooling: PoolingMode,
    adapter: Option<Arc<str>>,
) -> ApiResult<Vec<f32>> {
    let (sender, receiver) = oneshot::channel();
    engine.run(move |model| {
        // A client that has disconnected costs nothing.
        if !sender.is_closed() {
            let rows = adapter.map(|name| AdapterRows::new([(ids.len(), Some(name))]));
            let _scope = rows.map(AdapterRows::scope);
            let _gone = sender.send(pooled(model, &ids, pooling));
        }
    })?;
    let embedding = receiver.await.map_err(|_| Error::EngineStopped)?;
    Ok(embedding?)
}

/// Returns the pooled hidden state of a text, with a norm of 1.
fn pooled(
    model: &dyn EngineModel,
    ids: &[i64],
    pooling: PoolingMode,
) -> overdrive_generation::Result<Vec<f32>> {
    let _no_grad = tch::no_grad_guard();
    let device = model.cache_shape()?.device;
    let ids = Tensor::f_from_slice(ids)?
        .f_unsqueeze(0)?
        .f_to_device(device)?;
    let hidden = model.hidden_states(&ids)?.f_to_kind(Kind::Float)?;
    let state = pooling.pool(&hidden)?;
    let state = state
        .f_squeeze_dim(0)?
        .f_to_device(Device::Cpu)?
        .f_contiguous()?;
    let mut values = Vec::<f32>::try_from(&state)?;
    normalize(&mut values)?;
    Ok(values)
}

/// Divides an embedding by its norm.
fn normalize(values: &mut [f32]) -> overdrive_generation::Result<()> {
    let norm = values
        .iter()
        .map(|x| f64::from(*x).powi(2))
        .sum::<f64>()
        .sqrt();
    if !norm.is_finite() {
        return Err(Error::BadLogits { row: 0 });
    }
    if norm > 0.0 {
        values
            .iter_mut()
            .for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
    Ok(())
}
