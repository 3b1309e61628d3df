//! Requests of MLflow's REST API, version 2.0.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use ureq::http::{Response, header};
use ureq::tls::{RootCerts, TlsConfig};
use ureq::{Agent, Body};

use super::options::{MlFlowOptions, is_run_id};

/// The largest response that is read, in bytes: a run with thousands of parameters and metrics.
const MAX_RESPONSE: u64 = 16 << 20;
/// The longest pause that a server can request.
pub(super) const MAX_PAUSE: Duration = Duration::from_secs(60);

/// A request that failed.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) kind: FailureKind,
    /// The reason as the end of a sentence, without secrets.
    pub(super) reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FailureKind {
    /// A retry may succeed, after the pause that the server asks for.
    Retry(Option<Duration>),
    /// The server does not have the experiment or run.
    Missing,
    /// The server refuses the content, so it would refuse it again.
    Rejected,
}

impl Failure {
    pub(super) fn retry(reason: impl Into<String>) -> Self {
        Self {
            kind: FailureKind::Retry(None),
            reason: reason.into(),
        }
    }
}

pub(super) type Attempt<T> = std::result::Result<T, Failure>;

/// A client of one server.
pub(super) struct Client {
    agent: Agent,
    server: String,
    authorization: Option<String>,
    /// The texts that must not be in an error message.
    secrets: Vec<String>,
}

/// An existing run.
pub(super) struct Run {
    pub(super) status: String,
    /// The names of its parameters.
    pub(super) params: Vec<String>,
}

impl Client {
    pub(super) fn new(options: &MlFlowOptions) -> Self {
        // Set explicitly, so that ureq does not need its own list of certificates.
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = TlsConfig::builder()
            .unversioned_rustls_crypto_provider(provider)
            .root_certs(RootCerts::PlatformVerifier);
        let mut config = Agent::config_builder()
            .http_status_as_error(false)
            // A redirect could lead the credentials to another server.
            .max_redirects(0)
            .max_redirects_will_error(false)
            .user_agent(concat!("overdrive/", env!("CARGO_PKG_VERSION")))
            .timeout_global(Some(options.request_timeout))
            .tls_config(tls.build());
        let server = options.tracking_uri.trim_end_matches('/').to_owned();
        if overdrive_core::is_loopback(&server) {
            config = config.proxy(None);
        }
        let authorization = options.authorization();
        let encoded = authorization
            .as_deref()
            .and_then(|header| header.split_once(' '));
        let secrets = [
            options.token.clone(),
            options.password.clone(),
            encoded.map(|(_, secret)| secret.to_owned()),
        ];
        Self {
            agent: config.build().new_agent(),
            server,
            authorization,
            secrets: secrets.into_iter().flatten().collect(),
        }
    }

    /// Returns the ID of an experiment, which is created if it is missing.
    pub(super) fn experiment(&self, name: &str) -> Attempt<String> {
        let path = "experiments/get-by-name";
        let answer = match self.get(path, &[("experiment_name", name)]) {
            Ok(answer) => answer,
            // If another process creates it in the meantime, the next attempt finds it.
            Err(failure) if failure.kind == FailureKind::Missing => {
                let answer = self.post("experiments/create", &json!({ "name": name }))?;
                return field(&answer["experiment_id"], "experiment_id");
            }
            Err(failure) => return Err(failure),
        };
        let experiment = &answer["experiment"];
        if experiment["lifecycle_stage"] == "deleted" {
            return Err(Failure::retry(format!(
                "the experiment {name:?} is deleted; restore it (`mlflow experiments restore`), or choose another name"
            )));
        }
        field(&experiment["experiment_id"], "experiment_id")
    }

    /// Creates a run with a tag and returns its ID.
    pub(super) fn create_run(
        &self,
        experiment: &str,
        name: Option<&str>,
        start_time: u64,
        tag: (&str, &str),
    ) -> Attempt<String> {
        let mut body = json!({
            "experiment_id": experiment,
            "start_time": start_time,
            "tags": [{ "key": tag.0, "value": tag.1 }],
        });
        if let Some(name) = name {
            body["run_name"] = name.into();
        }
        run_id(&self.post("runs/create", &body)?["run"])
    }

    /// Returns the ID of the run of an experiment that has a tag, if there is one.
    pub(super) fn find_run(&self, experiment: &str, tag: (&str, &str)) -> Attempt<Option<String>> {
        let body = json!({
            "experiment_ids": [experiment],
            "filter": format!("tags.`{}` = '{}'", tag.0, tag.1),
            "max_results": 1,
        });
        match &self.post("runs/search", &body)?["runs"][0] {
            Value::Null => Ok(None),
            run => run_id(run).map(Some),
        }
    }

