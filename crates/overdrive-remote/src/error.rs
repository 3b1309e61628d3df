/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error while opening data on a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is outside its range, or a file of the cache could not be read or written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// The server does not have the object, refuses it, or does not answer.
    #[error(transparent)]
    Data(#[from] overdrive_datasets::Error),
    /// A URL is not one of an object that this crate can read.
    #[error("`{url}` is not the URL of a file: {problem}")]
    InvalidUrl {
        /// The URL without its query, which can be a secret.
        url: String,
        /// What is wrong, and what a URL must look like.
        problem: String,
    },
    /// Two URLs differ only in their queries, and their contents differ.
    #[error(
        "two files have the URL `{url}` with different queries, which are left out of names since they can be secrets; \
         give them in separate runs, or download one and give its path"
    )]
    SameName {
        /// The URL without its query.
        url: String,
    },
}
