//! The URLs of objects, and their names without secrets.

use crate::{Error, Result};

/// The server of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scheme {
    Http,
    S3,
    Gcs,
}

/// The URL of an object.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Location {
    pub(crate) scheme: Scheme,
    /// The URL as it was given, which may contain secrets.
    pub(crate) url: String,
    /// The URL without user, password, query and fragment.
    pub(crate) name: String,
    /// The bucket of S3 or GCS; for HTTP the host with its port.
    pub(crate) host: String,
    /// The key of the object in its bucket; for HTTP the path.
    pub(crate) key: String,
}

impl Location {
    /// Parses a URL; `None` for anything that is none, such as a path.
    ///
    /// # Errors
    /// [`Error::InvalidUrl`] for a URL of another kind, and for one that names no file.
    pub(crate) fn parse(text: &str) -> Result<Option<Location>> {
        let Some((scheme, rest)) = text.split_once("://") else {
            return Ok(None);
        };
        let is_scheme = !scheme.is_empty()
            && scheme
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
        if !is_scheme {
            return Ok(None);
        }
        let lower = scheme.to_ascii_lowercase();
        let kind = match lower.as_str() {
            "http" | "https" => Scheme::Http,
            "s3" | "s3a" => Scheme::S3,
            "gs" | "gcs" => Scheme::Gcs,
            _ => {
                let name = without_secrets(rest);
                let problem = "only https://, http://, s3:// and gs:// can be read; download the file and give its path";
                return Err(invalid(&format!("{scheme}://{name}"), problem));
            }
        };
        // A key of a bucket may contain `?` and `#`; the address of a page ends before them.
        let (shown, url) = match kind {
            Scheme::Http => (without_secrets(rest), format!("{lower}://{rest}")),
            Scheme::S3 | Scheme::Gcs => (rest.to_owned(), text.to_owned()),
        };
        let shown_scheme = match kind {
            Scheme::Http => lower.as_str(),
            Scheme::S3 => "s3",
            Scheme::Gcs => "gs",
        };
        let name = format!("{shown_scheme}://{shown}");
        let example = match kind {
            Scheme::Http => "https://HOST/PATH",
            Scheme::S3 => "s3://BUCKET/KEY",
            Scheme::Gcs => "gs://BUCKET/KEY",
        };
        let (host, key) = shown.split_once('/').unwrap_or((&shown, ""));
        if let Some((_, bucket)) = host.rsplit_once('@') {
            let problem =
                "credentials belong in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)";
            return Err(invalid(
                &format!("{shown_scheme}://{bucket}/{key}"),
                problem,
            ));
        }
        if host.is_empty() || host.contains(char::is_whitespace) || key.is_empty() {
            return Err(invalid(&name, &format!("give {example}")));
        }
        let (host, key) = (host.to_owned(), key.to_owned());
        Ok(Some(Location {
            scheme: kind,
            url,
            name,
            host,
            key,
        }))
    }

    /// Returns `true` if the URL names a folder of a bucket.
    pub(crate) fn is_folder(&self) -> bool {
        self.scheme != Scheme::Http && self.key.ends_with('/')
    }

    /// Returns the location of another object of the same bucket.
    pub(crate) fn with_key(&self, key: &str) -> Location {
        let scheme = if self.scheme == Scheme::S3 {
            "s3"
        } else {
            "gs"
        };
        let name = format!("{scheme}://{}/{key}", self.host);
        Location {
            url: name.clone(),
            name,
            key: key.to_owned(),
            ..self.clone()
        }
    }
}

impl std::fmt::Debug for Location {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Location").field(&self.name).finish()
    }
}

/// Returns the address without user, password, query and fragment.
fn without_secrets(rest: &str) -> String {
    let shown = rest.split(['?', '#']).next().unwrap_or_default();
    let host_end = shown.find('/').unwrap_or(shown.len());
    let host = match shown[..host_end].rsplit_once('@') {
        Some((_, host)) => host,
        None => &shown[..host_end],
    };
    format!("{}{}", host.to_ascii_lowercase(), &shown[host_end..])
}

fn invalid(url: &str, problem: &str) -> Error {
    Error::InvalidUrl {
        url: url.to_owned(),
        problem: problem.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Option<String> {
        Location::parse(text).unwrap().map(|location| location.name)
    }

    #[test]
    fn names_have_no_secrets() {
        let signed = "https://u:p@Host.example:8443/a/b.jsonl?X-Amz-Signature=feed#part";
        let location = Location::parse(signed).unwrap().unwrap();
        assert_eq!(location.name, "https://host.example:8443/a/b.jsonl");
        assert_eq!(
            (location.host.as_str(), location.key.as_str()),
            ("host.example:8443", "a/b.jsonl")
        );
        assert_eq!(location.url, signed);
        assert!(!format!("{location:?}").contains("feed"));
        assert_eq!(
            name("s3://bucket/a b#1.csv").as_deref(),
            Some("s3://bucket/a b#1.csv")
        );
        assert_eq!(name("gcs://bucket/k").as_deref(), Some("gs://bucket/k"));
        for path in ["data/a.jsonl", "c:\\data", "://x", "/a://b/c"] {
            assert_eq!(name(path), None, "{path}");
        }
    }

    #[test]
    fn other_urls_are_errors_without_their_secrets() {
        for text in [
            "ftp://u:secret@h/x",
            "s3://key:secret@bucket/x",
            "https://host",
            "https://",
            "s3://bucket/",
            "s3://bucket",
        ] {
            let error = Location::parse(text).unwrap_err().to_string();
            assert!(!error.contains("secret"), "{error}");
        }
    }
}
