//! The MLflow tracker against a real server, of the Python package `mlflow`.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use overdrive_tracking::{MlFlow, MlFlowOptions, StepMetrics, Tracker};
use serde_json::{Value, json};

use crate::on_python::python;

/// The server, until it is dropped.
struct Server {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Server {
    fn start(python: &str, folder: &Path) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/python/mlflow_server.py");
        let mut child = Command::new(python)
            .arg(script)
            .arg(folder)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, command: &str) -> String {
        let input = self.input.as_mut().unwrap();
        writeln!(input, "{command}").unwrap();
        self.line()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The end of its input ends the script and the server.
        self.input = None;
        let _ = self.child.wait();
    }
}

fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 8.3 / step as f64,
        learning_rate: 1e-3 / 3.0,
        eval_loss: step.is_multiple_of(10).then_some(2.5 / step as f64),
        ..StepMetrics::default()
    }
}

#[test]
#[ignore = "needs Python with mlflow"]
fn a_real_server_has_every_value_once_also_after_an_outage_and_a_restart_on_python() {
    let python = python(&["mlflow"]);
    let folder = tempfile::tempdir().unwrap();
    let mut server = Server::start(&python, folder.path());
    let file = folder.path().join("mlflow_run_id");
    let options = MlFlowOptions {
        tracking_uri: server.line(),
        experiment_name: "tiny".to_owned(),
        run_name: Some("tiny-001".to_owned()),
        run_id_file: Some(file.clone()),
        config: json!({ "seed": 42, "model": { "hidden_size": 256 }, "data": ["a.txt"] })
            .as_object()
            .unwrap()
            .clone(),
        retry_pause: Duration::from_millis(100),
        finish_timeout: Duration::from_secs(120),
        ..MlFlowOptions::default()
    };

    let mut tracker = MlFlow::start(options.clone()).unwrap();
    for number in 1..=400 {
        tracker.log(&step(number)).unwrap();
    }
    tracker.finish().unwrap();
    // The records of an outage follow when the server is back.
    assert_eq!(server.ask("stop"), "stopped");
    let mut reported = Vec::new();
    for number in 401..=420 {
        reported.extend(tracker.log(&step(number)).err());
    }
    while reported.is_empty() {
        reported.extend(tracker.log(&step(421)).err());
        std::thread::yield_now();
    }
    println!("reported: {}", reported[0]);
    drop(tracker);
    assert_eq!(server.ask("start"), "started");

    // Another process resumes from step 400.
    let mut tracker = MlFlow::start(options).unwrap();
    for number in 401..=450 {
        tracker.log(&step(number)).unwrap();
    }
    tracker.log_text(450, "sample", "fn main() {}").unwrap();
    assert_eq!(server.ask("stop"), "stopped");
    assert_eq!(server.ask("start"), "started");
    let _ = tracker.log(&step(451));
    tracker.finish().unwrap();

    let mut metrics = BTreeMap::<String, Vec<Value>>::new();
    for metric in (1..=451).map(step) {
        let mut add = |name: &str, value: f64| {
            let points = metrics.entry(name.to_owned()).or_default();
            points.push(json!([metric.step, value]));
        };
        add("loss", metric.loss);
        add("learning_rate", metric.learning_rate);
        add("tokens_per_second", 0.0);
        add("peak_memory_bytes", 0.0);
        if let Some(loss) = metric.eval_loss {
            add("eval_loss", loss);
        }
    }
    let expected = json!({
        "run_id": std::fs::read_to_string(file).unwrap().trim(), "run_name": "tiny-001", "experiment": "tiny",
        "status": "FINISHED", "runs": 1, "tags": { "sample": "fn main() {}" }, "metrics": metrics,
        "params": { "seed": "42", "model.hidden_size": "256", "data": r#"["a.txt"]"# },
    });
    let answer = server.ask(&expected.to_string());
    println!("{answer}");
    assert!(
        answer.starts_with("all values agree with mlflow"),
        "{answer}"
    );
}
