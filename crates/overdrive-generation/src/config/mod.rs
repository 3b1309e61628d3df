use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use tokenizers::Tokenizer;

use crate::ChatTemplate;

mod cache;
mod json;
mod modes;
mod one_or_many;
mod validate;

pub use cache::CacheConfig;
pub use modes::{EarlyStopping, LogprobsMode, NumAssistantTokensSchedule};

/// The temperature below which dividing logits by it may overflow; vLLM's threshold for greedy search.
const GREEDY_TEMPERATURE: f64 = 1e-5;

/// The options of generation, with the keys of transformers' `GenerationConfig` and its defaults.
///
/// Serializes to and from `generation_config.json`. `seed`, `presence_penalty`, `frequency_penalty`,
/// `logit_bias`, `stop_token_ids`, `min_tokens`, `logprobs` and `logprobs_mode` are those of vLLM's
/// `SamplingParams`, for which transformers has no key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GenerationConfig {
    /// The largest number of new tokens; the model's context may end a sequence earlier. Default `None`:
    /// `max_length` if it is set, else 20.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_new_tokens: Option<usize>,
    /// The largest number of tokens of prompt and continuation together, if `max_new_tokens` is `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// The number of tokens of prompt and continuation before which no end-of-text token is chosen.
    /// Default 0.
    pub min_length: usize,
    /// The number of new tokens before which no end-of-text token is chosen. Default 0.
    pub min_new_tokens: usize,
    /// The number of new tokens before which neither an end-of-text token nor one of `stop_token_ids` is chosen, and
    /// in which stop strings are ignored. Default 0.
    pub min_tokens: usize,
    /// The condition that ends a beam search. Default `false`.
    pub early_stopping: EarlyStopping,
    /// The time in seconds after which no further step is begun. Default `None`: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_time: Option<f64>,
    /// The strings that end a sequence once it contains one of them, one or a list in JSON; they need a
    /// tokenizer. A string that is a special token ends it with that token. Default empty.
    #[serde(with = "one_or_many::strings", skip_serializing_if = "Vec::is_empty")]
    pub stop_strings: Vec<String>,
    /// Further tokens that end a sequence, besides `eos_token_id`; of the minimum lengths, only `min_tokens`
    /// excludes them. Default empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_token_ids: Vec<i64>,

    /// If `true`, tokens are sampled; if `false`, the likeliest token is taken. Default `false`.
    pub do_sample: bool,
    /// The number of beams, at most 16,384. Default 1: no beam search.
    pub num_beams: usize,
    /// If `true`, keys and values of earlier tokens are cached; if `false`, every step recomputes the
    /// whole sequence, as a reference. Default `true`.
    pub use_cache: bool,
    /// The kind of cache: `dynamic`, `static`, `sliding_window`, `int8`, `int4` (also called
    /// `quantized`) or `paged`. Default `None`: paged for prompts of different lengths, which then need
    /// no padding, else dynamic. In a model's folder it is a hint, and other names mean the default. The
    /// [`Engine`](crate::Engine) has its own cache, whatever this says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_implementation: Option<String>,
    /// The settings of the cache. Default [`CacheConfig::default`].
    pub cache_config: CacheConfig,
    /// The number of tokens of a prompt that one forward pass reads. Default `None`: all. Smaller
    /// chunks take less memory and give equal results.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_chunk_size: Option<usize>,

    /// The divisor of the logits before sampling; above 1 the distribution is flatter, below 1 sharper;
    /// below 1e-5 it is greedy, as in vLLM. Default 1.
    pub temperature: f64,
    /// The number of likeliest tokens from which one is sampled; 0 means all. Default 50.
    pub top_k: usize,
    /// Samples from the smallest set of tokens whose probabilities sum to at least `top_p`, in [0, 1]; with 0 only
    /// the likeliest token stays. Default 1: all (Holtzman et al. 2019, arXiv:1904.09751).
    pub top_p: f64,
    /// Samples among tokens at least `min_p` times as likely as the likeliest, in [0, 1]. Default
    /// `None` (Nguyen et al. 2024, arXiv:2407.01082).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// Samples among the likeliest tokens, of the first 100, whose entropy together is at most `top_h`
    /// times that of the distribution, in (0, 1]. Default `None` (Potraghloo et al. 2025,
    /// arXiv:2509.02510).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_h: Option<f64>,
    /// Samples among the tokens whose information is nearest to the entropy, until their probabilities
    /// reach `typical_p`, in (0, 1]. Default 1: all (Meister et al. 2022, arXiv:2202.00666).
    pub typical_p: f64,
    /// Samples among tokens with at least this probability, in [0, 1). Default 0: all (Hewitt et al.
    /// 2022, arXiv:2210.15191).
    pub epsilon_cutoff: f64,
    /// The same with a threshold that falls with the entropy, in [0, 1). Default 0: all.
    pub eta_cutoff: f64,
    /// The penalty of tokens that occur in prompt or continuation: their scores are divided by it if
    /// positive and multiplied by it if negative. Default 1 (Keskar et al. 2019, arXiv:1909.05858).
    pub repetition_penalty: f64,
    /// The penalty subtracted from the score of every token that has been generated. Negative values
    /// encourage repetition. Default 0.
    pub presence_penalty: f64,
    /// The penalty subtracted from the score of a token for each time that it has been generated.
    /// Default 0.
    pub frequency_penalty: f64,
    /// The exponent of the length by which a beam's score is divided: values above 0 favor long
    /// sequences, values below 0 short ones. Default 1.
    pub length_penalty: f64,
    /// The size of the n-grams that must not occur twice. Default 0: off.
    pub no_repeat_ngram_size: usize,
    /// The token sequences that are never completed; a lone end-of-text token is ignored. Default
    /// empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bad_words_ids: Vec<Vec<i64>>,
    /// The values added to the score of the last token of a sequence if the others precede it. Default
    /// empty. In JSON a list of pairs, `[[[1, 2], -5.0]]`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sequence_bias: Vec<(Vec<i64>, f64)>,
    /// The values added to the scores of single tokens. Default empty.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub logit_bias: BTreeMap<i64, f64>,
    /// If `true`, a log-softmax follows the last change of the scores, which only affects a beam
    /// search. Default `false`.
    pub renormalize_logits: bool,
    /// The token that an encoder-decoder model begins its sequences with. Default `None`: that of the model's
    /// configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decoder_start_token_id: Option<i64>,
    /// The first new token after a prompt of one token, or of an encoder-decoder model. A constraint that does not
    /// allow it begins after it. Default `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forced_bos_token_id: Option<i64>,
    /// The tokens of which one must be the last at the length limit, whatever a constraint allows. Default empty.
    #[serde(with = "one_or_many::ids", skip_serializing_if = "Vec::is_empty")]
    pub forced_eos_token_id: Vec<i64>,
    /// If `true`, NaN in the model's logits becomes 0 and infinities become the largest finite numbers, instead of an
    /// error. Tokens that another option or a constraint excludes stay excluded. Default `false`.
    pub remove_invalid_values: bool,
    /// `(start, factor)`: after `start` new tokens the score of the end-of-text tokens gains its
    /// absolute value times `factor^(tokens beyond) - 1`. Default `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exponential_decay_length_penalty: Option<(usize, f64)>,
    /// The tokens that are never chosen. Default empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub suppress_tokens: Vec<i64>,
    /// The tokens that are not chosen first. Default empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub begin_suppress_tokens: Vec<i64>,

    /// The number of continuations of each prompt, sampled or the best of a beam search, at most 16,384. Default 1.
    pub num_return_sequences: usize,
    /// The number of likeliest tokens whose log-probabilities are returned in addition to that of each chosen
    /// token. Default `None`: no log-probabilities.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<usize>,
    /// The scores from which log-probabilities are computed. Default: those of the model, before any
    /// change.
    pub logprobs_mode: LogprobsMode,

    /// The ids that end a sequence, one or a list in JSON. Default empty.
    #[serde(with = "one_or_many::ids")]
    pub eos_token_id: Vec<i64>,
    /// The id that pads rows that finish early; the model never sees it. Default `None`: the first of
    /// `eos_token_id`, else 0. An id outside the vocabulary, such as -1, counts as `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<i64>,
    /// The seed of the sampling. Default `None`: a different one for each call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,

    /// The number of tokens that a draft model proposes at once. Default 20.
    pub num_assistant_tokens: usize,
    /// The schedule of that number. Default constant.
    pub num_assistant_tokens_schedule: NumAssistantTokensSchedule,
    /// The probability below which a proposed token is the last of its round, in [0, 1]. Default 0.4.
    pub assistant_confidence_threshold: f64,
    /// The number of tokens that are proposed from an earlier occurrence of the last tokens. Default
    /// `None`: no such speculation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_lookup_num_tokens: Option<usize>,
    /// The largest number of last tokens that are looked up. Default 2.
    pub max_matching_ngram_size: usize,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        GenerationConfig {
            max_new_tokens: None,
            max_length: None,
            min_length: 0,
            min_new_tokens: 0,
            min_tokens: 0,
            early_stopping: EarlyStopping::default(),
            max_time: None,
            stop_strings: Vec::new(),
            stop_token_ids: Vec::new(),
            do_sample: false,
            num_beams: 1,
            use_cache: true,
            cache_implementation: None,
            cache_config: CacheConfig::default(),
            prefill_chunk_size: None,
            temperature: 1.0,
            top_k: 50,
            top_p: 1.0,
            min_p: None,
            top_h: None,
            typical_p: 1.0,
            epsilon_cutoff: 0.0,
            eta_cutoff: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            length_penalty: 1.0,
            no_repeat_ngram_size: 0,
            bad_words_ids: Vec::new(),
            sequence_bias: Vec::new(),
            logit_bias: BTreeMap::new(),
            renormalize_logits: false,
            decoder_start_token_id: None,
            forced_bos_token_id: None,
            forced_eos_token_id: Vec::new(),
            remove_invalid_values: false,
            exponential_decay_length_penalty: None,
            suppress_tokens: Vec::new(),
            begin_suppress_tokens: Vec::new(),
            num_return_sequences: 1,
            logprobs: None,
            logprobs_mode: LogprobsMode::default(),
            eos_token_id: Vec::new(),
            pad_token_id: None,
            seed: None,
            num_assistant_tokens: 20,
            num_assistant_tokens_schedule: NumAssistantTokensSchedule::default(),
            assistant_confidence_threshold: 0.4,
            prompt_lookup_num_tokens: None,
            max_matching_ngram_size: 2,
        }
    }
}

