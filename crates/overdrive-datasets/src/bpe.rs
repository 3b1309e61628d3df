//! The training of byte-level BPE tokenizers.

use std::collections::HashSet;
use std::convert::Infallible;
use std::io::Write;
use std::path::Path;

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer, Trainer};

use crate::byte_level::{ByteAlphabet, Words};
use crate::cache::{Cached, cached, commit_with_digest, is_intact};
use crate::digest::FieldHasher;
use crate::{Error, Result, Sha256Digest, load_tokenizer};
use overdrive_core::{Error as CommonError, check_option, files};

/// The options of [`train_bpe`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BpeOptions {
    /// The number of tokens, special ones included. Default: 4096.
    pub vocab_size: usize,
    /// The special tokens, which get the first ids. Default: `<|endoftext|>`.
    pub special_tokens: Vec<String>,
    /// The minimum number of occurrences at which a pair of tokens is merged. Default: 2.
    pub min_frequency: u64,
}

impl Default for BpeOptions {
    fn default() -> Self {
        Self {
            vocab_size: 4096,
            special_tokens: vec!["<|endoftext|>".to_owned()],
            min_frequency: 2,
        }
    }
}

/// A trained tokenizer.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct TrainedBpe {
    /// The tokenizer. It is byte-level: it encodes any text and decodes it unchanged.
    pub tokenizer: Tokenizer,
    /// The number of tokens: as requested, or fewer if the text had no more pairs to merge.
    pub vocab_size: usize,
    /// If `true`, the tokenizer was trained by an earlier call and read from the cache.
    pub was_cached: bool,
}

