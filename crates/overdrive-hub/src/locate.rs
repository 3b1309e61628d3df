use crate::cache::{RepositoryCache, Snapshot};
use crate::client::Client;
use crate::download::Download;
use crate::name::{HubName, is_commit};
use crate::{Error, HubOptions, Result};

/// Finds what the name `text` stands for in the cache or, unless the cache has all of it, on the hub.
///
/// `cached` returns it from a snapshot of the cache, or the clause that names what is missing; `download` completes the
/// snapshot.
pub(crate) fn locate<T>(
    text: &str,
    name: &HubName,
    options: &HubOptions,
    cached: impl FnOnce(&Snapshot) -> std::result::Result<T, String>,
    download: impl FnOnce(&Download<'_>) -> Result<T>,
) -> Result<T> {
    let cache = RepositoryCache::new(&options.cache, name);
    let stored = cache.stored(name.revision());
    let is_listed = stored.as_ref().is_some_and(|snapshot| snapshot.is_listed);
    let found = match &stored {
        Some(snapshot) => cached(snapshot),
        None => Err(format!("`{}` is not", name.repository)),
    };
    if options.offline {
        if found.is_ok() && !is_listed {
            tracing::warn!(
                "the cache has no list of the files of `{text}`, so whether the cached copy is complete is not known"
            );
        }
        return found.map_err(|missing| Error::Offline {
            name: text.to_owned(),
            missing,
            cache: options.cache.clone(),
        });
    }
    let found = match found {
        // A commit does not change.
        Ok(found) if is_listed && is_commit(name.revision()) => return Ok(found),
        found => found.ok(),
    };
    let client = Client::new(options, name);
    let listing = match &found {
        // With a cached copy, requests to a hub that does not answer are not retried.
        Some(_) => client.listing().map_err(|failure| failure.error),
        None => client.repeat(|| client.listing()),
    };
    let listing = match (listing, found) {
        (Ok(listing), _) => listing,
        (Err(error @ (Error::Unreachable { .. } | Error::Status { .. })), Some(found)) => {
            tracing::warn!("{error}. Using the cached copy of `{text}`");
            return Ok(found);
        }
        (Err(error), _) => return Err(error.of_name(text)),
    };
    let found = download(&Download {
        client: &client,
        cache: &cache,
        repository: &name.repository,
        folder: cache.snapshot(&listing.commit),
        listing: &listing,
    })?;
    if name.revision() != listing.commit {
        cache.set_commit(name.revision(), &listing.commit)?;
    }
    Ok(found)
}
