//! `/tokenize`, `/detokenize` and `/tokenizer_info`, as vLLM has them.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use overdrive_generation::TextStream;
use serde_json::{Value, json};

use crate::api_error::{ApiError, ApiResult, json_response};
use crate::chat::{template, template_options};
use crate::completions::Prompts;
use crate::fields::Fields;
use crate::messages;
use crate::shared::{Shared, blocking};
use crate::tools::Tools;

pub(crate) async fn tokenize(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> ApiResult<Response> {
    let mut fields = Fields::read(request, &shared.options).await?;
    // The adapters of a model share its tokenizer.
    shared.choose_model(fields.take("model")?)?;
    fields.refuse(&["chat_template", "mm_processor_kwargs"])?;
    let special: Option<bool> = fields.take("add_special_tokens")?;
    let has_texts = fields.take("return_token_strs")?.unwrap_or(false);
    let prompt: Option<String> = fields.take("prompt")?;
    let conversation = match &prompt {
        Some(_) => None,
        None if fields.peek("messages").is_none_or(Value::is_null) => {
            let message = "`prompt` is missing; give a `prompt`, or the `messages` of a chat";
            return Err(ApiError::field("prompt", message));
        }
        None => {
            let template = template(&shared, "messages")?;
            let conversation = messages::take(&mut fields, "messages", template, &shared)?;
            let (tools, _) = Tools::take(&mut fields, template)?;
            Some((conversation, template_options(&mut fields, tools.as_ref())?))
        }
    };
    let encoding = Arc::clone(&shared);
    let ((), (ids, texts)) = blocking((), move || {
        let tokenizer = &encoding.model.tokenizer;
        let mut images = Vec::new();
        // A template writes the special tokens itself.
        let (text, special) = match (prompt, conversation) {
            (_, Some((conversation, options))) => {
                let template = template(&encoding, "messages")?;
                images = conversation.images;
                let text = template.render(&conversation.messages, &options)?;
                (text, special.unwrap_or(false))
            }
            (prompt, None) => (prompt.unwrap_or_default(), special.unwrap_or(true)),
        };
        let encoded = Prompts::Text(text).encode(&encoding, special)?;
        let ids = encoded.into_iter().flat_map(|(_, ids)| ids).collect();
        let ids = encoding.expand_images("messages", ids, &images)?;
        let text = |id: &i64| tokenizer.id_to_token(u32::try_from(*id).ok()?);
        let texts: Option<Vec<_>> = has_texts.then(|| ids.iter().map(text).collect());
        Ok((ids, texts))
    })
    .await?;
    let answer = json!({
        "count": ids.len(),
        "max_model_len": shared.backend.max_model_len(),
        "tokens": ids,
        "token_strs": texts,
    });
    Ok(json_response(StatusCode::OK, &answer))
}

pub(crate) async fn detokenize(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> ApiResult<Response> {
    let mut fields = Fields::read(request, &shared.options).await?;
    shared.choose_model(fields.take("model")?)?;
    let tokens: Vec<i64> = fields.require("tokens")?;
    let vocabulary = shared.backend.vocab_size();
    let id = |id: &i64| {
        let known = u32::try_from(*id)
            .ok()
            .filter(|id| (*id as usize) < vocabulary);
        let expected = format!("a list of token ids in 0..{vocabulary}");
        known.ok_or_else(|| ApiError::range("tokens", format!("a list with {id}"), &expected))
    };
    let ids = tokens.iter().map(id).collect::<ApiResult<Vec<u32>>>()?;
    let ((), text) = blocking((), move || {
        // Special tokens are kept, so that the text has the same tokens again.
        Ok(TextStream::decode(&shared.model.tokenizer, &ids, false)?)
    })
    .await?;
    Ok(json_response(StatusCode::OK, &json!({"prompt": text})))
}

/// Returns the special tokens and the chat template: all that a client such as lm_eval needs for prompts of token ids.
pub(crate) async fn tokenizer_info(State(shared): State<Arc<Shared>>) -> Response {
    let template = shared.model.template.as_ref();
    let tokenizer = &shared.model.tokenizer;
    let special = |name: &str| {
        let token = template.and_then(|template| template.special_token(name));
        token.map(str::to_owned)
    };
    // A base model has no template that names its special tokens.
    let begin = || {
        let empty = tokenizer.encode_fast("", true).ok()?;
        tokenizer.id_to_token(*empty.get_ids().first()?)
    };
    let end = || {
        let id = shared.model.config.eos_token_id.first()?;
        tokenizer.id_to_token(u32::try_from(*id).ok()?)
    };
    let info = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shared.backend.max_model_len(),
        "chat_template": template.and_then(|template| template.source("default")),
        "bos_token": special("bos_token").or_else(begin),
        "eos_token": special("eos_token").or_else(end),
        "pad_token": special("pad_token"),
    });
    json_response(StatusCode::OK, &info)
}
