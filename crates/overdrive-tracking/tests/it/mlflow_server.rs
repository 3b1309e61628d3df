//! A server of the part of MLflow's API that the tracker uses, with faults.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};

/// What the server does with a request instead of answering it.
pub(crate) enum Fault {
    /// A response with this status and body; 429 asks for no pause.
    Status(u16, &'static str),
    /// Status 200 with a body that is no JSON object.
    BadJson,
    /// Closes the connection without doing what was asked.
    Drop,
    /// Does what was asked, and closes the connection without a response.
    DropAfter,
    /// Status 500 with the credentials of the request as the message.
    EchoCredentials,
    /// Answers when the sender of the channel is dropped.
    Hold(Receiver<()>),
}

#[derive(Debug, Clone, Default)]
pub(crate) struct FakeRun {
    pub(crate) experiment: String,
    pub(crate) name: Option<String>,
    pub(crate) statuses: Vec<String>,
    pub(crate) tags: BTreeMap<String, String>,
    pub(crate) params: BTreeMap<String, String>,
    /// Name, step, value and time; a value that is there already is not stored again, as in MLflow's database.
    pub(crate) metrics: Vec<(String, u64, f64, u64)>,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) experiments: Vec<String>,
    pub(crate) runs: Vec<FakeRun>,
    pub(crate) credentials: Vec<Option<String>>,
    /// The paths of all requests.
    pub(crate) paths: Vec<String>,
    /// The sizes of all batches: metrics and parameters.
    pub(crate) batches: Vec<(usize, usize)>,
    /// The faults of the next requests to a path, in their order.
    faults: BTreeMap<&'static str, Vec<Fault>>,
}

pub(crate) struct Server {
    pub(crate) address: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    pub(crate) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::<Mutex<State>>::default();
        let shared = Arc::clone(&state);
        // The thread ends with the process.
        thread::spawn(move || {
            for stream in listener.incoming() {
                let shared = Arc::clone(&shared);
                thread::spawn(move || serve(stream.unwrap(), &shared));
            }
        });
        Self { address, state }
    }

    /// Adds a fault for a later request to `path`.
    pub(crate) fn with(self, path: &'static str, fault: Fault) -> Self {
        let mut state = self.state.lock().unwrap();
        state.faults.entry(path).or_default().push(fault);
        drop(state);
        self
    }

    pub(crate) fn state<T>(&self, read: impl FnOnce(&mut State) -> T) -> T {
        read(&mut self.state.lock().unwrap())
    }

    pub(crate) fn runs(&self) -> Vec<FakeRun> {
        self.state(|state| state.runs.clone())
    }
}