/// Trains a byte-level BPE tokenizer (Sennrich et al., arXiv:1508.07909; bytes and pre-tokenizer as
/// in GPT-2) on texts, such as a sample of a corpus ([`Corpus::sample`](crate::Corpus::sample)), of a dataset
/// ([`sample_texts`](crate::sample_texts)), or of several, chained. More than 16 MiB hardly improve a vocabulary of a few
/// thousand tokens, and take longer in proportion.
///
/// The same texts and options give the same tokenizer on any machine and with any number of threads.
/// It runs on Rayon's global thread pool.
///
/// # Errors
/// Returns an error if `vocab_size` cannot hold all bytes and the special tokens, and the first error among the texts.
pub fn train_bpe(
    texts: impl IntoIterator<Item = Result<String>, IntoIter: Send>,
    options: &BpeOptions,
) -> Result<TrainedBpe> {
    let alphabet: HashSet<char> = ByteLevel::alphabet().into_iter().collect();
    let special_tokens = options.special_tokens.len();
    let needed = alphabet.len() + special_tokens;
    check_option(
        options.vocab_size >= needed,
        "vocab_size",
        options.vocab_size,
        format!("at least {needed}: 256 bytes and {special_tokens} special token(s)"),
    )?;
    let special = |token: &String| AddedToken::from(token.clone(), true);
    let special: Vec<_> = options.special_tokens.iter().map(special).collect();
    let mut trainer = BpeTrainer::builder()
        .min_frequency(options.min_frequency)
        .special_tokens(special.clone())
        // All 256 bytes are tokens from the start, so that any text can be encoded.
        .initial_alphabet(alphabet)
        .show_progress(false)
        .build();
    let bytes = count_words(&mut trainer, texts.into_iter())?;
    // The trainer reserves memory for all tokens, so their number is bounded by the possible merges: each joins two
    // neighbours of the text.
    trainer.vocab_size = options.vocab_size.min(bytes.saturating_add(needed));
    let mut model = BPE::default();
    trainer
        .train(&mut model)
        .map_err(Error::tokenizer("train the tokenizer"))?;
    let mut tokenizer = Tokenizer::new(model);
    // GPT-2 adds no space before the first word; a tokenizer that does could not decode a text unchanged.
    tokenizer.with_pre_tokenizer(Some(ByteLevel::default().add_prefix_space(false)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    // GPT-2's tokenizer does not trim offsets either.
    tokenizer.with_post_processor(Some(ByteLevel::default().trim_offsets(false)));
    tokenizer
        .add_special_tokens(special)
        .map_err(Error::tokenizer("add the special tokens"))?;
    // The tokenizer is converted to JSON and back, so that a trained tokenizer is identical to one from the cache.
    let json = tokenizer
        .to_string(false)
        .map_err(Error::tokenizer("write the tokenizer"))?;
    let tokenizer = Tokenizer::from_bytes(json).map_err(Error::tokenizer("read the tokenizer"))?;
    Ok(trained(tokenizer, options, false))
}

/// Trains a tokenizer as [`train_bpe`] does, or reads the one that an earlier call trained on texts with the same `key`
/// with the same options. It is a `tokenizer.json` in `cache_dir`, named by a hash of both. The texts are read only if
/// the tokenizer is trained.
///
/// # Errors
/// Those of [`train_bpe`], and an error if the cache folder cannot be written.
pub fn train_bpe_cached(
    texts: impl IntoIterator<Item = Result<String>, IntoIter: Send>,
    key: Sha256Digest,
    options: &BpeOptions,
    cache_dir: impl AsRef<Path>,
) -> Result<TrainedBpe> {
    // The version in the first field must change whenever the training changes, so that outdated tokenizers
    // are not reused.
    let mut hasher = FieldHasher::default().field(b"bpe 2").field(&key.0);
    for number in [options.vocab_size as u64, options.min_frequency] {
        hasher.add(&number.to_le_bytes());
    }
    options
        .special_tokens
        .iter()
        .for_each(|token| hasher.add(token.as_bytes()));
    let name = format!("{}.tokenizer.json", hasher.finish().short());
    let path = cache_dir.as_ref().join(name);
    let open = || match is_intact(&path)? {
        true => Ok(Some(trained(load_tokenizer(&path)?, options, true))),
        false => Ok(None),
    };
    let train = || {
        let bpe = train_bpe(texts, options)?;
        let json = bpe.tokenizer.to_string(true);
        let json = json.map_err(Error::tokenizer("write the tokenizer as JSON"))?;
        let mut file = files::unfinished(&path)?;
        file.write_all(json.as_bytes())
            .map_err(CommonError::io("write", &path))?;
        commit_with_digest(file, &path)?;
        Ok(bpe)
    };
    match cached(&path, open, train)? {
        Cached::Hit(bpe) | Cached::Built(bpe) => Ok(bpe),
    }
}

fn trained(tokenizer: Tokenizer, options: &BpeOptions, was_cached: bool) -> TrainedBpe {
    let vocab_size = tokenizer.get_vocab_size(true);
    if vocab_size < options.vocab_size {
        tracing::warn!(
            "the tokenizer has {vocab_size} tokens, not {}: the text has no more pairs that occur at \
             least {} times",
            options.vocab_size,
            options.min_frequency
        );
    }
    TrainedBpe {
        tokenizer,
        vocab_size,
        was_cached,
    }
}

/// Counts the words of the texts, and returns the number of their bytes.
fn count_words(
    trainer: &mut BpeTrainer,
    mut texts: impl Iterator<Item = Result<String>> + Send,
) -> Result<usize> {
    // `feed` takes strings and not results, so its texts end at the first error, which is kept here.
    let mut failed = None;
    let mut bytes = 0_usize;
    let texts = std::iter::from_fn(|| match texts.next()? {
        Ok(text) => {
            bytes = bytes.saturating_add(text.len());
            Some(text)
        }
        Err(error) => {
            failed = Some(error);
            None
        }
    });
    let (words, alphabet) = (Words::new()?, ByteAlphabet::new());
    let words = |text: &str| {
        // Words have about five letters with their space; a smaller guess costs one more allocation.
        let mut found = Vec::with_capacity(text.len() / 4);
        words.for_each(text, |word| {
            let mut mapped = String::with_capacity(2 * word.len());
            alphabet.map(word, &mut mapped);
            found.push(mapped);
            Ok::<(), Infallible>(())
        })?;
        Ok(found)
    };
    // Fused, because other threads ask again after an error.
    trainer
        .feed(texts.fuse(), words)
        .map_err(Error::tokenizer("count the words"))?;
    match failed {
        Some(error) => Err(error),
        None => Ok(bytes),
    }
}
