use overdrive_core::{check_at_least, check_option as check};

use crate::{Error, GenerationConfig, Result};

/// The names of `cache_implementation`.
pub(crate) const CACHES: [&str; 7] = [
    "dynamic",
    "static",
    "sliding_window",
    "quantized",
    "int8",
    "int4",
    "paged",
];

/// The maximum number of rows for one prompt, as vLLM's bound of `n`. Each row gets a sampler and a copy of the
/// prompt before anything is computed, so without a bound one request could take all memory.
const MAX_ROWS: usize = 16_384;

/// The maximum number of tokens of a cache's window or of a proposal. The bound keeps sums of these numbers and
/// lengths from overflowing.
const MAX_CACHE_TOKENS: i64 = i32::MAX as i64;

impl GenerationConfig {
    /// Checks every option against its range, and that no options conflict.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) out of its range; [`Error::Incompatible`] with
    /// two options that exclude each other.
    pub fn validate(&self) -> Result<()> {
        self.validate_numbers()?;
        self.validate_lists()?;
        self.validate_together()
    }

    fn validate_numbers(&self) -> Result<()> {
        let from_0 = |x: f64| x.is_finite() && x >= 0.0;
        let above_0 = |x: f64| x.is_finite() && x > 0.0;
        let share = |x: f64| x > 0.0 && x <= 1.0;
        let cut = |x: f64| (0.0..1.0).contains(&x);
        let t = self.temperature;
        check(from_0(t), "temperature", t, "0 (greedy) or positive")?;
        let (p, expected) = (self.top_p, "between 0 (one token) and 1 (off)");
        check((0.0..=1.0).contains(&p), "top_p", p, expected)?;
        let one = "above 0 and at most 1 (off)";
        check(share(self.typical_p), "typical_p", self.typical_p, one)?;
        let h = self.top_h.unwrap_or(1.0);
        check(share(h), "top_h", h, "above 0 and at most 1")?;
        let p = self.min_p.unwrap_or(0.0);
        let expected = "between 0 (off) and 1";
        check((0.0..=1.0).contains(&p), "min_p", p, expected)?;
        let c = self.assistant_confidence_threshold;
        let key = "assistant_confidence_threshold";
        check((0.0..=1.0).contains(&c), key, c, "between 0 and 1")?;
        for (key, value) in [
            ("epsilon_cutoff", self.epsilon_cutoff),
            ("eta_cutoff", self.eta_cutoff),
        ] {
            check(cut(value), key, value, "at least 0 (off) and below 1")?;
        }
        let r = self.repetition_penalty;
        check(above_0(r), "repetition_penalty", r, "positive; 1 is off")?;
        for (key, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
            ("length_penalty", self.length_penalty),
        ] {
            check(value.is_finite(), key, value, "a finite number")?;
        }
        if let Some((_, factor)) = self.exponential_decay_length_penalty {
            let key = "exponential_decay_length_penalty";
            check(
                above_0(factor),
                key,
                factor,
                "a start and a positive factor",
            )?;
        }
        if let Some(seconds) = self.max_time {
            check(
                from_0(seconds),
                "max_time",
                seconds,
                "0 or positive, in seconds",
            )?;
        }
        for (key, value) in [
            ("max_new_tokens", self.max_new_tokens.unwrap_or(1)),
            ("prefill_chunk_size", self.prefill_chunk_size.unwrap_or(1)),
            ("max_matching_ngram_size", self.max_matching_ngram_size),
        ] {
            check_at_least(key, value, 1)?;
        }
        for (key, rows) in [
            ("num_beams", self.num_beams),
            ("num_return_sequences", self.num_return_sequences),
        ] {
            let valid = (1..=MAX_ROWS).contains(&rows);
            check(valid, key, rows, format!("from 1 to {MAX_ROWS}"))?;
        }
        for (key, tokens) in [
            ("num_assistant_tokens", self.num_assistant_tokens),
            (
                "prompt_lookup_num_tokens",
                self.prompt_lookup_num_tokens.unwrap_or(1),
            ),
        ] {
            let valid = tokens > 0 && i64::try_from(tokens).is_ok_and(|n| n <= MAX_CACHE_TOKENS);
            check(valid, key, tokens, format!("from 1 to {MAX_CACHE_TOKENS}"))?;
        }
        Ok(())
    }