    /// Returns a run.
    pub(super) fn run(&self, id: &str) -> Attempt<Run> {
        let answer = self.get("runs/get", &[("run_id", id)])?;
        let (info, data) = (&answer["run"]["info"], &answer["run"]["data"]);
        if info["lifecycle_stage"] == "deleted" {
            return Err(Failure {
                kind: FailureKind::Missing,
                reason: format!("the run {id} is deleted; restore it with `mlflow runs restore`"),
            });
        }
        let params = data["params"].as_array().into_iter().flatten();
        let key = |param: &Value| param["key"].as_str().map(str::to_owned);
        Ok(Run {
            status: field(&info["status"], "run.info.status")?,
            params: params.filter_map(key).collect(),
        })
    }

    /// Adds metrics and parameters to a run.
    pub(super) fn log_batch(
        &self,
        run: &str,
        metrics: Vec<Value>,
        params: Vec<Value>,
    ) -> Attempt<()> {
        let body = json!({ "run_id": run, "metrics": metrics, "params": params });
        self.post("runs/log-batch", &body).map(drop)
    }

    /// Sets a tag of a run.
    pub(super) fn set_tag(&self, run: &str, key: &str, value: &str) -> Attempt<()> {
        let body = json!({ "run_id": run, "key": key, "value": value });
        self.post("runs/set-tag", &body).map(drop)
    }

    /// Sets the status of a run, and the time in milliseconds at which it ended.
    pub(super) fn set_status(&self, run: &str, status: &str, end_time: Option<u64>) -> Attempt<()> {
        let mut body = json!({ "run_id": run, "status": status });
        if let Some(time) = end_time {
            body["end_time"] = time.into();
        }
        self.post("runs/update", &body).map(drop)
    }

    fn get(&self, path: &str, query: &[(&str, &str)]) -> Attempt<Value> {
        let mut request = self.agent.get(self.url(path));
        for (key, value) in query {
            request = request.query(key, value);
        }
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        self.answer(path, request.call())
    }

    fn post(&self, path: &str, body: &Value) -> Attempt<Value> {
        let mut request = self.agent.post(self.url(path));
        request = request.header(header::CONTENT_TYPE, "application/json");
        if let Some(authorization) = &self.authorization {
            request = request.header(header::AUTHORIZATION, authorization);
        }
        self.answer(path, request.send(body.to_string()))
    }

    fn url(&self, path: &str) -> String {
        format!("{}/api/2.0/mlflow/{path}", self.server)
    }

    /// Returns the JSON object of a response, or the failure.
    fn answer(
        &self,
        path: &str,
        response: std::result::Result<Response<Body>, ureq::Error>,
    ) -> Attempt<Value> {
        let failed = |error: ureq::Error| {
            Failure::retry(self.without_secrets(&format!("does not answer: {error}")))
        };
        let mut response = response.map_err(failed)?;
        let status = response.status().as_u16();
        let header = |name| response.headers().get(name)?.to_str().ok();
        let pause = header(header::RETRY_AFTER).and_then(|text| text.parse().ok());
        let location = header(header::LOCATION).map(str::to_owned);
        let body = response.body_mut().with_config().limit(MAX_RESPONSE);
        let text = body.read_to_string().map_err(failed)?;
        let answer = serde_json::from_str::<Value>(&text).unwrap_or_default();
        if status == 200 && answer.is_object() {
            return Ok(answer);
        }
        let code = answer["error_code"].as_str().unwrap_or_default();
        let kind = match (status, code) {
            (_, "RESOURCE_DOES_NOT_EXIST") => FailureKind::Missing,
            // 400 of a proxy has no code of MLflow, and may pass.
            (400, code) if !code.is_empty() => FailureKind::Rejected,
            (413, _) => FailureKind::Rejected,
            _ => FailureKind::Retry(pause.map(Duration::from_secs)),
        };
        let reason = match status {
            200 => format!("the response to {path} is not a JSON object; check `tracking_uri`"),
            300..=399 => format!(
                "redirects to {}; set `tracking_uri` to the final address",
                location.unwrap_or_default()
            ),
            401 | 403 => format!(
                "refuses access (status {status}); set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and \
                 MLFLOW_TRACKING_PASSWORD"
            ),
            _ => {
                let message = answer["message"].as_str().unwrap_or_default();
                format!("{path} returned status {status} {code}: {message}")
            }
        };
        Err(Failure {
            kind,
            reason: self.without_secrets(&reason),
        })
    }

    /// Returns a short line without control characters and without the credentials, which a server could repeat.
    fn without_secrets(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for secret in self.secrets.iter().filter(|secret| !secret.is_empty()) {
            text = text.replace(secret.as_str(), "…");
        }
        let text = text.trim().trim_end_matches(':');
        let shown = text.chars().filter(|letter| !letter.is_control());
        shown.take(300).collect()
    }
}

fn run_id(run: &Value) -> Attempt<String> {
    let id = field(&run["info"]["run_id"], "run.info.run_id")?;
    match is_run_id(&id) {
        true => Ok(id),
        false => Err(Failure::retry("the ID of the run is not one of MLflow's")),
    }
}

fn field(value: &Value, name: &str) -> Attempt<String> {
    let missing = || {
        Failure::retry(format!(
            "the response has no `{name}`; check `tracking_uri`"
        ))
    };
    value.as_str().map(str::to_owned).ok_or_else(missing)
}
