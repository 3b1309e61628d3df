//! The options of the MLflow tracker.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use overdrive_core::Error as CommonError;
use serde_json::{Map, Value};

use crate::Result;

/// The longest time of an option.
const MAX_TIME: Duration = Duration::from_secs(24 * 60 * 60);

/// The options of [`MlFlow`](crate::MlFlow).
#[derive(Clone)]
pub struct MlFlowOptions {
    /// The address of the tracking server, `http://…` or `https://…` (`MLFLOW_TRACKING_URI`). It is required: default
    /// empty.
    pub tracking_uri: String,
    /// The experiment, which is created if it is missing (`MLFLOW_EXPERIMENT_NAME`). Default `Default`.
    pub experiment_name: String,
    /// The name of a new run. Default: the server chooses one.
    pub run_name: Option<String>,
    /// The ID of an existing run to continue (`MLFLOW_RUN_ID`). Default: that of `run_id_file`, else a new run.
    pub run_id: Option<String>,
    /// A file that keeps the ID of the run, so that a later process continues it. If it exists, its run is continued,
    /// or replaced by a new one if the server does not know it. Default: none.
    pub run_id_file: Option<PathBuf>,
    /// The token for Bearer authentication (`MLFLOW_TRACKING_TOKEN`). Default: none.
    pub token: Option<String>,
    /// The user name for Basic authentication, which has precedence over `token` (`MLFLOW_TRACKING_USERNAME`).
    /// Default: none.
    pub username: Option<String>,
    /// The password of `username` (`MLFLOW_TRACKING_PASSWORD`). Default: none.
    pub password: Option<String>,
    /// The configuration of the run, logged as parameters. Keys of nested objects are joined by dots. Default: empty.
    pub config: Map<String, Value>,
    /// The longest wait for the response to a request, at most a day. Default 10 s.
    pub request_timeout: Duration,
    /// The pause before the first retry after a failure; it doubles with each further failure, up to a minute.
    /// Default 1 s.
    pub retry_pause: Duration,
    /// The longest time that [`finish`](crate::Tracker::finish) waits for the delivery of the remaining records.
    /// At most a day; default 30 s.
    pub finish_timeout: Duration,
}

impl Default for MlFlowOptions {
    fn default() -> Self {
        Self {
            tracking_uri: String::new(),
            experiment_name: "Default".to_owned(),
            run_name: None,
            run_id: None,
            run_id_file: None,
            token: None,
            username: None,
            password: None,
            config: Map::new(),
            request_timeout: Duration::from_secs(10),
            retry_pause: Duration::from_secs(1),
            finish_timeout: Duration::from_secs(30),
        }
    }
}

impl MlFlowOptions {
    /// Returns the options of MLflow's environment variables: `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`,
    /// `MLFLOW_RUN_ID`, `MLFLOW_TRACKING_TOKEN`, `MLFLOW_TRACKING_USERNAME` and `MLFLOW_TRACKING_PASSWORD`.
    pub fn from_env() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    /// Returns the options of the given variables, for [`from_env`](Self::from_env) and its tests.
    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| {
            let value = variable(name)?.trim().to_owned();
            (!value.is_empty()).then_some(value)
        };
        let defaults = Self::default();
        Self {
            tracking_uri: get("MLFLOW_TRACKING_URI").unwrap_or(defaults.tracking_uri),
            experiment_name: get("MLFLOW_EXPERIMENT_NAME").unwrap_or(defaults.experiment_name),
            run_id: get("MLFLOW_RUN_ID"),
            token: get("MLFLOW_TRACKING_TOKEN"),
            username: get("MLFLOW_TRACKING_USERNAME"),
            password: get("MLFLOW_TRACKING_PASSWORD"),
            ..Self::default()
        }
    }

    /// Checks the values. It does not access the network.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`].
    pub fn validate(&self) -> Result<()> {
        let invalid = |option, value: &str, expected| {
            Err(CommonError::option(option, format!("{value:?}"), expected).into())
        };
        let address = "the address of an MLflow server, http://… or https://… (start one with `mlflow server`); set \
                       MLFLOW_TRACKING_URI";
        let uri = &self.tracking_uri;
        let lower = uri.to_ascii_lowercase();
        let host = lower
            .strip_prefix("https://")
            .or_else(|| lower.strip_prefix("http://"));
        let host = host.and_then(|rest| rest.split(['/', '?', '#']).next());
        if host.is_some_and(|host| host.contains('@')) {
            // The value may contain a password, so the message must not show it.
            let expected = "an address without a user name or password; set MLFLOW_TRACKING_USERNAME and \
                            MLFLOW_TRACKING_PASSWORD";
            return invalid("tracking_uri", "…@…", expected);
        }
        let plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_graphic());
        if host.is_none_or(str::is_empty) || !plain(uri) || uri.contains(['?', '#']) {
            return invalid("tracking_uri", uri, address);
        }
        if self.experiment_name.trim().is_empty() {
            let expected = "the name of an experiment; set MLFLOW_EXPERIMENT_NAME";
            return invalid("experiment_name", &self.experiment_name, expected);
        }
        if let Some(id) = self.run_id.as_deref().filter(|id| !is_run_id(id)) {
            let expected = "the ID of a run: letters, digits, `-` and `_`; set MLFLOW_RUN_ID, or unset it for a new run";
            return invalid("run_id", id, expected);
        }
        if self.token.as_deref().is_some_and(|token| !plain(token)) {
            // The message must not show the value.
            let expected = "printable ASCII characters without spaces; check MLFLOW_TRACKING_TOKEN";
            return invalid("token", "…", expected);
        }
        if self.username.is_some() != self.password.is_some() {
            let (missing, variable) = match self.username {
                Some(_) => ("password", "MLFLOW_TRACKING_PASSWORD"),
                None => ("username", "MLFLOW_TRACKING_USERNAME"),
            };
            let expected = format!("given, since the other half of the login is; set {variable}");
            return Err(CommonError::option(missing, "not set", expected).into());
        }
        let times = [
            ("request_timeout", self.request_timeout),
            ("retry_pause", self.retry_pause),
        ];
        for (option, time) in times {
            if time.is_zero() || time > MAX_TIME {
                let expected = "above 0 s and at most a day";
                return Err(CommonError::option(option, format!("{time:?}"), expected).into());
            }
        }
        if self.finish_timeout > MAX_TIME {
            let value = format!("{:?}", self.finish_timeout);
            return Err(CommonError::option("finish_timeout", value, "at most a day").into());
        }
        Ok(())
    }

    /// Returns the value of the header `Authorization`.
    pub(super) fn authorization(&self) -> Option<String> {
        match (&self.username, &self.password, &self.token) {
            (Some(username), Some(password), _) => {
                let login = BASE64_STANDARD.encode(format!("{username}:{password}"));
                Some(format!("Basic {login}"))
            }
            (_, _, Some(token)) => Some(format!("Bearer {token}")),
            _ => None,
        }
    }
}

