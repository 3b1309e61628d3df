//! `/v1/embeddings`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use overdrive_generation::{EngineModel, Error};
use overdrive_nn::AdapterRows;
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};
use tokio::sync::oneshot;

use crate::Pooling;
use crate::api_error::{ApiError, ApiResult, json_response};
use crate::completions::Prompts;
use crate::fields::{Fields, shorten};
use crate::shared::{Shared, blocking};

pub(crate) async fn embeddings(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> ApiResult<Response> {
    let started = Instant::now();
    let mut fields = Fields::read(request, &shared.options).await?;
    let model = shared.choose_model(fields.take("model")?)?;
    fields.refuse(&["dimensions", "truncate_prompt_tokens"])?;
    let format: Option<String> = fields.take("encoding_format")?;
    let is_base64 = match format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let found = shorten(other);
            return Err(ApiError::range("encoding_format", found, "float or base64"));
        }
    };
    let inputs = Prompts::take(&mut fields, "input")?;
    if inputs.len() == 0 {
        let expected = "a list with at least one input";
        return Err(ApiError::range("input", "[]", expected));
    }
    // Kept until the end of this function, or until the client disconnects.
    let _seats = shared.seats("input", inputs.len())?;
    let encoding = Arc::clone(&shared);
    let inputs = blocking(move || check(inputs.encode(&encoding, true)?, &encoding)).await?;
    let tokens: usize = inputs.iter().map(Vec::len).sum();
    shared.metrics.prompt(tokens);
    let pooling = shared.options.pooling;
    // Submitted one by one, so that the engine can run steps of other requests between them.
    let compute = async {
        let mut data = Vec::with_capacity(inputs.len());
        for (index, ids) in inputs.into_iter().enumerate() {
            let embedding = embed(&shared, ids, pooling, model.adapter.clone()).await?;
            let value = match is_base64 {
                true => {
                    let bytes: Vec<u8> = embedding.iter().flat_map(|x| x.to_le_bytes()).collect();
                    Value::String(STANDARD.encode(bytes))
                }
                false => json!(embedding),
            };
            data.push(json!({"object": "embedding", "index": index, "embedding": value}));
        }
        ApiResult::Ok(data)
    };
    let limit = shared.options.max_time;
    let data = tokio::time::timeout(limit, compute).await.map_err(|_| {
        let limit = limit.as_secs_f64();
        let message = format!(
            "the request was not answered within {limit} seconds (`max_time`); give fewer or shorter inputs"
        );
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "max_time", message)
    })??;
    shared.metrics.whole_request(started.elapsed());
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    let answer = json!({"object": "list", "data": data, "model": *model.name, "usage": usage});
    Ok(json_response(StatusCode::OK, &answer))
}

/// Returns the ids of the inputs, if the model can read each of them.
fn check(inputs: Vec<crate::completions::Prompt>, shared: &Shared) -> ApiResult<Vec<Vec<i64>>> {
    let longest = shared.engine.max_prompt_len();
    let vocabulary = shared.engine.vocab_size();
    let known = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < vocabulary);
    let one = |(_, ids): crate::completions::Prompt| {
        if ids.is_empty() {
            let message = "`input` has a text without tokens; give at least one token";
            return Err(ApiError::field("input", message));
        }
        if ids.len() > longest {
            let message = format!(
                "`input` has a text of {} tokens, and the context of this model is {longest}; shorten it",
                ids.len()
            );
            return Err(ApiError::context("input", message));
        }
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
    shared: &Shared,
    ids: Vec<i64>,
    pooling: Pooling,
    adapter: Option<Arc<str>>,
) -> ApiResult<Vec<f32>> {
    let (sender, receiver) = oneshot::channel();
    shared.engine.run(move |model| {
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
    pooling: Pooling,
) -> overdrive_generation::Result<Vec<f32>> {
    let _no_grad = tch::no_grad_guard();
    let device = model.cache_shape()?.device;
    let ids = Tensor::f_from_slice(ids)?
        .f_unsqueeze(0)?
        .f_to_device(device)?;
    let hidden = model.hidden_states(&ids)?.f_to_kind(Kind::Float)?;
    let state = match pooling {
        Pooling::Last => hidden.f_select(1, -1)?,
        Pooling::Mean => hidden.f_mean_dim(&[1i64][..], false, Kind::Float)?,
    };
    let state = state
        .f_squeeze_dim(0)?
        .f_to_device(Device::Cpu)?
        .f_contiguous()?;
    let mut values = Vec::<f32>::try_from(&state)?;
    let norm = values
        .iter()
        .map(|x| f64::from(*x).powi(2))
        .sum::<f64>()
        .sqrt();
    if !norm.is_finite() {
        return Err(overdrive_generation::Error::BadLogits { row: 0 });
    }
    if norm > 0.0 {
        values
            .iter_mut()
            .for_each(|x| *x = (f64::from(*x) / norm) as f32);
    }
    Ok(values)
}
