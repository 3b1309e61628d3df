//! `/v1/rerank` as Jina and vLLM have it, and vLLM's `/score`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use overdrive_generation::{Error, Tokenizer};
use overdrive_transformer::TokenSequence;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_error::{ApiError, ApiResult, json_response};
use crate::embeddings::{check_length, within_max_time};
use crate::fields::Fields;
use crate::pooler::Inputs;
use crate::shared::{Backend, Shared, blocking, now};
use crate::text_format::PairFormat;

/// The instruction of Qwen3-Reranker's model card, for requests without one.
const INSTRUCTION: &str =
    "Given a web search query, retrieve relevant passages that answer the query";

/// A document of `/v1/rerank`, as text or as an object with it.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or an object with `text`")]
enum Document {
    Text(String),
    Object { text: String },
}

/// One text or a list, for `/score`.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

/// The texts of a request: a query for all documents, or one for each.
struct Pairs {
    queries: Vec<String>,
    documents: Vec<String>,
}

impl Pairs {
    fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        let queries = self.queries.iter().map(String::as_str).cycle();
        queries.zip(self.documents.iter().map(String::as_str))
    }
}

/// The scores of the pairs of a request.
struct Scores {
    /// The score of each pair, in the order of the documents.
    scores: Vec<f32>,
    documents: Vec<String>,
    /// The number of tokens of all pairs.
    tokens: usize,
}