fn serve(stream: TcpStream, state: &Mutex<State>) {
    let mut reader = BufReader::new(&stream);
    let mut line = String::new();
    if reader.read_line(&mut line).unwrap_or(0) == 0 {
        return;
    }
    let target = line.split(' ').nth(1).unwrap().to_owned();
    let (path, query) = target.split_once('?').unwrap_or((target.as_str(), ""));
    let path = path.strip_prefix("/api/2.0/mlflow/").unwrap().to_owned();
    let (mut length, mut credentials) = (0, None);
    loop {
        line.clear();
        reader.read_line(&mut line).unwrap();
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "authorization" => credentials = Some(value.to_owned()),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    let body = match length {
        0 => json!({ "query": query.split_once('=').unwrap().1 }),
        _ => serde_json::from_slice(&body).unwrap(),
    };
    let fault = {
        let mut state = state.lock().unwrap();
        state.paths.push(path.clone());
        state.credentials.push(credentials.clone());
        let faults = state.faults.get_mut(path.as_str());
        faults
            .filter(|faults| !faults.is_empty())
            .map(|faults| faults.remove(0))
    };
    let act = || state.lock().unwrap().act(&path, &body);
    let (status, text) = match fault {
        None => act(),
        Some(Fault::Status(status, text)) => (status, text.to_owned()),
        Some(Fault::BadJson) => (200, "<html>Log in</html>".to_owned()),
        Some(Fault::Drop) => return,
        Some(Fault::DropAfter) => return drop(act()),
        Some(Fault::EchoCredentials) => {
            let message = format!("no access for\n{}", credentials.unwrap_or_default());
            (
                500,
                json!({ "error_code": "INTERNAL_ERROR", "message": message }).to_string(),
            )
        }
        Some(Fault::Hold(until)) => {
            let _ = until.recv();
            act()
        }
    };
    let length = text.len();
    let pause = if status == 429 {
        "Retry-After: 0\r\n"
    } else {
        ""
    };
    let response = format!(
        "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\n{pause}Connection: close\r\n\r\n{text}"
    );
    // A client whose request was held may be gone.
    let _ = (&stream).write_all(response.as_bytes());
}

impl State {
    fn act(&mut self, path: &str, body: &Value) -> (u16, String) {
        let answer = self.answer(path, body);
        match answer {
            Ok(answer) => (200, answer.to_string()),
            Err((status, code)) => {
                let message = format!("{path} failed");
                (
                    status,
                    json!({ "error_code": code, "message": message }).to_string(),
                )
            }
        }
    }

    fn answer(&mut self, path: &str, body: &Value) -> Result<Value, (u16, &'static str)> {
        const MISSING: (u16, &str) = (404, "RESOURCE_DOES_NOT_EXIST");
        let text = |key: &str| body[key].as_str().unwrap_or_default().to_owned();
        let experiment = |index: usize| format!("{}", index + 1);
        match path {
            "experiments/get-by-name" => {
                let name = text("query");
                let found = self.experiments.iter().position(|known| *known == name);
                let id = experiment(found.ok_or(MISSING)?);
                return Ok(
                    json!({ "experiment": { "experiment_id": id, "lifecycle_stage": "active" } }),
                );
            }
            "experiments/create" => {
                if self.experiments.contains(&text("name")) {
                    return Err((400, "RESOURCE_ALREADY_EXISTS"));
                }
                self.experiments.push(text("name"));
                return Ok(json!({ "experiment_id": experiment(self.experiments.len() - 1) }));
            }
            "runs/create" => {
                let tags = body["tags"].as_array().unwrap().iter();
                let pair = |tag: &Value| {
                    let text = |key: &str| tag[key].as_str().unwrap().to_owned();
                    (text("key"), text("value"))
                };
                self.runs.push(FakeRun {
                    experiment: text("experiment_id"),
                    name: body["run_name"].as_str().map(str::to_owned),
                    statuses: vec!["RUNNING".to_owned()],
                    tags: tags.map(pair).collect(),
                    ..FakeRun::default()
                });
                let id = format!("run{}", self.runs.len() - 1);
                return Ok(json!({ "run": { "info": { "run_id": id } } }));
            }
            "runs/search" => {
                let filter = text("filter");
                let found = self.runs.iter().position(|run| {
                    let mut tags = run.tags.iter();
                    tags.any(|(key, value)| filter == format!("tags.`{key}` = '{value}'"))
                });
                let runs = |index: usize| json!([{ "info": { "run_id": format!("run{index}") } }]);
                return Ok(found.map_or(json!({}), |index| json!({ "runs": runs(index) })));
            }
            _ => {}
        }
        let id = match path {
            "runs/get" => text("query"),
            _ => text("run_id"),
        };
        let index = id
            .strip_prefix("run")
            .and_then(|index| index.parse::<usize>().ok());
        let run = index
            .and_then(|index| self.runs.get_mut(index))
            .ok_or(MISSING)?;
        match path {
            "runs/get" => {
                let params = run.params.iter();
                let params: Vec<Value> = params
                    .map(|(key, value)| json!({ "key": key, "value": value }))
                    .collect();
                let status = run.statuses.last();
                Ok(json!({ "run": { "info": { "status": status }, "data": { "params": params } } }))
            }
            "runs/log-batch" => {
                let (metrics, params) = (
                    body["metrics"].as_array().unwrap(),
                    body["params"].as_array().unwrap(),
                );
                self.batches.push((metrics.len(), params.len()));
                for param in params {
                    let key = param["key"].as_str().unwrap().to_owned();
                    let value = param["value"].as_str().unwrap().to_owned();
                    if run.params.get(&key).is_some_and(|known| *known != value) {
                        return Err((400, "INVALID_PARAMETER_VALUE"));
                    }
                    run.params.insert(key, value);
                }
                for metric in metrics {
                    let number = |key: &str| metric[key].as_u64().unwrap();
                    let key = metric["key"].as_str().unwrap().to_owned();
                    let value = metric["value"].as_f64().unwrap();
                    let point = (key, number("step"), value, number("timestamp"));
                    if !run.metrics.contains(&point) {
                        run.metrics.push(point);
                    }
                }
                Ok(json!({}))
            }
            "runs/set-tag" => {
                run.tags.insert(text("key"), text("value"));
                Ok(json!({}))
            }
            "runs/update" => {
                run.statuses.push(text("status"));
                Ok(json!({ "run_info": {} }))
            }
            other => panic!("a request to {other}"),
        }
    }
}
