use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use overdrive_core::{Error as Common, text};

use crate::{DownloadProgress, Result};

/// The options of [`model_path`](crate::model_path), by default those of Python's `huggingface_hub` without any
/// environment variable.
#[derive(Clone)]
pub struct HubOptions {
    /// The folder of the cache; default `~/.cache/huggingface/hub`.
    pub cache: PathBuf,
    /// The address of the hub; default `https://huggingface.co`.
    pub endpoint: String,
    /// The access token; default `None`. It is sent only to the endpoint, never to servers that it redirects to.
    pub token: Option<String>,
    /// `true`: use only the cache; default `false`.
    pub offline: bool,
    /// The longest wait for the response to a request; default 10 s.
    pub etag_timeout: Duration,
    /// The longest pause between two bytes of a download; default 10 s.
    pub download_timeout: Duration,
    /// The pause before the first retry after a transient failure. It doubles with each retry, up to eight times this
    /// value; default 1 s.
    pub retry_pause: Duration,
    /// The number of retries without any progress; default 5.
    pub retries: u32,
    /// A callback that receives the progress; default: none.
    pub progress: Option<DownloadProgress>,
}

impl Default for HubOptions {
    fn default() -> Self {
        HubOptions {
            cache: home(None).join(".cache/huggingface/hub"),
            endpoint: "https://huggingface.co".to_owned(),
            token: None,
            offline: false,
            etag_timeout: Duration::from_secs(10),
            download_timeout: Duration::from_secs(10),
            retry_pause: Duration::from_secs(1),
            retries: 5,
            progress: None,
        }
    }
}

impl HubOptions {
    /// Returns the options from the environment variables of Python's `huggingface_hub`:
    /// `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_TOKEN_PATH`,
    /// `HF_HUB_DISABLE_IMPLICIT_TOKEN`, `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`), `HF_HUB_ETAG_TIMEOUT` and
    /// `HF_HUB_DOWNLOAD_TIMEOUT` in seconds, and `HF_HUB_DISABLE_PROGRESS_BARS`, without which downloads show
    /// [a progress bar](DownloadProgress::bar). Without `HF_TOKEN` the token is the one that `hf auth login` stored.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a value that is not allowed.
    pub fn from_env() -> Result<HubOptions> {
        HubOptions::from_variables(|name| std::env::var(name).ok())
    }

    /// Returns the options of the given variables, for [`from_env`](HubOptions::from_env) and its tests.
    pub(crate) fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<HubOptions> {
        // An empty variable counts as unset, as in huggingface_hub.
        let get = |name: &str| variable(name).filter(|value| !value.trim().is_empty());
        let user = home(get("HOME"));
        let path = |text: String| match text.strip_prefix("~/") {
            Some(rest) => user.join(rest),
            None => PathBuf::from(text),
        };
        let caches = get("XDG_CACHE_HOME").map_or_else(|| user.join(".cache"), path);
        let home = get("HF_HOME").map_or_else(|| caches.join("huggingface"), path);
        let cache = get("HF_HUB_CACHE").or_else(|| get("HUGGINGFACE_HUB_CACHE"));
        let offline = get("HF_HUB_OFFLINE").or_else(|| get("TRANSFORMERS_OFFLINE"));
        let defaults = HubOptions::default();
        let seconds = |name: &'static str, default: Duration| match get(name) {
            None => Ok(default),
            Some(text) => match text.trim().parse::<u64>() {
                Ok(seconds @ 1..=86_400) => Ok(Duration::from_secs(seconds)),
                _ => Err(Common::option(
                    name,
                    text,
                    "a number of seconds from 1 to 86400",
                )),
            },
        };
        Ok(HubOptions {
            cache: cache.map_or_else(|| home.join("hub"), path),
            endpoint: endpoint(get("HF_ENDPOINT"), defaults.endpoint)?,
            token: token(
                &get,
                &get("HF_TOKEN_PATH").map_or_else(|| home.join("token"), path),
            )?,
            offline: offline.is_some_and(|value| is_true(&value)),
            etag_timeout: seconds("HF_HUB_ETAG_TIMEOUT", defaults.etag_timeout)?,
            download_timeout: seconds("HF_HUB_DOWNLOAD_TIMEOUT", defaults.download_timeout)?,
            progress: match get("HF_HUB_DISABLE_PROGRESS_BARS") {
                Some(value) if is_true(&value) => None,
                _ => Some(DownloadProgress::bar()),
            },
            ..HubOptions::default()
        })
    }
}

/// Returns the home folder of the user: that of the variable, or that of the system's list of users. A user without one
/// has the root, as in containers: in the current folder, anybody may have left a token.
fn home(variable: Option<String>) -> PathBuf {
    variable
        .map(PathBuf::from)
        .or_else(std::env::home_dir)
        .filter(|home| home.is_absolute())
        .unwrap_or_else(|| PathBuf::from("/"))
}

fn is_true(text: &str) -> bool {
    ["1", "ON", "YES", "TRUE"].contains(&text.trim().to_ascii_uppercase().as_str())
}

