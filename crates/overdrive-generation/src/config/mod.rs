use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

mod cache;
mod choices;
mod ids;
mod read;
mod validate;

pub use cache::CacheConfig;
pub use choices::{EarlyStopping, LogprobsMode, NumAssistantTokensSchedule};

/// How text is generated, in the keys of transformers' `GenerationConfig` and with its defaults.
///
/// (De)serialises as `generation_config.json`. `seed`, `presence_penalty`, `frequency_penalty`,
/// `logit_bias`, `stop_token_ids`, `logprobs` and `logprobs_mode` are vLLM's `SamplingParams`, for
/// which transformers has no word.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GenerationConfig {
    /// The most tokens to add to a prompt; default `None`: as `max_length` says, else 20.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_new_tokens: Option<usize>,
    /// The most tokens of prompt and continuation together, where `max_new_tokens` is `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// No end-of-text token before prompt and continuation have so many tokens; default 0.
    pub min_length: usize,
    /// No end-of-text token before so many new tokens; default 0.
    pub min_new_tokens: usize,
    /// When a beam search ends; default `false`.
    pub early_stopping: EarlyStopping,
    /// Seconds after which no further step is begun; default `None`: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_time: Option<f64>,
    /// Texts that end a row once it has written them, one or a list in JSON; they need a tokenizer.
    /// Default none.
    #[serde(with = "ids::one_or_many_texts", skip_serializing_if = "Vec::is_empty")]
    pub stop_strings: Vec<String>,
    /// Tokens that end a row besides `eos_token_id`, and that the least length does not exclude; default
    /// none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stop_token_ids: Vec<i64>,

    /// Draw from the distribution (true) or take the likeliest token (false, the default).
    pub do_sample: bool,
    /// Beams of a beam search; default 1: none.
    pub num_beams: usize,
    /// Keep keys and values of earlier tokens; default true. Without, every step computes the whole
    /// text again: only good as a reference.
    pub use_cache: bool,
    /// The kind of cache: `dynamic`, `static`, `sliding_window`, `int8`, `int4` (also called `quantized`)
    /// or `paged`. Default `None`: paged for prompts of different lengths, which are then not padded, else
    /// dynamic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_implementation: Option<String>,
    /// Its settings; default [`CacheConfig::default`].
    pub cache_config: CacheConfig,
    /// Tokens of a prompt that one forward pass reads; default `None`: all. Smaller chunks take less
    /// memory and give equal results.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_chunk_size: Option<usize>,

    /// Logits are divided by it before sampling; above 1 flatter, below 1 sharper; 0 is greedy;
    /// default 1.
    pub temperature: f64,
    /// Sample among the `top_k` likeliest tokens; 0 is all; default 50.
    pub top_k: usize,
    /// Sample among the fewest tokens whose probabilities reach `top_p` together, in (0, 1]; 1, the
    /// default, is all (Holtzman et al. 2019, arXiv:1904.09751).
    pub top_p: f64,
    /// Sample among tokens at least `min_p` times as likely as the likeliest, in [0, 1]; default
    /// `None` (Nguyen et al. 2024, arXiv:2407.01082).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// Sample among the likeliest tokens, of the first 100, whose entropy together is at most `top_h`
    /// times that of the distribution, in (0, 1]; default `None` (Potraghloo et al. 2025,
    /// arXiv:2509.02510).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top_h: Option<f64>,
    /// Sample among the tokens whose information is nearest to the entropy, until their probabilities
    /// reach `typical_p`, in (0, 1]; default 1: all (Meister et al. 2022, arXiv:2202.00666).
    pub typical_p: f64,
    /// Sample among tokens at least so likely, in [0, 1); default 0: all (Hewitt et al. 2022,
    /// arXiv:2210.15191).
    pub epsilon_cutoff: f64,
    /// The same with a threshold that falls with the entropy, in [0, 1); default 0: all.
    pub eta_cutoff: f64,
    /// Scores of tokens already present, prompt included, are divided by it where positive and
    /// multiplied where negative; default 1 (Keskar et al. 2019, arXiv:1909.05858).
    pub repetition_penalty: f64,
    /// Taken from the score of every token that has been generated; default 0. Negative values
    /// encourage repetition.
    pub presence_penalty: f64,
    /// Taken from the score of a token once for each time that it has been generated; default 0.
    pub frequency_penalty: f64,
    /// Exponent of the length by which a beam's score is divided: above 0 long texts gain, below 0
    /// short ones; default 1.
    pub length_penalty: f64,
    /// No sequence of so many tokens occurs twice; default 0: off.
    pub no_repeat_ngram_size: usize,
    /// Sequences of tokens that are never completed; a lone end-of-text token does not count. Default
    /// none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bad_words_ids: Vec<Vec<i64>>,
    /// What is added to the score of the last token of a sequence where the others stand before it;
    /// default none. In JSON a list of pairs, `[[[1, 2], -5.0]]`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sequence_bias: Vec<(Vec<i64>, f64)>,
    /// What is added to the score of single tokens; default nothing.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub logit_bias: BTreeMap<i64, f64>,
    /// Log-softmax after all that changes scores; only a beam search notices. Default false.
    pub renormalize_logits: bool,
    /// The first new token after a prompt of one token; default `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub forced_bos_token_id: Option<i64>,
    /// The tokens of which one must be the last where the length limit is reached; default none.
    #[serde(with = "ids::one_or_many", skip_serializing_if = "Vec::is_empty")]
    pub forced_eos_token_id: Vec<i64>,
    /// NaN becomes 0 and infinities the largest numbers, instead of an error; default false.
    pub remove_invalid_values: bool,
    /// `(start, factor)`: after `start` new tokens the score of the end of text gains its absolute value
    /// times `factor^(tokens beyond) - 1`; default `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exponential_decay_length_penalty: Option<(usize, f64)>,
    /// Tokens that are never chosen; default none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub suppress_tokens: Vec<i64>,
    /// Tokens that are not chosen first; default none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub begin_suppress_tokens: Vec<i64>,

    /// Continuations of each prompt, sampled or the best of a beam search; default 1.
    pub num_return_sequences: usize,
    /// Log-probabilities in the output: of each chosen token and of so many likeliest ones beside it;
    /// default `None`: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<usize>,
    /// Of which scores; default those of the model, before anything changes them.
    pub logprobs_mode: LogprobsMode,

    /// The ids that end a text, one or a list in JSON; default none.
    #[serde(with = "ids::one_or_many")]
    pub eos_token_id: Vec<i64>,
    /// What fills the ends of rows that finish early; default `None`: the first of `eos_token_id`, else
    /// 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<i64>,
    /// Seed of the sampling; default `None`: another at each call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,

    /// Tokens that a draft model proposes at once; default 20.
    pub num_assistant_tokens: usize,
    /// How that number changes from round to round; default constant.
    pub num_assistant_tokens_schedule: NumAssistantTokensSchedule,
    /// A draft model stops for this round after a token that it finds less likely than this, in [0, 1];
    /// default 0.4.
    pub assistant_confidence_threshold: f64,
    /// Tokens that are proposed from an earlier place of the text with the same last tokens; default
    /// `None`: no such speculation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_lookup_num_tokens: Option<usize>,
    /// How many last tokens are looked for at most; default 2.
    pub max_matching_ngram_size: usize,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        GenerationConfig {
            max_new_tokens: None,
            max_length: None,
            min_length: 0,
            min_new_tokens: 0,
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

impl GenerationConfig {
    /// Whether the likeliest token is taken: no sampling, or a temperature of 0.
    pub fn is_greedy(&self) -> bool {
        !self.do_sample || self.temperature == 0.0
    }

    /// How many tokens may be added to a prompt of `prompt` tokens.
    pub(crate) fn new_tokens(&self, prompt: usize) -> usize {
        match (self.max_new_tokens, self.max_length) {
            (Some(new), _) => new,
            (None, Some(length)) => length.saturating_sub(prompt),
            (None, None) => 20,
        }
    }

    pub(crate) fn pad(&self) -> i64 {
        self.pad_token_id
            .or(self.eos_token_id.first().copied())
            .unwrap_or(0)
    }
}
