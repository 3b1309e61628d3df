use std::path::PathBuf;

/// What can go wrong when text is generated.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing to continue.
    #[error("no prompt was given: pass at least one")]
    NoPrompts,
    /// A prompt without tokens.
    #[error(
        "prompt {row} is empty: begin it with at least one token, such as the model's bos token"
    )]
    EmptyPrompt {
        /// Which of the batch.
        row: usize,
    },
    /// A prompt that the model's context cannot hold.
    #[error(
        "prompt {row} has {tokens} tokens and the model's context {limit}: shorten it, for example by keeping its end"
    )]
    PromptTooLong {
        /// Which of the batch.
        row: usize,
        /// Its length.
        tokens: usize,
        /// The context.
        limit: i64,
    },
    /// An id that is not in the vocabulary.
    #[error(
        "token {position} of prompt {row} is {id}, and the model's vocabulary is 0..{vocab_size}: is the tokenizer another model's?"
    )]
    TokenOutOfRange {
        /// Which of the batch.
        row: usize,
        /// Where in the prompt.
        position: usize,
        /// The id.
        id: i64,
        /// Size of the vocabulary.
        vocab_size: i64,
    },
    /// A value outside what its key allows.
    #[error("generation config: `{key}` is {found}: expected {expected}")]
    BadConfig {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What fits.
        expected: String,
    },
    /// A key of transformers that would change the result, and that this crate does not compute.
    #[error("generation config: `{key}` is {found}, which is not supported: set it to {neutral}")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// The value that has no effect.
        neutral: String,
    },
    /// The model's scores are no numbers.
    #[error(
        "the model's logits for row {row} hold NaN or +infinity, or allow no token: the weights are damaged, or the precision is too low for this model"
    )]
    BadLogits {
        /// Which of the batch.
        row: usize,
    },
    /// A file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file is not the JSON it should be.
    #[error("{} is not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// The tokenizer failed.
    #[error("the tokenizer cannot decode these tokens: {0}")]
    Tokenizer(Box<dyn std::error::Error + Send + Sync>),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] overdrive_transformer::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
