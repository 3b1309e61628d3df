//! The MLflow tracker against a server that answers, fails, lies and falls silent.

use std::fs;
use std::net::TcpListener;
use std::sync::mpsc;
use std::time::Duration;

use overdrive_tracking::{MlFlow, MlFlowOptions, StepMetrics, Tracker};
use serde_json::json;

use crate::mlflow_server::{FakeRun, Fault, Server};

const TOKEN: &str = "secret-0123456789";

fn options(server: &Server) -> MlFlowOptions {
    MlFlowOptions {
        tracking_uri: format!("{}/", server.address),
        experiment_name: "tiny".to_owned(),
        run_name: Some("tiny-001".to_owned()),
        token: Some(TOKEN.to_owned()),
        config: json!({ "seed": 42, "model": { "hidden_size": 256 } })
            .as_object()
            .unwrap()
            .clone(),
        retry_pause: Duration::from_millis(1),
        ..MlFlowOptions::default()
    }
}

fn step(step: u64) -> StepMetrics {
    StepMetrics {
        step,
        loss: 8.0 / step as f64,
        learning_rate: 0.5,
        ..StepMetrics::default()
    }
}

/// Returns the losses of a run with their steps.
fn losses(run: &FakeRun) -> Vec<(u64, f64)> {
    let metrics = run.metrics.iter();
    let losses = metrics.filter(|(name, ..)| name == "loss");
    losses.map(|(_, step, value, _)| (*step, *value)).collect()
}

#[test]
fn a_run_has_the_records_the_parameters_the_texts_and_its_end() {
    let server = Server::start();
    let mut tracker = MlFlow::start(options(&server)).unwrap();
    for number in 1..=3 {
        tracker
            .log(&StepMetrics {
                eval_loss: (number == 3).then_some(2.5),
                grad_norm: Some(f64::NAN),
                ..step(number)
            })
            .unwrap();
    }
    tracker.log_text(3, "sample", "fn main() {}").unwrap();
    tracker.finish().unwrap();
    let runs = server.runs();
    let [run] = &runs[..] else { panic!("one run") };
    assert_eq!(
        (run.experiment.as_str(), run.name.as_deref()),
        ("1", Some("tiny-001"))
    );
    assert_eq!(losses(run), [(1, 8.0), (2, 4.0), (3, 8.0 / 3.0)]);
    let of_last = run.metrics.iter().filter(|(_, step, ..)| *step == 3);
    let names: Vec<&str> = of_last.map(|(name, ..)| name.as_str()).collect();
    let expected = [
        "loss",
        "learning_rate",
        "tokens_per_second",
        "peak_memory_bytes",
        "eval_loss",
    ];
    assert_eq!(names, expected);
    let params: Vec<_> = run
        .params
        .iter()
        .map(|(key, value)| (key.as_str(), value.as_str()))
        .collect();
    assert_eq!(params, [("model.hidden_size", "256"), ("seed", "42")]);
    assert_eq!(run.tags["sample"], "fn main() {}");
    assert_eq!(run.statuses, ["RUNNING", "FINISHED"]);
    let expected = format!("Bearer {TOKEN}");
    server.state(|state| {
        assert!(
            state
                .credentials
                .iter()
                .all(|found| found.as_ref() == Some(&expected))
        )
    });

    // Logging may continue after `finish`.
    tracker.log(&step(4)).unwrap();
    tracker.finish().unwrap();
    assert_eq!(losses(&server.runs()[0]).len(), 4);
}

