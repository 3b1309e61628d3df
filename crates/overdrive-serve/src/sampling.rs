//! The sampling options of a request.

use std::collections::BTreeMap;

use overdrive_generation::GenerationConfig;
use serde::Deserialize;

use crate::api_error::{ApiError, ApiResult};
use crate::fields::{Fields, shorten};
use crate::shared::Shared;

/// The largest number of `stop` strings, and of bytes in each. The engine's thread compares every new token with them
/// while all requests wait. OpenAI's service allows four.
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 1024;

/// The largest number of likeliest tokens that are returned for each token; OpenAI's and vLLM's.
pub(crate) const MAX_LOGPROBS: usize = 20;

/// Fields that would change the answer and are not supported.
const UNSUPPORTED: &[&str] = &[
    "use_beam_search",
    "prompt_logprobs",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "logits_processors",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "thinking_token_budget",
    "repetition_detection",
    "logprob_token_ids",
    "vllm_xargs",
    "cache_salt",
    "watermarking",
    "prompt_embeds",
    "media_io_kwargs",
    "mm_processor_kwargs",
];

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Debug, Default, Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

/// The options that completions and chats have in common.
#[derive(Debug)]
pub(crate) struct Sampling {
    /// The options of generation, except for the number of new tokens.
    pub(crate) config: GenerationConfig,
    pub(crate) max_tokens: Option<usize>,
    /// The field that `max_tokens` comes from.
    pub(crate) max_tokens_field: &'static str,
    /// `true` if `max_tokens` may be 0, for an answer that is the prompt.
    pub(crate) may_be_empty: bool,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
    /// The request's own `min_tokens`; 0 without one.
    min_tokens: usize,
}

impl Sampling {
    pub(crate) fn take(fields: &mut Fields, shared: &Shared) -> ApiResult<Sampling> {
        fields.refuse(UNSUPPORTED)?;
        for name in [
            "skip_special_tokens",
            "include_reasoning",
            "spaces_between_special_tokens",
        ] {
            if fields.take(name)? == Some(false) {
                let message =
                    format!("`{name}` is false, and this server does not support it; leave it out");
                return Err(ApiError::field(name, message));
            }
        }
        let mut config = shared.model.config.clone();
        if let Some(temperature) = fields.take("temperature")? {
            config.temperature = temperature;
        }
        if let Some(top_p) = fields.take("top_p")? {
            config.top_p = top_p;
        }
        if let Some(top_k) = fields.take::<i64>("top_k")? {
            // In vLLM, -1 means all.
            config.top_k = match top_k {
                -1 => 0,
                _ => usize::try_from(top_k)
                    .map_err(|_| ApiError::range("top_k", top_k, "positive, or 0 or -1 (all)"))?,
            };
        }
        if let Some(min_p) = fields.take("min_p")? {
            config.min_p = Some(min_p);
        }
        if let Some(penalty) = fields.take("repetition_penalty")? {
            config.repetition_penalty = penalty;
        }
        for (name, option) in [
            ("presence_penalty", &mut config.presence_penalty),
            ("frequency_penalty", &mut config.frequency_penalty),
        ] {
            if let Some(penalty) = fields.take::<f64>(name)? {
                if !(-2.0..=2.0).contains(&penalty) {
                    return Err(ApiError::range(name, penalty, "from -2 to 2"));
                }
                *option = penalty;
            }
        }
        if let Some(biases) = fields.take::<BTreeMap<String, f64>>("logit_bias")? {
            config.logit_bias = logit_bias(biases, shared.backend.vocab_size())?;
        }
        if let Some(stop) = fields.take::<OneOrMany>("stop")? {
            config.stop_strings = stop_strings(stop)?;
        }
        if let Some(ids) = fields.take("stop_token_ids")? {
            config.stop_token_ids = ids;
        }
        let min_tokens = fields.take("min_tokens")?;
        if let Some(tokens) = min_tokens {
            // vLLM's rule, which also covers stop tokens and stop strings, replaces the folder's `min_new_tokens`.
            config.min_new_tokens = 0;
            config.min_tokens = tokens;
        }
        if fields.take("ignore_eos")?.unwrap_or(false) {
            config.eos_token_id.clear();
        }
        // OpenAI's seeds may be negative.
        config.seed = fields.take::<i64>("seed")?.map(i64::cast_unsigned);
        let n: usize = fields.take("n")?.unwrap_or(1);
        let most = shared.options.max_choices;
        if !(1..=most).contains(&n) {
            let expected = format!("from 1 to {most}, the limit `max_choices`");
            return Err(ApiError::range("n", n, &expected));
        }
        if n > 1 && config.is_greedy() {
            let message = format!(
                "`n` is {n} and `temperature` is {}, so all choices would be equal; raise the temperature",
                config.temperature
            );
            return Err(ApiError::field("n", message));
        }
        config.num_return_sequences = n;
        let limit = shared.options.max_time.as_secs_f64();
        config.max_time = Some(config.max_time.map_or(limit, |own| own.min(limit)));
        let stream = fields.take("stream")?.unwrap_or(false);
        let options: Option<StreamOptions> = fields.take("stream_options")?;
        if options.is_some() && !stream {
            let message = "`stream_options` is set and `stream` is not; set both or neither";
            return Err(ApiError::field("stream_options", message));
        }
        // The number of new tokens is checked later, with the prompt.
        config.max_new_tokens = None;
        config.max_length = None;
        config.validate()?;
        Ok(Sampling {
            config,
            max_tokens: None,
            max_tokens_field: "max_tokens",
            may_be_empty: false,
            stream,
            include_usage: options.unwrap_or_default().include_usage,
            min_tokens: min_tokens.unwrap_or(0),
        })
    }