    fn validate_lists(&self) -> Result<()> {
        let id = "token ids, which are not negative";
        for (key, ids) in [
            ("eos_token_id", &self.eos_token_id),
            ("forced_eos_token_id", &self.forced_eos_token_id),
            ("suppress_tokens", &self.suppress_tokens),
            ("begin_suppress_tokens", &self.begin_suppress_tokens),
        ] {
            // Some published files write -1 for "none".
            let negative = ids.iter().find(|id| **id < -1);
            check(negative.is_none(), key, negative.copied().unwrap_or(0), id)?;
        }
        let words = self.bad_words_ids.iter().map(|ids| ("bad_words_ids", ids));
        let biased = self
            .sequence_bias
            .iter()
            .map(|(ids, _)| ("sequence_bias", ids));
        for (key, ids) in words.chain(biased) {
            let fits = !ids.is_empty() && ids.iter().all(|id| *id >= 0);
            let expected = "lists of at least one token id, none negative";
            check(fits, key, format!("{ids:?}"), expected)?;
        }
        for (key, bias) in self
            .sequence_bias
            .iter()
            .map(|(_, bias)| ("sequence_bias", *bias))
            .chain(self.logit_bias.values().map(|bias| ("logit_bias", *bias)))
        {
            // -infinity excludes a token; +infinity would make the softmax NaN.
            let fits = !bias.is_nan() && bias != f64::INFINITY;
            check(fits, key, bias, "a bias that is a number, or -infinity")?;
        }
        let empty = self.stop_strings.iter().any(String::is_empty);
        check(!empty, "stop_strings", "\"\"", "strings that are not empty")?;
        let settings = &self.cache_config;
        let bits = settings.nbits.unwrap_or(8);
        check(bits == 4 || bits == 8, "cache_config.nbits", bits, "4 or 8")?;
        for (key, value, least) in [
            (
                "cache_config.window_length",
                settings.window_length.unwrap_or(1),
                1,
            ),
            ("cache_config.num_sink_tokens", settings.num_sink_tokens, 0),
            ("cache_config.residual_length", settings.residual_length, 0),
            ("cache_config.q_group_size", settings.q_group_size, 1),
        ] {
            let valid = (least..=MAX_CACHE_TOKENS).contains(&value);
            check(
                valid,
                key,
                value,
                format!("from {least} to {MAX_CACHE_TOKENS}"),
            )?;
        }
        if let Some(name) = &self.cache_implementation {
            let known = CACHES.contains(&name.as_str());
            let expected = format!("one of {}", CACHES.join(", "));
            check(known, "cache_implementation", format!("{name:?}"), expected)?;
        }
        Ok(())
    }

    fn validate_together(&self) -> Result<()> {
        for (key, forced) in [
            ("forced_bos_token_id", self.forced_bos_token_id.as_slice()),
            ("forced_eos_token_id", &self.forced_eos_token_id),
        ] {
            let suppressed = |id: &i64| *id >= 0 && self.suppress_tokens.contains(id);
            let none_left = !forced.is_empty() && forced.iter().all(suppressed);
            let expected = "at least one token that suppress_tokens does not exclude";
            check(!none_left, key, format!("{forced:?}"), expected)?;
        }
        let exclude = |both: bool, first: &'static str, second: &'static str, why: &'static str| {
            if both {
                return Err(Error::Incompatible { first, second, why });
            }
            Ok(())
        };
        let beams = self.num_beams > 1;
        exclude(
            !beams && self.is_greedy() && self.num_return_sequences > 1,
            "num_return_sequences above 1",
            "greedy search",
            "it finds one continuation; set do_sample or num_beams (in the examples, `--temperature` above 0 or \
             `--num-beams`)",
        )?;
        exclude(
            beams && self.num_return_sequences > self.num_beams,
            "num_return_sequences",
            "a smaller num_beams",
            "a search returns at most `num_beams` sequences",
        )?;
        let why = "a beam's text is only final at its end";
        exclude(
            beams && !self.stop_strings.is_empty(),
            "stop_strings",
            "num_beams",
            why,
        )?;
        let why = "beams are compared by their sums, which the output gives as `sequence_scores`";
        exclude(
            beams && self.logprobs.is_some(),
            "logprobs",
            "num_beams",
            why,
        )?;
        let why = "proposals are verified against one sequence per row";
        let lookup = self.prompt_lookup_num_tokens.is_some();
        exclude(
            beams && lookup,
            "prompt_lookup_num_tokens",
            "num_beams",
            why,
        )?;
        let why = "a round of proposals keeps what it has read";
        exclude(
            !self.use_cache && lookup,
            "prompt_lookup_num_tokens",
            "use_cache false",
            why,
        )
    }
}
