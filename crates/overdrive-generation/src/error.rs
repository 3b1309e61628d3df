use std::path::PathBuf;

/// The errors of text generation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of range, logits have the wrong shape, or a file cannot be read or parsed.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// There is no prompt.
    #[error("no prompt was given; pass at least one")]
    NoPrompts,
    /// A prompt has no tokens.
    #[error(
        "prompt {row} is empty; begin it with at least one token, such as the model's bos token"
    )]
    EmptyPrompt {
        /// The index of the prompt in the batch.
        row: usize,
    },
    /// A prompt is longer than the model's context.
    #[error(
        "prompt {row} has {tokens} tokens, and the model's context is {limit}; shorten it, for example by keeping only its end"
    )]
    PromptTooLong {
        /// The index of the prompt in the batch.
        row: usize,
        /// The number of tokens of the prompt.
        tokens: usize,
        /// The context of the model.
        limit: i64,
    },
    /// A token id is not in the vocabulary.
    #[error(
        "token {position} of prompt {row} is {id}, outside the model's vocabulary 0..{vocab_size}; check that the tokenizer belongs to the model"
    )]
    TokenOutOfRange {
        /// The index of the prompt in the batch.
        row: usize,
        /// The position in the prompt.
        position: usize,
        /// The token id.
        id: i64,
        /// The size of the vocabulary.
        vocab_size: i64,
    },
    /// A key of transformers would change the result, and this crate does not support it.
    #[error("`{key}` is {found}, which is not supported; set it to {neutral}")]
    Unsupported {
        /// The key.
        key: String,
        /// The value of the key.
        found: String,
        /// The value that has no effect.
        neutral: String,
    },
    /// The options exclude each other.
    #[error("{first} cannot be combined with {second}: {why}")]
    Incompatible {
        /// The first option.
        first: &'static str,
        /// The second option.
        second: &'static str,
        /// The reason, or the remedy.
        why: &'static str,
    },
    /// An option needs something that was not given.
    #[error("`{key}` needs {what}; set `GenerateOptions::{option}`")]
    Missing {
        /// The option.
        key: &'static str,
        /// The thing that it needs.
        what: &'static str,
        /// The field that holds it.
        option: &'static str,
    },
    /// The number of entries of a list differs from the number of prompts.
    #[error(
        "`{what}` has {given} entries for {prompts} prompts; give one for each prompt, or none"
    )]
    WrongCount {
        /// The list.
        what: &'static str,
        /// The number of its entries.
        given: usize,
        /// The number of prompts.
        prompts: usize,
    },
    /// The vocabularies of draft model and model differ by more than padding.
    #[error(
        "the vocabulary of the assistant model has {assistant} tokens and that of the model {model}, which differ by more than padding; both models must share a tokenizer: set `tokenizer` and `assistant_tokenizer`, which are then compared"
    )]
    AssistantVocabulary {
        /// The vocabulary of the draft model.
        assistant: i64,
        /// The vocabulary of the model.
        model: i64,
    },
    /// An id stands for different tokens in the draft model and in the model.
    #[error(
        "token {id} is {assistant:?} for the assistant model and {model:?} for the model; choose an assistant with the same tokenizer"
    )]
    AssistantToken {
        /// The token id.
        id: u32,
        /// The token of the draft model.
        assistant: String,
        /// The token of the model.
        model: String,
    },
    /// A constraint cannot be built or followed.
    #[error("constraint: {0}")]
    Constraint(String),
    /// Together, the options exclude every token.
    #[error(
        "no token is allowed in row {row} after {new} new ones: together, suppressed tokens, the minimum length and the constraint exclude every token"
    )]
    NothingAllowed {
        /// The row of the batch.
        row: usize,
        /// The number of new tokens so far.
        new: usize,
    },
    /// The model's logits are not finite.
    #[error(
        "the model's logits for row {row} hold NaN or +infinity, or allow no token: the weights are damaged, or the precision is too low for this model"
    )]
    BadLogits {
        /// The row of the batch.
        row: usize,
    },
    /// The tokenizer failed.
    #[error("the tokenizer failed: {0}")]
    Tokenizer(Box<dyn std::error::Error + Send + Sync>),
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] overdrive_kv_cache::Error),
    /// The prompt and continuation of a request would not fit the engine's cache even alone.
    #[error(
        "the request needs {prompt} prompt tokens and {new} new ones, {blocks} blocks of {block_size} tokens, and the cache has {num_blocks}; shorten the prompt, lower max_new_tokens, or raise the engine's num_blocks or kv_cache_memory_bytes"
    )]
    RequestTooLarge {
        /// The number of tokens of the prompt.
        prompt: usize,
        /// The largest number of new tokens.
        new: usize,
        /// The number of blocks for both.
        blocks: usize,
        /// The number of tokens of a block.
        block_size: usize,
        /// The number of blocks of the cache.
        num_blocks: usize,
    },
    /// A request has an option that the engine does not support.
    #[error("the engine does not support `{key}` = {found}: {hint}")]
    NotInEngine {
        /// The key of the generation config.
        key: &'static str,
        /// The value of the key.
        found: String,
        /// The remedy.
        hint: &'static str,
    },
    /// A request names an adapter that the model of the engine does not have.
    #[error(
        "there is no adapter `{name}`; the engine's model has {}. Load adapters before creating the engine",
        if available.is_empty() { "none".to_owned() } else { available.join(", ") }
    )]
    UnknownAdapter {
        /// The adapter that the request names.
        name: String,
        /// The adapters of the model.
        available: Vec<String>,
    },
    /// The engine's model returns only logits.
    #[error(
        "the model does not return hidden states; implement `EngineModel::hidden_states` for it"
    )]
    NoHiddenStates,
    /// The engine's thread has ended.
    #[error("the engine has stopped; requests can no longer be submitted or answered")]
    EngineStopped,
    /// The system could not start the engine's thread.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
    /// The engine's step failed several times in a row.
    #[error("the request was aborted because the engine failed repeatedly: {message}")]
    EngineFailed {
        /// The last error.
        message: String,
    },
    /// The scheduler's state is inconsistent, which is a bug in this crate or in the cache.
    #[error("internal error: {0}; please report it")]
    Scheduler(&'static str),
    /// A model has no chat template.
    #[error(
        "{} has no chat template (chat_template.jinja, `chat_template` in tokenizer_config.json, or `tokenizer.chat_template` in a GGUF file); it may be a base model: give the template of its family", dir.display()
    )]
    NoChatTemplate {
        /// The model's folder or file.
        dir: PathBuf,
    },
    /// A GGUF file has a tokenizer that this crate does not build.
    #[error(
        "`{key}` of {} is {found:?}, which is not supported; supported: {known}. Use the tokenizer.json of the model from which the file was converted (`--tokenizer` in the examples)", path.display()
    )]
    UnknownTokenizer {
        /// The file.
        path: PathBuf,
        /// The key of its metadata.
        key: &'static str,
        /// The value of the key.
        found: String,
        /// The values that are read.
        known: &'static str,
    },
    /// A GGUF file cannot hold the tokenizer.
    #[error(
        "`{key}` of the tokenizer in {} is {found}, which a GGUF file cannot hold; it can hold {written}",
        path.display()
    )]
    UnwritableTokenizer {
        /// The folder of the tokenizer.
        path: PathBuf,
        /// The part of `tokenizer.json`.
        key: &'static str,
        /// The value of that part.
        found: String,
        /// The tokenizers that can be written.
        written: &'static str,
    },
    /// An error of reading or writing a folder's tokenizer.
    #[error(transparent)]
    Data(#[from] overdrive_datasets::Error),
    /// An error of reading a GGUF file.
    #[error(transparent)]
    Quantization(#[from] overdrive_quantization::Error),
    /// A chat template cannot be parsed, or refuses the conversation.
    #[error("chat template: {0}")]
    ChatTemplate(String),
    /// A conversation is malformed.
    #[error("conversation: {0}")]
    Conversation(String),
    /// The content of a message is not a text.
    #[error("conversation: `content` {0}")]
    MessageContent(String),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] overdrive_transformer::Error),
    /// An error of overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of a captured step.
    #[error(transparent)]
    Graph(Box<overdrive_graphs::Error>),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
}

impl From<overdrive_nn::Error> for Error {
    fn from(error: overdrive_nn::Error) -> Error {
        Error::Model(error.into())
    }
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

// Boxed, so that the errors of others that hold this one stay small.
impl From<overdrive_graphs::Error> for Error {
    fn from(error: overdrive_graphs::Error) -> Self {
        Error::Graph(Box::new(error))
    }
}
