//! The data of a run, with the files on servers opened.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ScopedJoinHandle;

use overdrive_core::Error as Common;
use overdrive_datasets::{register_source, registered_source};

use crate::block_cache::BlockCache;
use crate::location::Location;
use crate::object::{Object, Server};
use crate::remote_file::RemoteFile;
use crate::{Error, RemoteOptions, Result, runtime};

/// The extensions of files that are mapped as a whole.
const MAPPED: [&str; 2] = ["bin", "tokens"];

/// What this process has opened.
#[derive(Default)]
struct Opened {
    /// The URL of each name.
    urls: HashMap<String, String>,
    caches: Vec<(PathBuf, u64, Arc<BlockCache>)>,
}

static OPENED: Mutex<Option<Opened>> = Mutex::new(None);

/// Opens an object on a server and returns the name under which every dataset of `overdrive-datasets` reads it as a file
/// of this machine: the URL without user, password and query.
///
/// The server is asked for the length and the version. A version that is open already is not opened again. If its URL has
/// another query now, as a signed one that was renewed, the name stands for the new URL from then on; a dataset that is
/// open keeps the old one.
///
/// ```no_run
/// use overdrive_datasets::{Dataset, JsonOptions, JsonRecords};
/// use overdrive_remote::{RemoteOptions, open};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let path = open("s3://bucket/train.jsonl", &RemoteOptions::from_env()?)?;
/// let records = JsonRecords::<serde_json::Value>::open([path], &JsonOptions::default())?;
/// println!("{} records, the last: {}", records.len(), records.get(records.len() - 1)?);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::InvalidUrl`]; [`Error::Data`] if the server does not have the object, refuses it, ignores ranges or does not
/// answer; [`Error::SameName`] if a URL with this name and another content is open.
pub fn open(url: &str, options: &RemoteOptions) -> Result<PathBuf> {
    match Location::parse(url)? {
        Some(location) => open_location(&location, options),
        None => Err(Error::InvalidUrl {
            url: url.to_owned(),
            problem: "it does not begin with https://, s3:// or gs://".to_owned(),
        }),
    }
}

/// Returns the data of a run with each URL opened and replaced by its name ([`open`]); all else stays as it is. A URL
/// of a bucket that ends with `/` stands for the objects in this folder, without its subfolders.
///
/// ```
/// use std::path::PathBuf;
/// use overdrive_remote::{RemoteOptions, data_paths};
///
/// let data = ["data/stories.jsonl", "books/*.txt"].map(PathBuf::from);
/// assert_eq!(data_paths(&data, &RemoteOptions::new("cache"))?, data);
/// # Ok::<(), overdrive_remote::Error>(())
/// ```
///
/// # Errors
/// As [`open`]; [`Error::Common`] for a file that cannot be read by range.
pub fn data_paths(data: &[PathBuf], options: &RemoteOptions) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::with_capacity(data.len());
    let mut locations = Vec::new();
    for path in data {
        let location = match path.exists() {
            true => None,
            false => Location::parse(&path.to_string_lossy())?,
        };
        let Some(location) = location else {
            paths.push(path.clone());
            continue;
        };
        if location.is_folder() {
            for key in keys_in(&location, options)? {
                locations.push(location.with_key(&key));
                paths.push(location.with_key(&key).name.into());
            }
            continue;
        }
        paths.push(location.name.clone().into());
        locations.push(location);
    }
    open_all(&locations, options)?;
    Ok(paths)
}

/// Opens several objects at a time: each waits for an answer of its server.
fn open_all(locations: &[Location], options: &RemoteOptions) -> Result<()> {
    for some in locations.chunks(options.connections.max(1)) {
        let opened: Vec<Result<PathBuf>> = std::thread::scope(|scope| {
            let open = |location| scope.spawn(move || open_location(location, options));
            let threads: Vec<_> = some.iter().map(open).collect();
            let join = |thread: ScopedJoinHandle<'_, Result<PathBuf>>| {
                let joined = thread.join();
                joined.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        opened.into_iter().try_for_each(|name| name.map(drop))?;
    }
    Ok(())
}

fn open_location(location: &Location, options: &RemoteOptions) -> Result<PathBuf> {
    options.check()?;
    let extension = Path::new(&location.name).extension();
    if extension.is_some_and(|extension| MAPPED.iter().any(|mapped| extension == *mapped)) {
        let expected = "a file on this machine: files of tokens are mapped as a whole; download it and give its path";
        return Err(Common::option("data", &location.name, expected).into());
    }
    let name = &location.name;
    let server = Server::new(location, options)?;
    let opened = {
        let location = location.clone();
        runtime::wait(async move { Object::open(&server, &location).await })
    };
    let object = opened.map_err(|failure| failure.error(name))?;
    tracing::debug!("{name}: {} bytes", object.bytes);
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let opened = opened.get_or_insert_default();
    let is_known = registered_source(name)
        .is_some_and(|source| source.version() == object.version && source.len() == object.bytes);
    match opened.urls.get(name) {
        Some(url) if *url == location.url && is_known => return Ok(name.into()),
        // A signed URL that was renewed has the same content under another query; without a tag, that is not certain.
        Some(url) if *url != location.url && !(is_known && object.etag.is_some()) => {
            return Err(Error::SameName { url: name.clone() });
        }
        _ => {}
    }
    let file = RemoteFile::new(object, opened.cache(options), options);
    register_source(name, Arc::new(file));
    opened.urls.insert(name.clone(), location.url.clone());
    Ok(name.into())
}

fn keys_in(folder: &Location, options: &RemoteOptions) -> Result<Vec<String>> {
    let server = Server::new(folder, options)?;
    let prefix = folder.key.clone();
    let keys = runtime::wait(async move { server.list(&prefix).await });
    let keys = keys.map_err(|failure| failure.error(&folder.name))?;
    match keys.is_empty() {
        true => Err(Error::InvalidUrl {
            url: folder.name.clone(),
            problem: "the folder has no files; check its name".to_owned(),
        }),
        false => Ok(keys),
    }
}

impl Opened {
    /// Returns the cache of the options, which all files share.
    fn cache(&mut self, options: &RemoteOptions) -> Arc<BlockCache> {
        let RemoteOptions {
            cache, cache_bytes, ..
        } = options;
        let known = self
            .caches
            .iter()
            .find(|(folder, limit, _)| folder == cache && limit == cache_bytes);
        if let Some((_, _, known)) = known {
            return Arc::clone(known);
        }
        let new = Arc::new(BlockCache::new(cache.clone(), *cache_bytes));
        self.caches
            .push((cache.clone(), *cache_bytes, Arc::clone(&new)));
        new
    }
}
