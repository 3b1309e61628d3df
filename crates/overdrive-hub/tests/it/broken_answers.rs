//! Servers that break off, lie and do not answer.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use overdrive_hub::{Error, model_path};

use crate::server::{COMMIT, Hub, NAME, Reply, Request, WEIGHTS, sha256, weights};

const CONFIG: &[u8] = b"{}";

fn hub(weights: &[u8], fault: impl FnMut(&Request, Reply) -> Reply + Send + 'static) -> Hub {
    Hub::with_faults(
        &[("config.json", CONFIG), ("model.safetensors", weights)],
        fault,
    )
}

/// Returns the values of `Range` in the requests for contents.
fn ranges(hub: &Hub) -> Vec<Option<String>> {
    let requests = hub.requests();
    let contents = requests.iter().filter(|request| request.cdn);
    contents
        .map(|request| request.header("range").map(str::to_owned))
        .collect()
}

fn blobs(folder: &Path) -> Vec<String> {
    let blobs = fs::read_dir(folder.join("models--org--name/blobs")).unwrap();
    let names = blobs.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.len() >= 64).collect();
    names.sort();
    names
}

#[test]
fn an_interrupted_download_is_resumed() {
    let weights = weights(WEIGHTS);
    let mut cuts = 0;
    let hub = hub(&weights, move |request, mut reply| {
        if request.cdn && cuts < 4 {
            cuts += 1;
            reply.cut = Some(500_000);
        }
        reply
    });
    let folder = tempfile::tempdir().unwrap();
    // Two repetitions would not be enough for four faults, but each attempt made progress.
    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
    let expected = [0, 500_000, 1_000_000, 1_500_000, 2_000_000];
    let expected = expected.map(|from| (from > 0).then(|| format!("bytes={from}-")));
    assert_eq!(ranges(&hub), expected);
}

#[test]
fn the_next_run_resumes_and_a_reader_never_finds_half_a_file() {
    let weights = weights(WEIGHTS);
    let mut broken = true;
    let hub = hub(&weights, move |request, mut reply| {
        if request.cdn && broken {
            broken = false;
            reply.cut = Some(1_000_000);
        }
        reply
    });
    let folder = tempfile::tempdir().unwrap();
    let mut options = hub.options(folder.path());
    options.retries = 0;
    let error = model_path(NAME, &options).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error:?}");
    assert!(
        error
            .to_string()
            .contains("after 1000000 bytes of model.safetensors"),
        "{error}"
    );
    let snapshot = folder
        .path()
        .join("models--org--name/snapshots")
        .join(COMMIT);
    assert!(!snapshot.join("model.safetensors").exists());
    assert_eq!(
        blobs(folder.path()),
        [format!("{}.incomplete", sha256(&weights))]
    );
    hub.requests();
    let path = model_path(NAME, &options).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
    assert_eq!(ranges(&hub), [Some("bytes=1000000-".to_owned())]);
    assert_eq!(blobs(folder.path()), [sha256(&weights)]);
}

