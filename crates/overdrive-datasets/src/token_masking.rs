//! Masked-language modeling: the tokens that a model has to predict.

use std::collections::HashSet;

use overdrive_core::random::Generator;
use overdrive_core::{IGNORE_INDEX, check_option};
#[cfg(feature = "tokenizers")]
use tokenizers::Tokenizer;

#[cfg(feature = "tokenizers")]
use crate::Error;
use crate::{Result, TokenizedExample};

/// The options of [`TokenMasking`], with the names and defaults of transformers' `DataCollatorForLanguageModeling`.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenMaskingOptions {
    /// The probability that a token is chosen, above 0 and at most 1. Default: 0.15.
    pub mlm_probability: f64,
    /// The probability that a chosen token becomes the mask token. Default: 0.8.
    pub mask_replace_prob: f64,
    /// The probability that a chosen token becomes a random one; the others stay as they are. Default: 0.1.
    pub random_replace_prob: f64,
    /// The seed. Default: 0.
    pub seed: u64,
}

impl Default for TokenMaskingOptions {
    fn default() -> Self {
        Self {
            mlm_probability: 0.15,
            mask_replace_prob: 0.8,
            random_replace_prob: 0.1,
            seed: 0,
        }
    }
}

/// The choice of masked tokens, by the rules of BERT (Devlin et al. 2018, arXiv:1810.04805).
///
/// A token is chosen with `mlm_probability`, special tokens never. Of the chosen ones 80 % become the mask token and
/// 10 % a random token of the vocabulary. Their labels are the original tokens; all other labels are
/// [`IGNORE_INDEX`].
///
/// The choice is a function of the seed, the epoch and the record's index: it does not depend on the batch, the
/// number of workers or processes, and a run that is resumed repeats it. `collate_masked` makes batches:
///
/// ```
/// use overdrive_datasets::{IGNORE_INDEX, TokenMasking, TokenMaskingOptions};
///
/// // 1: [CLS], 2: [SEP], 3: [MASK].
/// let masking = TokenMasking::new(3, 1000, [1, 2, 3], TokenMaskingOptions::default())?;
/// let tokens: Vec<i64> = [1].into_iter().chain(100..300).chain([2]).collect();
/// let (epoch, index) = (0, 7);
/// let row = masking.mask(epoch, index, &tokens);
/// let chosen = row.labels.iter().filter(|&&label| label != IGNORE_INDEX).count();
/// assert!((10..60).contains(&chosen));
/// assert_eq!(row, masking.mask(epoch, index, &tokens));
/// assert_ne!(row, masking.mask(epoch + 1, index, &tokens));
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TokenMasking {
    mask_token: i64,
    vocab_size: u64,
    special: HashSet<i64>,
    options: TokenMaskingOptions,
}

impl TokenMasking {
    /// Returns a masking with the id of the mask token, the number of tokens in the vocabulary, and the ids that are
    /// never chosen.
    ///
    /// # Errors
    /// [`Error::Common`] for an option outside of its range, or a mask token outside of the vocabulary.
    pub fn new(
        mask_token: i64,
        vocab_size: i64,
        special_tokens: impl IntoIterator<Item = i64>,
        options: TokenMaskingOptions,
    ) -> Result<Self> {
        let p = options.mlm_probability;
        check_option(
            p > 0.0 && p <= 1.0,
            "mlm_probability",
            p,
            "above 0 and at most 1",
        )?;
        for (name, p) in [
            ("mask_replace_prob", options.mask_replace_prob),
            ("random_replace_prob", options.random_replace_prob),
        ] {
            check_option((0.0..=1.0).contains(&p), name, p, "from 0 to 1")?;
        }
        let both = options.mask_replace_prob + options.random_replace_prob;
        // 0.9 + 0.1 is above 1 because of rounding.
        check_option(
            both <= 1.0 + 1e-9,
            "mask_replace_prob + random_replace_prob",
            both,
            "at most 1: both are shares of the chosen tokens",
        )?;
        let expected = format!("in 0..{vocab_size}, the vocabulary");
        check_option(
            (0..vocab_size).contains(&mask_token),
            "mask_token",
            mask_token,
            expected,
        )?;
        Ok(Self {
            mask_token,
            vocab_size: vocab_size.unsigned_abs(),
            special: special_tokens.into_iter().collect(),
            options,
        })
    }

    /// Returns a masking for a tokenizer with the token `[MASK]` or `<mask>`; its special tokens are never chosen.
    ///
    /// # Errors
    /// Those of [`TokenMasking::new`], and an error if the tokenizer has no such token.
    #[cfg(feature = "tokenizers")]
    pub fn for_tokenizer(tokenizer: &Tokenizer, options: TokenMaskingOptions) -> Result<Self> {
        let mask = ["[MASK]", "<mask>"]
            .into_iter()
            .find_map(|token| tokenizer.token_to_id(token));
        let mask = mask.ok_or_else(|| {
            let expected = "the tokenizer of a masked language model, with [MASK] or <mask>";
            Error::from(overdrive_core::Error::option(
                "tokenizer",
                "one without a mask token",
                expected,
            ))
        })?;
        let added = tokenizer.get_added_tokens_decoder();
        let special = added.into_iter().filter(|(_, token)| token.special);
        let special = special
            .map(|(id, _)| i64::from(id))
            .chain([i64::from(mask)]);
        let vocab_size = tokenizer.get_vocab_size(true) as i64;
        Self::new(i64::from(mask), vocab_size, special, options)
    }

