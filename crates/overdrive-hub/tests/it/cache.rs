//! The cache without the hub.

use std::fs;

use overdrive_hub::{Error, model_path};

use crate::server::{COMMIT, Hub, NAME};

#[test]
fn offline_the_cache_answers_or_the_error_says_what_is_missing() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let hub = Hub::new(&[
        ("config.json", b"{}"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", b"one"),
        ("model-2.safetensors", b"two"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let mut offline = hub.options(folder.path());
    offline.offline = true;
    let error = model_path(NAME, &offline).unwrap_err();
    assert!(matches!(error, Error::Offline { .. }), "{error:?}");
    let error = error.to_string();
    assert!(
        error.contains("HF_HUB_OFFLINE") && error.contains(NAME),
        "{error}"
    );
    assert!(hub.requests().is_empty());

    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    hub.requests();
    assert_eq!(model_path(NAME, &offline).unwrap(), path);
    assert_eq!(
        model_path(format!("{NAME}@{COMMIT}"), &offline).unwrap(),
        path
    );
    assert!(model_path(format!("{NAME}@v1"), &offline).is_err());
    assert!(hub.requests().is_empty());

    // A shard whose content is gone is missing, though its name is there.
    let blob = fs::canonicalize(path.join("model-2.safetensors")).unwrap();
    fs::remove_file(blob).unwrap();
    let error = model_path(NAME, &offline).unwrap_err().to_string();
    assert!(
        error.contains("model-2.safetensors is not in the cache"),
        "{error}"
    );
    // The hub has it, and only it is downloaded.
    model_path(NAME, &hub.options(folder.path())).unwrap();
    assert_eq!(fs::read(path.join("model-2.safetensors")).unwrap(), b"two");
    assert_eq!(
        hub.requests().iter().filter(|request| request.cdn).count(),
        1
    );
}

#[test]
fn a_content_that_another_commit_has_is_not_downloaded_again() {
    let hub = Hub::new(&[("config.json", b"{}"), ("model.safetensors", b"w")]);
    let folder = tempfile::tempdir().unwrap();
    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    fs::remove_dir_all(&path).unwrap();
    hub.requests();
    assert_eq!(model_path(NAME, &hub.options(folder.path())).unwrap(), path);
    assert_eq!(fs::read(path.join("model.safetensors")).unwrap(), b"w");
    assert!(
        !hub.requests()
            .iter()
            .any(|request| request.method == "GET" && !request.path.contains("/api/"))
    );
}

#[test]
fn a_pinned_snapshot_that_python_began_is_completed() {
    let hub = Hub::new(&[("config.json", b"{}"), ("model.safetensors", b"w")]);
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder
        .path()
        .join("models--org--name/snapshots")
        .join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("model.safetensors"), b"w").unwrap();
    let pinned = format!("{NAME}@{COMMIT}");
    // Without the hub, what is there has to do.
    let mut offline = hub.options(folder.path());
    offline.offline = true;
    assert_eq!(model_path(&pinned, &offline).unwrap(), snapshot);
    let options = hub.options(folder.path());
    assert_eq!(model_path(&pinned, &options).unwrap(), snapshot);
    assert_eq!(fs::read(snapshot.join("config.json")).unwrap(), b"{}");
    hub.requests();
    assert_eq!(model_path(&pinned, &options).unwrap(), snapshot);
    assert!(hub.requests().is_empty());
}
