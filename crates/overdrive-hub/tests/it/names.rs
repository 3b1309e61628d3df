//! From a name to the files.

use std::fs;

use overdrive_hub::{Error, adapter_path, model_path, tokenizer_path};

use crate::server::{COMMIT, Hub, NAME, Reply, git_hash, sha256, weights};

const CONFIG: &[u8] = b"{\"model_type\": \"llama\"}";

#[test]
fn a_model_is_downloaded_once_and_only_what_it_needs() {
    let weights = weights(1000);
    let hub = Hub::new(&[
        ("README.md", b"text"),
        ("config.json", CONFIG),
        ("model.safetensors", &weights),
        ("pytorch_model.bin", b"the same once more"),
        ("tokenizer.json", b"{}"),
        ("additional_chat_templates/rag.jinja", b"{{ messages }}"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    let cache = folder.path().join("models--org--name");
    assert_eq!(path, cache.join("snapshots").join(COMMIT));
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
    assert_eq!(fs::read(path.join("config.json")).unwrap(), CONFIG);
    let template = path.join("additional_chat_templates/rag.jinja");
    assert_eq!(fs::read(template).unwrap(), b"{{ messages }}");
    assert!(!path.join("README.md").exists() && !path.join("pytorch_model.bin").exists());

    // The layout that Python's huggingface_hub reads.
    assert_eq!(fs::read_to_string(cache.join("refs/main")).unwrap(), COMMIT);
    let link = |name: &str| {
        fs::read_link(path.join(name))
            .unwrap()
            .display()
            .to_string()
    };
    assert_eq!(
        link("model.safetensors"),
        format!("../../blobs/{}", sha256(&weights))
    );
    assert_eq!(
        link("config.json"),
        format!("../../blobs/{}", git_hash(CONFIG))
    );
    let template = link("additional_chat_templates/rag.jinja");
    assert!(template.starts_with("../../../blobs/"), "{template}");
    assert_eq!(fs::read_dir(cache.join("blobs")).unwrap().count(), 4);

    // The token goes to the hub, not to the server that it redirects to.
    let requests = hub.requests();
    assert!(requests.iter().any(|request| request.cdn));
    for request in &requests {
        let token = request.header("authorization");
        let expected = (!request.cdn).then_some("Bearer hf_secret");
        assert_eq!(token, expected, "{request:?}");
    }

    // The second time only the commit is asked for; with the commit, nothing.
    assert_eq!(model_path(NAME, &hub.options(folder.path())).unwrap(), path);
    assert_eq!(hub.requests().len(), 1);
    let pinned = format!("{NAME}@{COMMIT}");
    assert_eq!(
        model_path(&pinned, &hub.options(folder.path())).unwrap(),
        path
    );
    assert_eq!(hub.requests().len(), 0);
}

#[test]
fn a_tokenizer_is_downloaded_without_weights_and_the_model_is_completed_later() {
    let weights = weights(1000);
    let hub = Hub::new(&[
        ("config.json", CONFIG),
        ("model.safetensors", &weights),
        ("tokenizer.json", b"{}"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let options = hub.options(folder.path());
    let path = tokenizer_path(NAME, &options).unwrap();
    assert_eq!(fs::read(path.join("tokenizer.json")).unwrap(), b"{}");
    assert!(!path.join("model.safetensors").exists());
    let path = model_path(NAME, &options).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), weights);
}

#[test]
fn progress_counts_the_bytes_of_all_files() {
    use std::sync::{Arc, Mutex};
    let weights = weights(1000);
    let hub = Hub::new(&[("config.json", CONFIG), ("model.safetensors", &weights)]);
    let folder = tempfile::tempdir().unwrap();
    let mut options = hub.options(folder.path());
    let seen = Arc::new(Mutex::new(Vec::new()));
    let shown = Arc::clone(&seen);
    let report = move |done, all| shown.lock().unwrap().push((done, all));
    options.progress = Some(overdrive_hub::DownloadProgress::new(report));
    model_path(NAME, &options).unwrap();
    let (seen, all) = (seen.lock().unwrap(), (1000 + CONFIG.len()) as u64);
    assert!(seen.is_sorted(), "{seen:?}");
    assert!(seen.iter().all(|(_, total)| *total == all));
    assert_eq!(seen.last(), Some(&(all, all)));
}

#[test]
fn shards_are_those_of_the_index() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let hub = Hub::new(&[
        ("config.json", CONFIG),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"one"),
        ("model-2.safetensors", b"two"),
        ("model-3.safetensors", b"not in the index"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    assert_eq!(fs::read(path.join("model-2.safetensors")).unwrap(), b"two");
    assert!(!path.join("model-3.safetensors").exists());
}

#[test]
fn gguf_files_are_found_by_quantization_and_by_name() {
    let hub = Hub::new(&[
        ("m-Q4_K_M.gguf", b"small"),
        ("m-Q8_0-00001-of-00002.gguf", b"first"),
        ("m-Q8_0-00002-of-00002.gguf", b"second"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let options = hub.options(folder.path());
    let path = model_path("org/name:q8_0", &options).unwrap();
    assert!(path.ends_with("m-Q8_0-00001-of-00002.gguf"), "{path:?}");
    assert_eq!(
        fs::read(path.with_file_name("m-Q8_0-00002-of-00002.gguf")).unwrap(),
        b"second"
    );
    for name in ["org/name", "org/name:Q4_K_M@v1", "org/name/m-Q4_K_M.gguf"] {
        let path = model_path(name, &options).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"small", "{name}");
    }
    let error = model_path("org/name:Q5_0", &options)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("Q5_0") && error.contains("m-Q4_K_M.gguf"),
        "{error}"
    );
}

#[test]
fn adapters_have_their_own_files() {
    let hub = Hub::new(&[
        ("adapter_config.json", b"{}"),
        ("adapter_model.safetensors", b"a"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let options = hub.options(folder.path());
    let error = model_path(NAME, &options).unwrap_err().to_string();
    assert!(error.contains("--adapter"), "{error}");
    let path = adapter_path(NAME, &options).unwrap();
    assert!(path.join("adapter_config.json").exists());
    assert_eq!(
        fs::read(path.join("adapter_model.safetensors")).unwrap(),
        b"a"
    );
}

#[test]
fn a_local_path_wins_and_one_that_is_missing_is_named_with_both_readings() {
    let hub = Hub::new(&[]);
    let folder = tempfile::tempdir().unwrap();
    let options = hub.options(folder.path());
    assert_eq!(model_path(folder.path(), &options).unwrap(), folder.path());
    for name in [
        "runs/tiny/model",
        "./model",
        "/nowhere/at/all",
        "model.gguf",
    ] {
        let error = model_path(name, &options).unwrap_err();
        assert!(matches!(error, Error::NoSuchPath { .. }), "{error:?}");
        let error = error.to_string();
        assert!(
            error.contains(name) && error.contains("on this machine"),
            "{error}"
        );
        assert!(error.contains("ORG/NAME"), "{error}");
    }
    assert!(hub.requests().is_empty(), "no path is sent to the hub");
    let error = model_path("runs/tiny", &options).unwrap_err().to_string();
    assert!(
        error.contains("`runs/tiny` is not a file or folder"),
        "{error}"
    );
    assert!(
        error.contains(&hub.url) && error.contains("HF_TOKEN"),
        "{error}"
    );
}

#[test]
fn what_the_hub_refuses_is_explained() {
    type Case = (
        u16,
        &'static str,
        &'static str,
        Option<&'static str>,
        &'static [&'static str],
    );
    let cases: [Case; 6] = [
        (
            401,
            "GatedRepo",
            "",
            None,
            &["without a token", "accept its conditions", "HF_TOKEN"],
        ),
        (
            403,
            "",
            "",
            Some("hf_a"),
            &["account of this token", "accept its conditions"],
        ),
        (
            401,
            "",
            "Invalid credentials in Authorization header",
            Some("hf_a"),
            &["does not accept the token"],
        ),
        (
            404,
            "RepoNotFound",
            "",
            None,
            &["no repository of this name", "org/name"],
        ),
        (404, "RevisionNotFound", "", None, &["no revision `main`"]),
        (500, "", "on fire", None, &["status 500: on fire"]),
    ];
    for (status, code, message, token, expected) in cases {
        let hub = Hub::with_faults(&[], move |_, _| {
            Reply::status(status)
                .with("X-Error-Code", code)
                .with("X-Error-Message", message)
        });
        let folder = tempfile::tempdir().unwrap();
        let mut options = hub.options(folder.path());
        options.token = token.map(str::to_owned);
        let error = model_path(NAME, &options).unwrap_err().to_string();
        for part in expected {
            assert!(error.contains(part), "{status} {code}: {error}");
        }
        assert!(!error.contains("hf_a"), "{error}");
    }
    let hub = Hub::new(&[("config.json", CONFIG)]);
    let folder = tempfile::tempdir().unwrap();
    let error = model_path("org/name@v9", &hub.options(folder.path()))
        .unwrap_err()
        .to_string();
    assert!(error.contains("no revision `v9`"), "{error}");
    let error = model_path(NAME, &hub.options(folder.path()))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("model.safetensors") && error.contains("it has config.json"),
        "{error}"
    );
}

#[test]
fn a_renamed_repository_is_followed() {
    let hub = Hub::with_faults(
        &[("config.json", CONFIG), ("model.safetensors", b"w")],
        |request, reply| match request.path.strip_prefix("/api/models/old/") {
            Some(rest) => Reply::status(307).with("Location", format!("/api/models/{NAME}/{rest}")),
            None => match request.path.strip_prefix("/old/") {
                Some(rest) => Reply::status(307).with("Location", format!("/{NAME}/{rest}")),
                None => reply,
            },
        },
    );
    let folder = tempfile::tempdir().unwrap();
    let path = model_path("old", &hub.options(folder.path())).unwrap();
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), b"w");
}
