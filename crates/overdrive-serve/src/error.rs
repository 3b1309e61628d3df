use std::path::PathBuf;

/// The errors of a server. Those of single requests are answered to the client instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of range.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// An error of the engine.
    #[error(transparent)]
    Generation(#[from] overdrive_generation::Error),
    /// The system refused threads, signal handlers or the listener.
    #[error("cannot {action}: {source}")]
    System {
        /// The operation that failed, as a verb.
        action: &'static str,
        /// The error of the system.
        source: std::io::Error,
    },
    /// A causal model was to score pairs, and its tokenizer lacks an answer.
    #[error(
        "{} is no reranker: its tokenizer has no token `{token}`; use a reranker, or name the tokens of the answers no and \
         yes in `classifier_from_token` of its config.json",
        path.display()
    )]
    NotReranker {
        /// The folder or file of the model.
        path: PathBuf,
        /// The token that is missing.
        token: &'static str,
    },
    /// A file of requests is invalid.
    #[error("{file}, line {line}: {problem}")]
    Batch {
        /// The name of the file.
        file: String,
        /// The line, from 1.
        line: usize,
        /// The problem, as the end of the message.
        problem: String,
    },
    /// An answer to a request of a file could not be written.
    #[error(transparent)]
    Answer(Box<dyn std::error::Error + Send + Sync>),
    /// The server stopped before all requests had ended.
    #[error("sequences still running {reason} were cancelled: {sequences}")]
    Cut {
        /// The number of cancelled sequences (continuations and embeddings).
        sequences: usize,
        /// The time of the cancellation, as the end of the sentence.
        reason: String,
    },
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