#[test]
fn nothing_is_lost_or_doubled_whichever_request_fails_in_whichever_way() {
    // Without parameters, the first batch is that of the metrics.
    let paths = [
        ("experiments/get-by-name", 2),
        ("experiments/create", 2),
        ("runs/create", 2),
        ("runs/log-batch", 2),
        ("runs/log-batch", 0),
        ("runs/set-tag", 2),
        ("runs/update", 2),
    ];
    let faults: [fn() -> Fault; 7] = [
        || Fault::Status(500, "out of order"),
        || Fault::Status(429, r#"{"error_code": "REQUEST_LIMIT_EXCEEDED"}"#),
        || Fault::Status(400, "a proxy's page"),
        || Fault::BadJson,
        || Fault::Drop,
        || Fault::DropAfter,
        || Fault::EchoCredentials,
    ];
    for (path, params) in paths {
        for (index, fault) in faults.iter().enumerate() {
            // Twice, so that a retry fails too.
            let server = Server::start().with(path, fault()).with(path, fault());
            let mut options = options(&server);
            if params == 0 {
                options.config.clear();
            }
            let mut tracker = MlFlow::start(options).unwrap();
            let mut errors = Vec::new();
            for number in 1..=5 {
                errors.extend(tracker.log(&step(number)).err());
            }
            errors.extend(tracker.log_text(5, "sample", "text").err());
            tracker.finish().unwrap();
            let runs = server.runs();
            assert_eq!(runs.len(), 1, "{path}, fault {index}");
            let expected: Vec<_> = (1..=5).map(|step| (step, 8.0 / step as f64)).collect();
            assert_eq!(losses(&runs[0]), expected, "{path}, fault {index}");
            assert_eq!(runs[0].metrics.len(), 20, "{path}, fault {index}");
            assert_eq!(runs[0].params.len(), params, "{path}, fault {index}");
            assert_eq!(runs[0].tags["sample"], "text");
            assert_eq!(runs[0].statuses.last().unwrap(), "FINISHED");
            for error in errors {
                let error = error.to_string();
                assert!(
                    error.contains(&server.address) && !error.contains(TOKEN),
                    "{error}"
                );
            }
        }
    }
}

#[test]
fn an_error_has_the_reason_and_never_the_credentials() {
    let login = MlFlowOptions {
        username: Some("user".to_owned()),
        password: Some("hidden-word".to_owned()),
        ..MlFlowOptions::default()
    };
    for (path, fault, expected) in [
        (
            "experiments/get-by-name",
            Fault::Status(500, "{}"),
            "experiments/get-by-name returned status 500",
        ),
        (
            "experiments/get-by-name",
            Fault::Status(401, ""),
            "refuses access (status 401); set MLFLOW_TRACKING_TOKEN",
        ),
        (
            "experiments/get-by-name",
            Fault::Status(302, ""),
            "set `tracking_uri` to the final address",
        ),
        (
            "experiments/get-by-name",
            Fault::BadJson,
            "is not a JSON object; check `tracking_uri`",
        ),
        ("experiments/get-by-name", Fault::Drop, "does not answer: "),
        (
            "runs/create",
            Fault::Status(200, "{}"),
            "has no `run.info.run_id`",
        ),
        (
            "runs/create",
            Fault::EchoCredentials,
            "INTERNAL_ERROR: no access for",
        ),
    ] {
        // Further failures follow a pause that does not end in this test.
        let server = Server::start().with(path, fault);
        let mut tracker = MlFlow::start(MlFlowOptions {
            username: login.username.clone(),
            password: login.password.clone(),
            retry_pause: Duration::from_secs(3600),
            ..options(&server)
        })
        .unwrap();
        let error = loop {
            if let Err(error) = tracker.log(&step(1)) {
                break error.to_string();
            }
            std::thread::yield_now();
        };
        let beginning = format!("the MLflow server {}/ ", server.address);
        assert!(
            error.starts_with(&beginning) && error.contains(expected),
            "{error}"
        );
        for secret in ["hidden-word", "dXNlcjpoaWRkZW4td29yZA==", TOKEN, "\n"] {
            assert!(!error.contains(secret), "{error}");
        }
        tracker.finish().unwrap();
    }
}

#[test]
fn training_does_not_wait_for_a_server_that_is_slow() {
    let (release, held) = mpsc::channel();
    let server = Server::start().with("experiments/get-by-name", Fault::Hold(held));
    let mut tracker = MlFlow::start(MlFlowOptions {
        request_timeout: Duration::from_secs(3600),
        ..options(&server)
    })
    .unwrap();
    // The server answers nothing until this loop is over.
    for number in 1..=500 {
        tracker.log(&step(number)).unwrap();
    }
    assert_eq!(server.runs().len(), 0);
    drop(release);
    tracker.finish().unwrap();
    assert_eq!(losses(&server.runs()[0]).len(), 500);
    let batches = server.state(|state| state.batches.clone());
    assert_eq!(batches[0], (0, 2), "the parameters");
    let sizes: Vec<usize> = batches[1..].iter().map(|(metrics, _)| *metrics).collect();
    assert_eq!(sizes.iter().sum::<usize>(), 2000);
    // The first one was taken before the others were logged.
    assert!(
        sizes.len() <= 3 && sizes.iter().all(|size| *size <= 1000),
        "{sizes:?}"
    );
}

#[test]
fn a_request_that_gets_no_response_is_sent_again() {
    let (_release, held) = mpsc::channel();
    let server = Server::start().with("runs/log-batch", Fault::Hold(held));
    let mut tracker = MlFlow::start(MlFlowOptions {
        request_timeout: Duration::from_secs(1),
        ..options(&server)
    })
    .unwrap();
    let _ = tracker.log(&step(1));
    tracker.finish().unwrap();
    assert_eq!(losses(&server.runs()[0]), [(1, 8.0)]);
}

#[test]
fn the_end_of_a_run_does_not_wait_for_ever() {
    let server = Server::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // Connections are refused from now on.
    drop(listener);
    let mut tracker = MlFlow::start(MlFlowOptions {
        tracking_uri: format!("http://{address}"),
        finish_timeout: Duration::from_millis(50),
        ..options(&server)
    })
    .unwrap();
    let _ = tracker.log(&step(1));
    let error = tracker.finish().unwrap_err().to_string();
    assert!(
        error.contains("5 records were not sent within 50ms"),
        "{error}"
    );
    assert!(!error.contains(TOKEN), "{error}");
}

#[test]
fn refused_records_are_reported_once_and_do_not_block_others() {
    let refusal = r#"{"error_code": "INVALID_PARAMETER_VALUE", "message": "a metric is odd"}"#;
    // The first batch is that of the parameters.
    let server = Server::start()
        .with("runs/log-batch", Fault::Status(400, refusal))
        .with("runs/log-batch", Fault::Status(400, refusal));
    let mut tracker = MlFlow::start(options(&server)).unwrap();
    let mut errors: Vec<String> = Vec::new();
    errors.extend(tracker.log(&step(1)).err().map(|error| error.to_string()));
    errors.extend(tracker.finish().err().map(|error| error.to_string()));
    let last = errors.last().unwrap();
    assert!(
        last.contains("refuses 4 records, which are lost for MLflow: "),
        "{last}"
    );
    assert!(
        last.contains("INVALID_PARAMETER_VALUE: a metric is odd"),
        "{last}"
    );
    tracker.log(&step(2)).unwrap();
    tracker.finish().unwrap();
    assert_eq!(losses(&server.runs()[0]), [(2, 4.0)]);
}

#[test]
fn a_resumed_run_continues_the_same_one() {
    let server = Server::start();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("mlflow_run_id");
    let options = || MlFlowOptions {
        run_id_file: Some(file.clone()),
        ..options(&server)
    };
    let mut tracker = MlFlow::start(options()).unwrap();
    tracker.log(&step(1)).unwrap();
    // An error of the loop drops the tracker.
    drop(tracker);
    assert_eq!(fs::read_to_string(&file).unwrap(), "run0\n");
    assert_eq!(server.runs()[0].statuses, ["RUNNING", "FAILED"]);

    let mut resumed = MlFlow::start(MlFlowOptions {
        config: json!({ "seed": 43, "threads": 2 })
            .as_object()
            .unwrap()
            .clone(),
        ..options()
    })
    .unwrap();
    resumed.log(&step(2)).unwrap();
    resumed.finish().unwrap();
    drop(resumed);
    let runs = server.runs();
    assert_eq!(runs.len(), 1);
    assert_eq!(losses(&runs[0]), [(1, 8.0), (2, 4.0)]);
    assert_eq!(
        runs[0].statuses,
        ["RUNNING", "FAILED", "RUNNING", "FINISHED"]
    );
    // MLflow keeps the first value of a parameter.
    assert_eq!(
        (&*runs[0].params["seed"], &*runs[0].params["threads"]),
        ("42", "2")
    );

    // A server that does not know the run gets a new one, and so does the file.
    let other = Server::start();
    fs::write(&file, "run7\n").unwrap();
    let mut moved = MlFlow::start(MlFlowOptions {
        tracking_uri: other.address.clone(),
        ..options()
    })
    .unwrap();
    let mut errors = Vec::new();
    errors.extend(moved.log(&step(3)).err());
    errors.extend(moved.finish().err());
    let [error] = &errors[..] else {
        panic!("reported once: {errors:?}")
    };
    let expected = "does not have the run run7, so a new one begins";
    assert!(error.to_string().contains(expected), "{error}");
    assert_eq!(losses(&other.runs()[0]), [(3, 8.0 / 3.0)]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "run0\n");

    fs::write(&file, "../x").unwrap();
    let error = MlFlow::start(options()).unwrap_err().to_string();
    assert!(
        error.contains("it must be a file with the ID of an MLflow run; delete it"),
        "{error}"
    );
}

#[test]
fn many_parameters_are_sent_by_hundreds() {
    let server = Server::start();
    let config = (0..250).map(|index| (format!("key{index}"), json!(index)));
    let mut tracker = MlFlow::start(MlFlowOptions {
        config: config.collect(),
        ..options(&server)
    })
    .unwrap();
    tracker.finish().unwrap();
    server.state(|state| assert_eq!(state.batches, [(0, 100), (0, 100), (0, 50)]));
    assert_eq!(server.runs()[0].params.len(), 250);
}
