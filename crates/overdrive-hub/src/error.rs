use std::path::PathBuf;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// The forms of a name, for messages.
pub(crate) const FORMS: &str =
    "ORG/NAME, ORG/NAME@REVISION, ORG/NAME:QUANTIZATION or ORG/NAME/FILE.gguf";

/// An error while finding or downloading a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is outside its range, or a file of the cache could not be read or written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// There is no such path, and it cannot be a name on the hub.
    #[error(
        "`{name}` is neither a file or folder on this machine nor a name on the hub ({forms}); check the path",
        forms = FORMS
    )]
    NoSuchPath {
        /// The name, as it was given.
        name: String,
    },
    /// The hub has no such repository, or hides it from requests without a token.
    #[error(
        "`{repository}` is not a file or folder on this machine, and {endpoint} has no repository of this name; check \
         the name. If the repository is private, set HF_TOKEN to a token that may read it"
    )]
    NoRepository {
        /// The repository.
        repository: String,
        /// The address of the hub.
        endpoint: String,
    },
    /// The repository has no such branch, tag or commit.
    #[error(
        "the repository `{repository}` has no revision `{revision}`; use a branch (such as main), a tag or a commit"
    )]
    NoRevision {
        /// The repository.
        repository: String,
        /// The revision that was asked for.
        revision: String,
    },
    /// The repository's owner has to grant access.
    #[error(
        "the repository `{repository}` is not open to {caller}: accept its conditions at {endpoint}/{repository}, and \
         set HF_TOKEN to a token of that account (`{endpoint}/settings/tokens`)",
        caller = if *with_token { "the account of this token" } else { "requests without a token" }
    )]
    NoAccess {
        /// The repository.
        repository: String,
        /// The address of the hub.
        endpoint: String,
        /// `true` if the request had a token.
        with_token: bool,
    },
    /// The hub does not know the token.
    #[error(
        "{endpoint} does not accept the token of HF_TOKEN, or of the file that `hf auth login` wrote; make a new one at \
         {endpoint}/settings/tokens, or set HF_HUB_DISABLE_IMPLICIT_TOKEN=1 to send none"
    )]
    BadToken {
        /// The address of the hub.
        endpoint: String,
    },
    /// The repository lacks a file.
    #[error("the repository `{repository}` has no {file}; it has {found}")]
    NoFile {
        /// The repository.
        repository: String,
        /// The file, or a description of it.
        file: String,
        /// The names that the repository has instead.
        found: String,
    },
    /// Downloads are switched off, and the cache does not have the model.
    #[error(
        "`{name}` is not a file or folder on this machine, {missing} in the cache {}, and HF_HUB_OFFLINE is set; unset \
         it to download the model, or set HF_HUB_CACHE or HF_HOME to the cache that has it",
        cache.display()
    )]
    Offline {
        /// The name, as it was given.
        name: String,
        /// The part that is missing, as the beginning of a clause.
        missing: String,
        /// The folder of the cache.
        cache: PathBuf,
    },
    /// The hub does not answer.
    #[error(
        "`{url}` does not answer: {reason}. Check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT, or give the \
         path of a local copy"
    )]
    Unreachable {
        /// The address.
        url: String,
        /// The error of the last attempt.
        reason: String,
    },
    /// There is no such path, and the hub, which may have the name, does not answer.
    #[error(
        "`{name}` does not exist on this machine, and the hub cannot be asked for this name: `{url}` does not answer \
         ({reason}). Check the path; for a name on the hub check the network, the proxy (HTTPS_PROXY) and HF_ENDPOINT"
    )]
    UnreachableName {
        /// The name, as it was given.
        name: String,
        /// The address.
        url: String,
        /// The error of the last attempt.
        reason: String,
    },
    /// The hub refuses a request.
    #[error("`{url}` returned status {status}{message}; try again later")]
    Status {
        /// The address.
        url: String,
        /// The HTTP status.
        status: u16,
        /// The hub's explanation with a leading `: `, or an empty string.
        message: String,
    },
    /// The hub's answer does not follow its protocol.
    #[error("`{url}` returned an unexpected response: {reason}; check HF_ENDPOINT")]
    Protocol {
        /// The address.
        url: String,
        /// The problem with the answer.
        reason: String,
    },
    /// A downloaded file is not the one that the hub describes.
    #[error(
        "`{file}` of the repository `{repository}` is damaged: {reason}. The download was deleted; try again, and \
         check the proxy and HF_ENDPOINT if it happens twice"
    )]
    Damaged {
        /// The repository.
        repository: String,
        /// The file.
        file: String,
        /// The difference.
        reason: String,
    },
}

impl Error {
    /// Adds the name whose repository was asked for, which may have been meant as a path.
    pub(crate) fn of_name(self, name: &str) -> Error {
        match self {
            Error::Unreachable { url, reason } => Error::UnreachableName {
                name: name.to_owned(),
                url,
                reason,
            },
            other => other,
        }
    }
}