fn endpoint(given: Option<String>, default: String) -> Result<String> {
    let Some(given) = given else {
        return Ok(default);
    };
    let address = given.trim().trim_end_matches('/');
    let host = address
        .strip_prefix("https://")
        .or_else(|| address.strip_prefix("http://"));
    if host.is_none_or(|host| host.is_empty() || host.contains(char::is_whitespace)) {
        let expected = "the address of a hub, such as https://huggingface.co";
        return Err(Common::option("HF_ENDPOINT", given, expected).into());
    }
    Ok(address.to_owned())
}

fn token(get: &impl Fn(&str) -> Option<String>, file: &Path) -> Result<Option<String>> {
    let named = get("HF_TOKEN").or_else(|| get("HUGGING_FACE_HUB_TOKEN"));
    let (source, text) = match named {
        Some(text) => ("HF_TOKEN".to_owned(), text),
        None => {
            if get("HF_HUB_DISABLE_IMPLICIT_TOKEN").is_some_and(|value| is_true(&value)) {
                return Ok(None);
            }
            match text::read_optional(file)? {
                Some(text) => (file.display().to_string(), text),
                None => return Ok(None),
            }
        }
    };
    let text = text.trim();
    if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
        // The message must not show the value.
        let expected = "printable ASCII without spaces, such as hf_…";
        return Err(Common::option(source, "not a token", expected).into());
    }
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

impl fmt::Debug for HubOptions {
    /// Writes the options without the token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("cache", &self.cache)
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("offline", &self.offline)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> Result<HubOptions> {
        HubOptions::from_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_cache_is_found_as_in_python() {
        let home = ("HOME", "/nobody");
        let cases: [(&[(&str, &str)], &str); 7] = [
            (&[home], "/nobody/.cache/huggingface/hub"),
            (&[home, ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[home, ("HF_HOME", "/h")], "/h/hub"),
            (&[home, ("HF_HOME", "~/h")], "/nobody/h/hub"),
            (&[home, ("HF_HOME", "/h"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[home, ("HUGGINGFACE_HUB_CACHE", "/old")], "/old"),
            (
                &[home, ("HF_HUB_CACHE", "")],
                "/nobody/.cache/huggingface/hub",
            ),
        ];
        for (variables, cache) in cases {
            assert_eq!(
                of(variables).expect("valid").cache,
                Path::new(cache),
                "{variables:?}"
            );
        }
    }

    #[test]
    fn without_a_variable_the_cache_is_that_of_the_user_and_not_of_the_current_folder() {
        let cache = of(&[]).expect("valid").cache;
        assert_eq!(cache, HubOptions::default().cache);
        assert!(cache.is_absolute(), "{}", cache.display());
    }

    #[test]
    fn the_token_is_the_variables_or_the_stored_one_and_is_not_printed() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let home = folder.path().to_str().expect("a plain name");
        let token = |variables: &[(&str, &str)]| of(variables).expect("valid").token;
        assert_eq!(token(&[("HF_HOME", home)]), None);
        std::fs::write(folder.path().join("token"), "hf_stored\n").expect("writes");
        assert_eq!(token(&[("HF_HOME", home)]).as_deref(), Some("hf_stored"));
        let named = [("HF_HOME", home), ("HF_TOKEN", " hf_named ")];
        assert_eq!(token(&named).as_deref(), Some("hf_named"));
        assert!(!format!("{:?}", of(&named)).contains("hf_named"));
        let off = [("HF_HOME", home), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")];
        assert_eq!(token(&off), None);
        let error = of(&[("HF_TOKEN", "hf_a\nhf_b")])
            .expect_err("two lines")
            .to_string();
        assert!(
            error.contains("HF_TOKEN") && !error.contains("hf_a"),
            "{error}"
        );
    }

    #[test]
    fn a_progress_bar_is_shown_unless_it_is_turned_off() {
        assert!(of(&[]).expect("valid").progress.is_some());
        let off = of(&[("HF_HUB_DISABLE_PROGRESS_BARS", "1")]);
        assert!(off.expect("valid").progress.is_none());
        assert!(HubOptions::default().progress.is_none());
    }

    #[test]
    fn wrong_values_are_named() {
        for (name, value) in [
            ("HF_ENDPOINT", "huggingface.co"),
            ("HF_ENDPOINT", "https://"),
            ("HF_HUB_DOWNLOAD_TIMEOUT", "soon"),
            ("HF_HUB_ETAG_TIMEOUT", "0"),
        ] {
            let error = of(&[(name, value)]).expect_err(value).to_string();
            assert!(error.contains(name) && error.contains(value), "{error}");
        }
        assert!(of(&[("HF_HUB_OFFLINE", "yes")]).expect("valid").offline);
        assert!(of(&[("TRANSFORMERS_OFFLINE", "1")]).expect("valid").offline);
        assert!(!of(&[("HF_HUB_OFFLINE", "0")]).expect("valid").offline);
        let slash = of(&[("HF_ENDPOINT", "http://a.example:1/x/")]).expect("valid");
        assert_eq!(slash.endpoint, "http://a.example:1/x");
    }
}