pub(crate) async fn rerank(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> ApiResult<Response> {
    let mut fields = Fields::read(request, &shared.options).await?;
    let name = shared.choose_model(fields.take("model")?)?.name;
    fields.refuse(&["truncate_prompt_tokens", "max_tokens_per_doc"])?;
    let query: String = fields.require("query")?;
    let documents: Vec<Document> = fields.require("documents")?;
    let top_n: Option<usize> = fields.take("top_n")?;
    let has_documents = fields.take("return_documents")?.unwrap_or(true);
    let texts = documents.into_iter().map(|document| match document {
        Document::Text(text) | Document::Object { text } => text,
    });
    let pairs = Pairs {
        queries: vec![query],
        documents: texts.collect(),
    };
    let Scores {
        scores,
        documents,
        tokens,
    } = scores(&shared, "documents", pairs, &mut fields).await?;
    let mut ranked: Vec<(usize, f32)> = scores.into_iter().enumerate().collect();
    // Stable, so that equal scores keep the order of the documents.
    ranked.sort_by(|(_, one), (_, other)| other.total_cmp(one));
    // As in vLLM, 0 means all.
    ranked.truncate(top_n.filter(|&top_n| top_n > 0).unwrap_or(usize::MAX));
    let results: Vec<Value> = ranked
        .into_iter()
        .map(|(index, score)| {
            let mut result = json!({"index": index, "relevance_score": score});
            if has_documents {
                result["document"] = json!({"text": documents[index]});
            }
            result
        })
        .collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    let answer = json!({
        "id": shared.id("rerank"), "model": *name, "usage": usage, "results": results,
    });
    Ok(json_response(StatusCode::OK, &answer))
}

pub(crate) async fn score(
    State(shared): State<Arc<Shared>>,
    request: Request,
) -> ApiResult<Response> {
    let mut fields = Fields::read(request, &shared.options).await?;
    let name = shared.choose_model(fields.take("model")?)?.name;
    fields.refuse(&["truncate_prompt_tokens"])?;
    let (one, other): (Texts, Texts) = (fields.require("text_1")?, fields.require("text_2")?);
    let list = |texts: Texts| match texts {
        Texts::One(text) => vec![text],
        Texts::Many(texts) => texts,
    };
    let (queries, documents) = (list(one), list(other));
    if queries.len() != 1 && queries.len() != documents.len() {
        let found = format!("a list of {}", queries.len());
        let expected = format!("one text, or as many as text_2 ({})", documents.len());
        return Err(ApiError::range("text_1", found, &expected));
    }
    let pairs = Pairs { queries, documents };
    let Scores { scores, tokens, .. } = scores(&shared, "text_2", pairs, &mut fields).await?;
    let data = scores.into_iter().enumerate();
    let data: Vec<Value> = data
        .map(|(index, score)| json!({"index": index, "object": "score", "score": score}))
        .collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    let answer = json!({
        "id": shared.id("score"), "object": "list", "created": now(), "model": *name, "data": data,
        "usage": usage,
    });
    Ok(json_response(StatusCode::OK, &answer))
}

/// Computes the score of each pair. `param` is the field of the documents.
async fn scores(
    shared: &Arc<Shared>,
    param: &'static str,
    pairs: Pairs,
    fields: &mut Fields,
) -> ApiResult<Scores> {
    let started = Instant::now();
    let reranker = match &shared.backend {
        Backend::Pooler(pooler) => pooler.reranker.map(|inputs| (pooler, inputs)),
        Backend::Engine(_) => None,
    };
    let Some((pooler, inputs)) = reranker else {
        return Err(shared.not_served("scores no pairs of texts; serve a reranker"));
    };
    if pairs.documents.is_empty() {
        let expected = "a list with at least one text";
        return Err(ApiError::range(param, "[]", expected));
    }
    let instruction: Option<String> = fields.take("instruction")?;
    let reads_tokens = match &shared.model.format.pairs {
        Some(format) => matches!(format, PairFormat::Tokens),
        None => inputs == Inputs::Pairs,
    };
    if reads_tokens && instruction.is_some() {
        let message = "`instruction` is set, and this model reads pairs without one; leave it out";
        return Err(ApiError::field("instruction", message));
    }
    let name: Option<String> = fields.take("prompt_name")?;
    let system = match instruction {
        Some(instruction) => instruction,
        None => shared.model.format.prompt(name.as_deref())?.to_owned(),
    };
    let seats = shared.seats(param, pairs.documents.len())?;
    let encoding = Arc::clone(shared);
    let work = move || {
        let (tokenizer, format) = (&encoding.model.tokenizer, &encoding.model.format);
        let one = |(query, document): (&str, &str)| {
            let sequence = match &format.pairs {
                _ if reads_tokens => {
                    let query = format!("{system}{query}");
                    encode(tokenizer, query, Some(document), true)?
                }
                Some(PairFormat::Template(template)) => {
                    let prompt = template.render(&system, query, document)?;
                    encode(tokenizer, prompt, None, false)?
                }
                _ => {
                    let instruction = match system.is_empty() {
                        true => INSTRUCTION,
                        false => &system,
                    };
                    let prompt = prompt(instruction, query, document);
                    encode(tokenizer, prompt, None, false)?
                }
            };
            check_length(param, sequence.ids.len(), &encoding)?;
            Ok(sequence)
        };
        let sequences = pairs.iter().map(one).collect::<ApiResult<Vec<_>>>()?;
        Ok((sequences, pairs.documents))
    };
    // Kept until the end of this function, or until the client disconnects.
    let (_seats, (sequences, documents)) = blocking(seats, work).await?;
    let tokens = sequences.iter().map(|sequence| sequence.ids.len()).sum();
    shared.metrics.prompt(tokens);
    let vectors = within_max_time(shared, pooler.compute(sequences)).await?;
    shared.metrics.whole_request(started.elapsed());
    Ok(Scores {
        scores: vectors.into_iter().flatten().collect(),
        documents,
        tokens,
    })
}

fn encode(
    tokenizer: &Tokenizer,
    text: String,
    second: Option<&str>,
    special: bool,
) -> ApiResult<TokenSequence> {
    let encoding = match second {
        Some(second) => tokenizer.encode((text, second), special),
        None => tokenizer.encode(text, special),
    };
    let encoding = encoding.map_err(Error::Tokenizer)?;
    let ids = encoding.get_ids().iter().map(|&id| i64::from(id)).collect();
    let types = encoding.get_type_ids().iter().map(|&id| i64::from(id));
    Ok(TokenSequence::new(ids).with_types(types.collect()))
}

/// Returns the prompt of Qwen3-Reranker's model card, which the model answers with "yes" or "no".
fn prompt(instruction: &str, query: &str, document: &str) -> String {
    format!(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct \
         provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n<|im_start|>user\n\
         <Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n\
         <|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}