#[test]
fn a_server_without_ranges_sends_the_file_again() {
    let weights = weights(WEIGHTS);
    let (whole, mut first) = (weights.clone(), true);
    let hub = hub(&weights, move |request, mut reply| {
        if request.cdn {
            reply = Reply::status(200).body(whole.clone());
            reply.cut = std::mem::take(&mut first).then_some(700_000);
        }
        reply
    });
    let folder = tempfile::tempdir().unwrap();
    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn another_part_than_the_one_asked_for_is_not_appended() {
    let weights = weights(WEIGHTS);
    let mut answers = 0;
    let hub = hub(&weights, move |request, mut reply| {
        if request.cdn {
            answers += 1;
            reply.cut = (answers == 1).then_some(700_000);
            if answers == 2 {
                reply = reply
                    .without("Content-Range")
                    .with("Content-Range", "bytes 5-9/10");
            }
        }
        reply
    });
    let folder = tempfile::tempdir().unwrap();
    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn a_wrong_beginning_of_another_process_is_replaced() {
    let weights = weights(WEIGHTS);
    // As long as the file, longer, and shorter.
    for length in [WEIGHTS, WEIGHTS + 7, 1000] {
        let hub = hub(&weights, |_, reply| reply);
        let folder = tempfile::tempdir().unwrap();
        let blobs = folder.path().join("models--org--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        let partial = blobs.join(format!("{}.incomplete", sha256(&weights)));
        fs::write(partial, vec![7; length]).unwrap();
        let path = model_path(NAME, &hub.options(folder.path())).unwrap();
        assert_eq!(
            fs::read(path.join("model.safetensors")).unwrap(),
            weights,
            "{length}"
        );
    }
}

#[test]
fn contents_that_are_not_the_hubs_are_refused_and_deleted() {
    type Lie = fn(Reply) -> Reply;
    let cases: [(&str, Lie, &str); 4] = [
        (
            "model.safetensors",
            |reply| reply.body(vec![7; 1000]),
            "SHA-256",
        ),
        (
            "model.safetensors",
            |reply| reply.body(vec![7; 999]),
            "999 bytes",
        ),
        (
            "model.safetensors",
            |reply| {
                reply
                    .body(vec![7; 1001])
                    .with("Transfer-Encoding", "chunked")
            },
            "longer than 1000 bytes",
        ),
        ("config.json", |reply| reply.body("[]"), "Git hash"),
    ];
    let weights = weights(1000);
    for (file, lie, reason) in cases {
        let hub = hub(&weights, move |request, reply| {
            let content = request.cdn || request.is("GET", "config.json");
            let lies = content && request.cdn == (file == "model.safetensors");
            if lies { lie(reply) } else { reply }
        });
        let folder = tempfile::tempdir().unwrap();
        let error = model_path(NAME, &hub.options(folder.path())).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{error:?}");
        let message = error.to_string();
        assert!(
            message.contains(file) && message.contains(reason),
            "{message}"
        );
        let snapshot = folder
            .path()
            .join("models--org--name/snapshots")
            .join(COMMIT);
        assert!(!snapshot.join(file).exists());
        assert!(blobs(folder.path()).is_empty());
    }
}

#[test]
fn errors_that_pass_are_waited_for() {
    let weights = weights(1000);
    let mut failures = 0;
    let hub = hub(&weights, move |_, reply| {
        failures += 1;
        match failures {
            1 => Reply::status(503),
            2 => Reply::status(429).with("Retry-After", "0"),
            _ => reply,
        }
    });
    let folder = tempfile::tempdir().unwrap();
    assert!(model_path(NAME, &hub.options(folder.path())).is_ok());
}

#[test]
fn a_hub_that_does_not_answer_ends_in_an_error_or_in_the_cache() {
    let weights = weights(1000);
    let silent = Arc::new(AtomicUsize::new(1));
    let state = Arc::clone(&silent);
    let hub = hub(&weights, move |_, mut reply| {
        reply.silent = state.load(Ordering::SeqCst) == 1;
        reply
    });
    let folder = tempfile::tempdir().unwrap();
    let mut impatient = hub.options(folder.path());
    impatient.etag_timeout = Duration::from_millis(100);
    impatient.retries = 0;
    let error = model_path(NAME, &impatient).unwrap_err();
    assert!(matches!(error, Error::UnreachableName { .. }), "{error:?}");
    let error = error.to_string();
    assert!(
        error.starts_with(&format!(
            "`{NAME}` does not exist on this machine, and the hub cannot be asked for this name: "
        )),
        "{error}"
    );
    assert!(error.contains("HF_ENDPOINT"), "{error}");
    // Once it was downloaded, the copy serves.
    silent.store(0, Ordering::SeqCst);
    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    silent.store(1, Ordering::SeqCst);
    assert_eq!(model_path(NAME, &impatient).unwrap(), path);
    // And where nobody listens.
    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let mut nobody = hub.options(folder.path());
    nobody.endpoint = format!("http://{free}");
    assert_eq!(model_path(NAME, &nobody).unwrap(), path);
    let error = model_path("org/other", &nobody).unwrap_err().to_string();
    assert!(
        error.contains(&nobody.endpoint) && error.contains("HF_ENDPOINT"),
        "{error}"
    );
}

#[test]
fn answers_cannot_leave_the_cache() {
    let outside = [
        ("/siblings", "../../../evil.gguf"),
        ("/etag", "../../evil"),
        ("/commit", "../../../../evil"),
    ];
    for (place, name) in outside {
        let hub = Hub::with_faults(
            &[("config.json", CONFIG), ("model.safetensors", b"w")],
            move |request, reply| {
                let listing = request.path.contains("/revision/");
                match place {
                    "/siblings" if listing => Reply::status(200).body(format!(
                        r#"{{"sha": "{COMMIT}", "siblings": [{{"rfilename": "{name}"}}]}}"#
                    )),
                    "/commit" if listing => {
                        Reply::status(200).body(format!(r#"{{"sha": "{name}", "siblings": []}}"#))
                    }
                    "/etag" if request.method == "HEAD" => {
                        Reply::status(200).with("ETag", format!("\"{name}\""))
                    }
                    _ => reply,
                }
            },
        );
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("a/b/c/d/cache");
        let error = model_path(NAME, &hub.options(&cache)).unwrap_err();
        assert!(
            matches!(error, Error::Protocol { .. } | Error::NoFile { .. }),
            "{place}: {error:?}"
        );
        assert!(
            !folder.path().join("a/evil").exists()
                && !folder.path().join("a/b/c/d/evil.gguf").exists()
        );
    }
    let index = br#"{"weight_map": {"w": "../../../../evil.safetensors"}}"#;
    let hub = Hub::new(&[
        ("config.json", CONFIG),
        ("model.safetensors.index.json", index),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let error = model_path(NAME, &hub.options(folder.path()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("weight_map"), "{error}");
    let html = Hub::with_faults(&[], |_, _| Reply::status(200).body("<html>log in</html>"));
    let error = model_path(NAME, &html.options(folder.path())).unwrap_err();
    assert!(matches!(error, Error::Protocol { .. }), "{error:?}");
}

#[test]
fn two_that_want_the_same_file_download_it_once() {
    let weights = weights(WEIGHTS);
    let hub = hub(&weights, |_, reply| reply);
    let folder = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let path = model_path(NAME, &hub.options(folder.path())).unwrap();
                assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
            });
        }
    });
    assert_eq!(ranges(&hub), [None]);
}