    /// Masks the tokens of record `index` in `epoch`.
    pub fn mask(&self, epoch: u64, index: u64, tokens: &[i64]) -> TokenizedExample {
        let random = Generator::named(self.options.seed, "masked tokens");
        let mut random = random.split(epoch).split(index);
        let mut row = TokenizedExample {
            input_ids: tokens.to_vec(),
            labels: vec![IGNORE_INDEX; tokens.len()],
            truncated: false,
        };
        for (token, label) in row.input_ids.iter_mut().zip(&mut row.labels) {
            // Drawn for special tokens too, so that the choice of a token does not depend on the
            // tokens before it.
            let (choice, replacement) = (random.uniform(), random.uniform());
            let other = random.below(self.vocab_size);
            if choice >= self.options.mlm_probability || self.special.contains(token) {
                continue;
            }
            *label = *token;
            let masked = self.options.mask_replace_prob;
            if replacement < masked {
                *token = self.mask_token;
            } else if replacement < masked + self.options.random_replace_prob {
                // The value is below `vocab_size`, which was an i64.
                *token = other as i64;
            }
        }
        row
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masking(options: TokenMaskingOptions) -> TokenMasking {
        TokenMasking::new(3, 500, [0, 1, 2, 3], options).unwrap()
    }

    #[test]
    fn shares_are_those_of_bert_and_special_tokens_are_never_chosen() {
        let masking = masking(TokenMaskingOptions {
            seed: 5,
            ..Default::default()
        });
        // 200 rows of 2 special tokens and 500 others that are above all random ones.
        let tokens: Vec<i64> = [1].into_iter().chain(1000..1500).chain([2]).collect();
        let (mut chosen, mut masked, mut random) = (0f64, 0f64, 0f64);
        for index in 0..200 {
            let row = masking.mask(0, index, &tokens);
            assert_eq!(
                (row.labels[0], row.labels[501]),
                (IGNORE_INDEX, IGNORE_INDEX)
            );
            assert_eq!((row.input_ids[0], row.input_ids[501]), (1, 2));
            for ((&token, &label), &own) in row.input_ids.iter().zip(&row.labels).zip(&tokens) {
                if label == IGNORE_INDEX {
                    assert_eq!(token, own);
                    continue;
                }
                assert_eq!(label, own);
                chosen += 1.0;
                masked += f64::from(u8::from(token == 3));
                random += f64::from(u8::from(token != 3 && token < 500));
            }
        }
        // Five standard deviations of a binomial count. A random token may be the mask token: one in 500.
        let near = |count: f64, of: f64, p: f64| {
            let sigma = (of * p * (1.0 - p)).sqrt();
            assert!(
                (count - of * p).abs() < 5.0 * sigma,
                "{count} of {of}, expected {p}"
            );
        };
        near(chosen, 100_000.0, 0.15);
        near(masked, chosen, 0.8 + 0.1 / 500.0);
        near(random, chosen, 0.1 * 499.0 / 500.0);
    }

    #[test]
    fn the_choice_is_a_function_of_seed_epoch_and_index() {
        let tokens: Vec<i64> = (10..300).collect();
        let with_seed = |seed| {
            masking(TokenMaskingOptions {
                seed,
                ..Default::default()
            })
        };
        let row = with_seed(1).mask(2, 3, &tokens);
        assert_eq!(row, with_seed(1).mask(2, 3, &tokens));
        for other in [
            with_seed(2).mask(2, 3, &tokens),
            with_seed(1).mask(3, 3, &tokens),
            with_seed(1).mask(2, 4, &tokens),
            with_seed(1).mask(3, 2, &tokens),
        ] {
            assert_ne!(row, other);
        }
        // Special tokens do not change the choice of the other tokens.
        let mut other = tokens.clone();
        other[0] = 1;
        let shifted = with_seed(1).mask(2, 3, &other);
        assert_eq!(row.labels[1..], shifted.labels[1..]);
        let all = TokenMaskingOptions {
            mlm_probability: 1.0,
            mask_replace_prob: 1.0,
            random_replace_prob: 0.0,
            seed: 0,
        };
        assert_eq!(
            masking(all.clone()).mask(0, 0, &[7, 1, 9]).input_ids,
            [3, 1, 3]
        );
        let none = TokenMaskingOptions {
            mask_replace_prob: 0.0,
            ..all
        };
        assert_eq!(
            masking(none).mask(0, 0, &[7, 1, 9]).labels,
            [7, IGNORE_INDEX, 9]
        );
    }

    #[test]
    fn options_outside_of_their_range_are_named() {
        let refused = |mask, options| {
            let error = TokenMasking::new(mask, 10, [], options).unwrap_err();
            error.to_string()
        };
        let default = TokenMaskingOptions::default();
        let zero = TokenMaskingOptions {
            mlm_probability: 0.0,
            ..default.clone()
        };
        assert!(refused(3, zero).starts_with("`mlm_probability` is 0"));
        let above = TokenMaskingOptions {
            random_replace_prob: 0.3,
            ..default.clone()
        };
        assert!(refused(3, above).contains("at most 1"));
        assert!(refused(10, default).starts_with("`mask_token` is 10; it must be in 0..10"));
        let exact = TokenMaskingOptions {
            mask_replace_prob: 0.9,
            random_replace_prob: 0.1,
            ..Default::default()
        };
        TokenMasking::new(3, 10, [], exact).unwrap();
    }
}