/// Returns `true` if `id` can be the ID of a run. IDs go into files and error messages, so others are refused.
pub(super) fn is_run_id(id: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    (1..=128).contains(&id.len()) && id.bytes().all(letter)
}

impl fmt::Debug for MlFlowOptions {
    /// Writes the options without the token, the password and an address that may contain one.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let uri = match self.tracking_uri.contains('@') {
            true => "…",
            false => &self.tracking_uri,
        };
        f.debug_struct("MlFlowOptions")
            .field("tracking_uri", &uri)
            .field("experiment_name", &self.experiment_name)
            .field("run_name", &self.run_name)
            .field("run_id", &self.run_id)
            .field("run_id_file", &self.run_id_file)
            .field("token", &self.token.as_ref().map(|_| "…"))
            .field("username", &self.username)
            .field("password", &self.password.as_ref().map(|_| "…"))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(variables: &[(&str, &str)]) -> MlFlowOptions {
        MlFlowOptions::from_variables(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_options_are_those_of_mlflows_variables() {
        let options = of(&[
            ("MLFLOW_TRACKING_URI", "https://mlflow.example/base/ "),
            ("MLFLOW_EXPERIMENT_NAME", "tiny"),
            ("MLFLOW_RUN_ID", "0123abcd"),
            ("MLFLOW_TRACKING_TOKEN", "secret-token"),
        ]);
        options.validate().expect("valid");
        assert_eq!(options.tracking_uri, "https://mlflow.example/base/");
        assert_eq!(options.experiment_name, "tiny");
        assert_eq!(options.run_id.as_deref(), Some("0123abcd"));
        assert_eq!(
            options.authorization().as_deref(),
            Some("Bearer secret-token")
        );
        let unset = of(&[("MLFLOW_EXPERIMENT_NAME", "")]);
        assert_eq!(unset.experiment_name, "Default");
        assert_eq!(unset.authorization(), None);
    }

    #[test]
    fn a_login_has_precedence_over_a_token_as_in_python() {
        let options = of(&[
            ("MLFLOW_TRACKING_TOKEN", "t"),
            ("MLFLOW_TRACKING_USERNAME", "user"),
            ("MLFLOW_TRACKING_PASSWORD", "pass"),
        ]);
        assert_eq!(
            options.authorization().as_deref(),
            Some("Basic dXNlcjpwYXNz")
        );
    }

    #[test]
    fn wrong_values_are_named_and_secrets_are_not_shown() {
        let valid = ("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000");
        let cases: [(&[(&str, &str)], &str); 9] = [
            (&[], "`tracking_uri` is \"\"; it must be the address"),
            (
                &[("MLFLOW_TRACKING_URI", "file:///mlruns")],
                "`tracking_uri` is \"file:///mlruns\"",
            ),
            (&[("MLFLOW_TRACKING_URI", "http://")], "`tracking_uri`"),
            (
                &[("MLFLOW_TRACKING_URI", "http://a b.example")],
                "`tracking_uri`",
            ),
            (
                &[("MLFLOW_TRACKING_URI", "http://u:hidden@a.example")],
                "without a user name or password",
            ),
            (&[valid, ("MLFLOW_RUN_ID", "../x")], "`run_id` is \"../x\""),
            (&[valid, ("MLFLOW_TRACKING_TOKEN", "hidden x")], "`token`"),
            (
                &[valid, ("MLFLOW_TRACKING_PASSWORD", "hidden")],
                "`username` is not set",
            ),
            (
                &[valid, ("MLFLOW_TRACKING_USERNAME", "user")],
                "`password` is not set",
            ),
        ];
        for (variables, expected) in cases {
            let options = of(variables);
            let error = options.validate().expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
            assert!(!error.contains("hidden"), "{error}");
            assert!(!format!("{options:?}").contains("hidden"), "{options:?}");
        }
    }
}
