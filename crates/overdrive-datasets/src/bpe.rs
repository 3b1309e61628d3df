//! The training of byte-level BPE tokenizers.

use std::collections::HashSet;
use std::convert::Infallible;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer, Trainer};

use crate::bpe_sample::{choose_blocks, read_block};
use crate::byte_level::{ByteAlphabet, Words};
use crate::cache::{Cached, cached, commit_with_digest, is_intact};
use crate::digest::FieldHasher;
use crate::{Corpus, Error, Result, load_tokenizer};
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
    /// The approximate size of the sample that the tokenizer is trained on, spread over the corpus, in bytes.
    /// A larger sample hardly improves a vocabulary of this size, and takes longer in proportion. Default:
    /// 16 MiB.
    pub sample_bytes: u64,
}

impl Default for BpeOptions {
    fn default() -> Self {
        Self {
            vocab_size: 4096,
            special_tokens: vec!["<|endoftext|>".to_owned()],
            min_frequency: 2,
            sample_bytes: 16 << 20,
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
/// in GPT-2) on a corpus.
///
/// The same corpus and options give the same tokenizer on any machine and with any number of threads.
/// It runs on Rayon's global thread pool.
///
/// # Errors
/// Returns an error if `vocab_size` cannot hold all bytes and the special tokens, or if the corpus cannot be
/// read or has changed since it was listed.
pub fn train_bpe(corpus: &Corpus, options: &BpeOptions) -> Result<TrainedBpe> {
    let alphabet: HashSet<char> = ByteLevel::alphabet().into_iter().collect();
    let special_tokens = options.special_tokens.len();
    let needed = alphabet.len() + special_tokens;
    check_option(
        options.vocab_size >= needed,
        "vocab_size",
        options.vocab_size,
        format!("at least {needed}: 256 bytes and {special_tokens} special token(s)"),
    )?;
    // The trainer reserves memory for `vocab_size` tokens, so the number is bounded by the possible merges: each
    // joins two neighbours of the text, and an invalid UTF-8 byte becomes three bytes of text.
    let merges = usize::try_from(corpus.total_bytes()).unwrap_or(usize::MAX);
    let most = merges.saturating_mul(3).saturating_add(needed);
    let special = |token: &String| AddedToken::from(token.clone(), true);
    let special: Vec<_> = options.special_tokens.iter().map(special).collect();
    let mut trainer = BpeTrainer::builder()
        .vocab_size(options.vocab_size.min(most))
        .min_frequency(options.min_frequency)
        .special_tokens(special.clone())
        // All 256 bytes are tokens from the start, so that any text can be encoded.
        .initial_alphabet(alphabet)
        .show_progress(false)
        .build();
    count_words(&mut trainer, corpus, options.sample_bytes)?;
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

/// Trains a tokenizer as [`train_bpe`] does, or reads the one that an earlier call trained on the same corpus
/// with the same options. It is a `tokenizer.json` in `cache_dir`, named by a hash of both.
///
/// # Errors
/// Those of [`train_bpe`], and an error if the cache folder cannot be written.
pub fn train_bpe_cached(
    corpus: &Corpus,
    options: &BpeOptions,
    cache_dir: impl AsRef<Path>,
) -> Result<TrainedBpe> {
    // The version in the first field must change whenever the training changes, so that outdated tokenizers
    // are not reused.
    let mut hasher = FieldHasher::default()
        .field(b"bpe 1")
        .field(&corpus.digest().0);
    for number in [
        options.vocab_size as u64,
        options.min_frequency,
        options.sample_bytes,
    ] {
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
        let bpe = train_bpe(corpus, options)?;
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

fn count_words(trainer: &mut BpeTrainer, corpus: &Corpus, sample_bytes: u64) -> Result<()> {
    let blocks = choose_blocks(corpus, sample_bytes);
    // `feed` takes strings and not results, so the iterator ends at the first error, which is kept here.
    let failed = Mutex::new(None);
    let texts = blocks
        .into_iter()
        .map_while(|block| match read_block(corpus, block) {
            Ok(text) => Some(text),
            Err(error) => {
                *failed
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(error);
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
    trainer
        .feed(texts, words)
        .map_err(Error::tokenizer("count the words of the corpus"))?;
    match failed
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
    {
        Some(error) => Err(error),
        None => corpus.check_unchanged(),
    }
}
