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
    /// Two settings that cannot go together.
    #[error("generation config: {first} cannot go with {second}: {why}")]
    Incompatible {
        /// The one.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// Why not, or the way out.
        why: &'static str,
    },
    /// Something that a setting needs was not given.
    #[error("`{key}` needs {what}: give it in `GenerateOptions::{option}`")]
    Missing {
        /// The setting.
        key: &'static str,
        /// What it needs.
        what: &'static str,
        /// Where that is given.
        option: &'static str,
    },
    /// As many things as there are prompts were wanted.
    #[error("{what}: {given} were given for {prompts} prompts: give one for each, or none")]
    WrongCount {
        /// What.
        what: &'static str,
        /// How many.
        given: usize,
        /// Prompts.
        prompts: usize,
    },
    /// A draft model whose ids mean something else.
    #[error(
        "the assistant model has a vocabulary of {assistant} and the model one of {model}: they must share a tokenizer"
    )]
    AssistantVocabulary {
        /// Of the draft model.
        assistant: i64,
        /// Of the model.
        model: i64,
    },
    /// A constraint that cannot be built or followed.
    #[error("constraint: {0}")]
    Constraint(String),
    /// Everything together excludes every token.
    #[error(
        "row {row} may go on with no token after {new} new ones: what is suppressed, the least length or the constraint exclude one another"
    )]
    NothingAllowed {
        /// Which of the batch.
        row: usize,
        /// New tokens so far.
        new: usize,
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
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] overdrive_kv_cache::Error),
    /// A request whose prompt and continuation would not fit the engine's cache even alone.
    #[error(
        "the request takes {prompt} tokens of prompt and {new} new ones, {blocks} blocks of {block_size} tokens, and the cache has {num_blocks}: lower max_new_tokens, or give the engine more num_blocks or kv_cache_memory_bytes"
    )]
    RequestTooLarge {
        /// Tokens of the prompt.
        prompt: usize,
        /// The most tokens after it.
        new: usize,
        /// Blocks for both.
        blocks: usize,
        /// Tokens of a block.
        block_size: usize,
        /// Blocks of the cache.
        num_blocks: usize,
    },
    /// What an engine does not do for a request.
    #[error("the engine does not do `{key}` = {found}: {hint}")]
    NotInEngine {
        /// The key of the generation config.
        key: &'static str,
        /// Its value.
        found: String,
        /// The way out.
        hint: &'static str,
    },
    /// The engine's thread has ended.
    #[error("the engine has been shut down: no request can be submitted or answered any more")]
    EngineStopped,
    /// The system gave the engine no thread.
    #[error("cannot start the engine's thread: {0}")]
    Thread(std::io::Error),
    /// The engine could not compute, several times in a row.
    #[error("the request was given up because the engine could not compute: {message}")]
    EngineFailed {
        /// The last error.
        message: String,
    },
    /// An engine has lost count; a fault of this crate or of the cache.
    #[error("fault in the scheduler: {0}")]
    Scheduler(&'static str),
    /// A model that gave something else than a row of logits for each place.
    #[error("the model gave logits of shape {found:?} where ({rows}, {vocab_size}) was expected")]
    LogitsShape {
        /// Their shape.
        found: Vec<i64>,
        /// Places at which logits were wanted.
        rows: i64,
        /// The model's vocabulary.
        vocab_size: i64,
    },
    /// A model without a chat template.
    #[error(
        "{} holds no chat template, in chat_template.jinja or under chat_template of tokenizer_config.json: it may be a base model; give the template of its family to ChatTemplate::new", dir.display()
    )]
    NoChatTemplate {
        /// The model's folder.
        dir: PathBuf,
    },
    /// Several templates, and none that is the default.
    #[error("there is no chat template {wanted:?}; there are {known}")]
    UnknownChatTemplate {
        /// The one asked for.
        wanted: String,
        /// The names.
        known: String,
    },
    /// A chat template that cannot be parsed or that refuses the conversation.
    #[error("chat template: {0}")]
    ChatTemplate(String),
    /// A conversation that is none.
    #[error("conversation: {0}")]
    Conversation(String),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] overdrive_transformer::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