/// The options that exclude tokens by their probabilities. Its users name all fields, so that the compiler finds each
/// place where a further one must act: a draw on a device would otherwise ignore it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cuts {
    pub(crate) top_k: usize,
    pub(crate) top_p: f64,
    pub(crate) min_p: Option<f64>,
    pub(crate) top_h: Option<f64>,
    pub(crate) typical_p: f64,
    pub(crate) epsilon_cutoff: f64,
    pub(crate) eta_cutoff: f64,
}

impl GenerationConfig {
    /// Returns the options that exclude tokens by their probabilities.
    pub(crate) fn cuts(&self) -> Cuts {
        Cuts {
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            top_h: self.top_h,
            typical_p: self.typical_p,
            epsilon_cutoff: self.epsilon_cutoff,
            eta_cutoff: self.eta_cutoff,
        }
    }
}

impl GenerationConfig {
    /// Returns `true` if the likeliest token is taken: without sampling, or with a temperature below 1e-5.
    pub fn is_greedy(&self) -> bool {
        !self.do_sample || self.temperature < GREEDY_TEMPERATURE
    }

    /// Returns the largest number of tokens to add to a prompt of `prompt` tokens.
    pub(crate) fn new_tokens(&self, prompt: usize) -> usize {
        match (self.max_new_tokens, self.max_length) {
            // As in transformers, `max_new_tokens` takes precedence over `max_length`.
            (Some(new), _) => new,
            (None, Some(length)) => length.saturating_sub(prompt),
            // transformers' default `max_length` of 20 counts new tokens if nothing is set.
            (None, None) => 20,
        }
    }

    /// Returns the id that fills rows. It is always in the vocabulary, because the embedding reads it
    /// although the attention masks it.
    pub(crate) fn pad(&self, vocab_size: i64) -> i64 {
        let ids = self.pad_token_id.iter().chain(&self.eos_token_id);
        ids.copied()
            .find(|id| (0..vocab_size).contains(id))
            .unwrap_or(0)
    }

    /// Adds the end-of-text token of a chat template, such as `<|im_end|>`, if the configuration has none.
    pub fn or_end_of_text(mut self, template: &ChatTemplate, tokenizer: &Tokenizer) -> Self {
        if self.eos_token_id.is_empty() {
            let end = template.special_token("eos_token");
            let id = end.and_then(|end| tokenizer.token_to_id(end));
            self.eos_token_id.extend(id.map(i64::from));
        }
        self
    }
}
