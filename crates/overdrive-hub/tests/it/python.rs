//! The cache is Python's: each side reads what the other downloaded.

use std::path::Path;
use std::process::Command;

use overdrive_hub::model_path;

use crate::on_python::python;
use crate::server::{COMMIT, Hub, NAME, weights};

/// Runs `script` with huggingface_hub and returns what it prints.
fn run(script: &str, hub: &str, cache: &Path, offline: bool) -> String {
    let output = Command::new(python(&["huggingface_hub"]))
        .args(["-c", script])
        .env("HF_ENDPOINT", hub)
        .env("HF_HUB_CACHE", cache)
        .env("HF_HOME", cache.join("home"))
        .env("HF_HUB_OFFLINE", if offline { "1" } else { "0" })
        .env("NO_PROXY", "127.0.0.1")
        .env_remove("HF_TOKEN")
        .output()
        .unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout).trim().to_owned()
}

fn hub(weights: &[u8]) -> Hub {
    Hub::new(&[("config.json", b"{}"), ("model.safetensors", weights)])
}

#[test]
#[ignore = "needs Python with huggingface_hub"]
fn python_finds_what_was_downloaded_here_on_python() {
    let weights = weights(1000);
    let (hub, folder) = (hub(&weights), tempfile::tempdir().unwrap());
    let path = model_path(NAME, &hub.options(folder.path())).unwrap();
    let script = "import huggingface_hub as h\n\
        folder = h.snapshot_download('org/name', allow_patterns=['config.json', '*.safetensors'])\n\
        file = h.hf_hub_download('org/name', 'model.safetensors')\n\
        assert file == folder + '/model.safetensors', file\n\
        repository, = h.scan_cache_dir().repos\n\
        revision, = repository.revisions\n\
        assert repository.repo_id == 'org/name' and repository.size_on_disk == 1002, repository\n\
        assert revision.refs == {'main'}, revision\n\
        print(folder)";
    let found = run(script, &hub.url, folder.path(), true);
    assert_eq!(Path::new(&found), path);
}

#[test]
#[ignore = "needs Python with huggingface_hub"]
fn what_python_downloaded_is_found_here_on_python() {
    let weights = weights(1000);
    let (hub, folder) = (hub(&weights), tempfile::tempdir().unwrap());
    let script = "import huggingface_hub as h\n\
        for name in ['config.json', 'model.safetensors']:\n    path = h.hf_hub_download('org/name', name)\n\
        print(path)";
    let found = run(script, &hub.url, folder.path(), false);
    let mut offline = hub.options(folder.path());
    offline.offline = true;
    let path = model_path(NAME, &offline).unwrap();
    assert!(path.ends_with(COMMIT));
    assert_eq!(Path::new(&found), path.join("model.safetensors"));
    assert_eq!(std::fs::read(found).unwrap(), weights);
}