    /// Returns the options for a prompt of `prompt` tokens, with the largest number of new ones: `max_tokens`, else
    /// `default`, else what the context holds.
    pub(crate) fn for_prompt(
        &self,
        param: &str,
        prompt: usize,
        default: Option<usize>,
        shared: &Shared,
    ) -> ApiResult<GenerationConfig> {
        let (longest, context) = (
            shared.backend.max_prompt_len(),
            shared.backend.max_model_len(),
        );
        if prompt == 0 {
            let message = format!("`{param}` has no tokens; give at least one");
            return Err(ApiError::field(param, message));
        }
        let least = usize::from(self.max_tokens != Some(0));
        if prompt > longest || prompt + least > context {
            let found = format_args!("answer included, and `{param}` has {prompt}; shorten it");
            return Err(ApiError::context(param, context, found));
        }
        let room = context - prompt;
        let limit = shared.options.max_tokens;
        let field = self.max_tokens_field;
        let tokens = match self.max_tokens {
            Some(0) if self.may_be_empty => {
                return Ok(GenerationConfig {
                    max_length: Some(prompt),
                    ..self.config.clone()
                });
            }
            Some(0) => {
                let expected = "at least 1 (in completions, 0 with `echo`)";
                return Err(ApiError::range(field, 0, expected));
            }
            Some(tokens) if limit.is_some_and(|limit| tokens > limit) => {
                let limit = limit.unwrap_or_default();
                let expected = format!("at most {limit}, the server's `max_tokens`");
                return Err(ApiError::range(field, tokens, &expected));
            }
            Some(tokens) if tokens > room => {
                let found = format_args!(
                    "answer included, and `{param}` has {prompt} and `{field}` is {tokens}, together {}; shorten the \
                     prompt or lower {field} to {room}",
                    prompt.saturating_add(tokens)
                );
                return Err(ApiError::context(field, context, found));
            }
            Some(tokens) if tokens < self.min_tokens => {
                let expected = format!("at most `{field}`, which is {tokens}");
                return Err(ApiError::range("min_tokens", self.min_tokens, &expected));
            }
            Some(tokens) => tokens,
            None => default.unwrap_or(room).min(room).min(limit.unwrap_or(room)),
        };
        Ok(GenerationConfig {
            max_new_tokens: Some(tokens),
            ..self.config.clone()
        })
    }
}

fn logit_bias(biases: BTreeMap<String, f64>, vocabulary: usize) -> ApiResult<BTreeMap<i64, f64>> {
    let one = |(id, bias): (String, f64)| {
        let valid = |id: &i64| usize::try_from(*id).is_ok_and(|id| id < vocabulary);
        let Some(number) = id.parse::<i64>().ok().filter(valid) else {
            let expected = format!("a map from token ids, in 0..{vocabulary}, to numbers");
            let id = format!("for {:?}", shorten(&id));
            return Err(ApiError::range("logit_bias", id, &expected));
        };
        if !(-100.0..=100.0).contains(&bias) {
            let found = format!("{bias} for {number}");
            return Err(ApiError::range("logit_bias", found, "from -100 to 100"));
        }
        Ok((number, bias))
    };
    biases.into_iter().map(one).collect()
}

fn stop_strings(stop: OneOrMany) -> ApiResult<Vec<String>> {
    let strings = match stop {
        OneOrMany::One(string) => vec![string],
        OneOrMany::Many(strings) => strings,
    };
    let valid = |string: &String| (1..=MAX_STOP_BYTES).contains(&string.len());
    if strings.len() > MAX_STOPS || !strings.iter().all(valid) {
        let found = format!("a list of {}", strings.len());
        let expected = format!("at most {MAX_STOPS} strings of 1 to {MAX_STOP_BYTES} bytes each");
        return Err(ApiError::range("stop", found, &expected));
    }
    Ok(strings)
}
