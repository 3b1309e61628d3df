use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use overdrive_core::{Error as Common, check_at_least, check_option};

use crate::Result;

/// The smallest block: below it, requests cost more than the bytes that they bring.
const MIN_BLOCK_BYTES: u64 = 4 << 10;
/// The largest block, which is held in memory as a whole.
const MAX_BLOCK_BYTES: u64 = 64 << 20;

/// The options of [`open`](crate::open) and [`data_paths`](crate::data_paths).
#[derive(Clone)]
#[non_exhaustive]
pub struct RemoteOptions {
    /// The folder of the cached blocks; default `overdrive/remote` in the user's cache folder
    /// ([`overdrive_datasets::cache_dir`]).
    pub cache: PathBuf,
    /// The size of the cache on disk, over all files, runs and up to eight processes of a machine, in bytes. The blocks
    /// that were used longest ago are removed. Default: 64 GiB.
    pub cache_bytes: u64,
    /// The size of a block in bytes: the unit of requests and of the cache. Default: 1 MiB; from 4 KiB to 64 MiB.
    pub block_bytes: u64,
    /// The largest number of concurrent requests per file, and of files that are opened at a time. Default: 16.
    pub connections: usize,
    /// The longest wait for a connection, and between two bytes of an answer. Default: 30 s.
    pub timeout: Duration,
    /// The number of retries of a request after a dropped connection, a truncated answer, or the status 408, 429 or 5xx.
    /// Default: 5.
    pub retries: u32,
    /// The pause before the first retry. It doubles with each retry, up to eight times this value. Default: 500 ms.
    pub retry_pause: Duration,
    /// Credentials and settings of S3 and Google Cloud Storage, under the names of their environment variables:
    /// `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `GOOGLE_APPLICATION_CREDENTIALS`, … Default: none.
    pub settings: BTreeMap<String, String>,
}

impl RemoteOptions {
    /// Returns the defaults, with a cache in `cache` and no credentials.
    pub fn new(cache: impl Into<PathBuf>) -> RemoteOptions {
        RemoteOptions {
            cache: cache.into(),
            cache_bytes: 64 << 30,
            block_bytes: 1 << 20,
            connections: 16,
            timeout: Duration::from_secs(30),
            retries: 5,
            retry_pause: Duration::from_millis(500),
            settings: BTreeMap::new(),
        }
    }

    /// Returns the options of the environment: `OVERDRIVE_REMOTE_CACHE`, `OVERDRIVE_REMOTE_CACHE_BYTES`,
    /// `OVERDRIVE_REMOTE_BLOCK_BYTES`, and every variable of S3 (`AWS_…`) and Google Cloud Storage (`GOOGLE_…`).
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a value that is not allowed; [`Error::Data`](crate::Error::Data) if
    /// there is no folder for caches.
    pub fn from_env() -> Result<RemoteOptions> {
        // A variable that is not UTF-8 is none of these.
        let variables = std::env::vars_os().filter_map(|(name, value)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        });
        RemoteOptions::from_variables(&variables.collect())
    }

    fn from_variables(variables: &BTreeMap<String, String>) -> Result<RemoteOptions> {
        // An empty variable counts as unset.
        let get = |name: &str| variables.get(name).filter(|value| !value.trim().is_empty());
        let cache = match get("OVERDRIVE_REMOTE_CACHE") {
            Some(path) => PathBuf::from(path),
            None => overdrive_datasets::cache_dir("remote")?,
        };
        let defaults = RemoteOptions::new(cache);
        let bytes = |name: &'static str, default: u64| match get(name) {
            None => Ok(default),
            Some(text) => text
                .trim()
                .parse()
                .map_err(|_| Common::option(name, text, "a number of bytes, such as 68719476736")),
        };
        let is_setting = |name: &str| name.starts_with("AWS_") || name.starts_with("GOOGLE_");
        let settings = variables
            .iter()
            .filter(|(name, value)| is_setting(name) && !value.trim().is_empty())
            .map(|(name, value)| (name.clone(), value.clone()));
        let options = RemoteOptions {
            cache_bytes: bytes("OVERDRIVE_REMOTE_CACHE_BYTES", defaults.cache_bytes)?,
            block_bytes: bytes("OVERDRIVE_REMOTE_BLOCK_BYTES", defaults.block_bytes)?,
            settings: settings.collect(),
            ..defaults
        };
        options.check()?;
        Ok(options)
    }

    /// Checks that every option is in its range.
    pub(crate) fn check(&self) -> Result<()> {
        let bytes = self.block_bytes;
        check_option(
            (MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(&bytes),
            "block_bytes",
            bytes,
            format!("from {MIN_BLOCK_BYTES} to {MAX_BLOCK_BYTES}"),
        )?;
        check_at_least("connections", self.connections, 1)?;
        Ok(())
    }
}

impl fmt::Debug for RemoteOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&String> = self.settings.keys().collect();
        f.debug_struct("RemoteOptions")
            .field("cache", &self.cache)
            .field("cache_bytes", &self.cache_bytes)
            .field("block_bytes", &self.block_bytes)
            .field("connections", &self.connections)
            .field("timeout", &self.timeout)
            .field("retries", &self.retries)
            .field("retry_pause", &self.retry_pause)
            // The values are credentials.
            .field("settings", &names)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_come_from_the_environment_and_do_not_show_their_secrets() {
        let variables = [
            ("OVERDRIVE_REMOTE_CACHE", "/data/cache"),
            ("OVERDRIVE_REMOTE_CACHE_BYTES", "1000000"),
            ("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI"),
            ("AWS_REGION", " "),
            ("HOME", "/root"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let mut variables = BTreeMap::from(variables);
        let options = RemoteOptions::from_variables(&variables).unwrap();
        assert_eq!(options.cache, PathBuf::from("/data/cache"));
        assert_eq!(
            (options.cache_bytes, options.block_bytes),
            (1_000_000, 1 << 20)
        );
        assert_eq!(options.settings.len(), 1);
        let shown = format!("{options:?}");
        assert!(
            shown.contains("AWS_SECRET_ACCESS_KEY") && !shown.contains("wJalr"),
            "{shown}"
        );
        for (name, value) in [
            ("OVERDRIVE_REMOTE_CACHE_BYTES", "64 GiB"),
            ("OVERDRIVE_REMOTE_BLOCK_BYTES", "100"),
        ] {
            let before = variables.insert(name.to_owned(), value.to_owned());
            assert!(RemoteOptions::from_variables(&variables).is_err(), "{name}");
            match before {
                Some(before) => variables.insert(name.to_owned(), before),
                None => variables.remove(name),
            };
        }
    }
}
