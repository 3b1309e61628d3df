//! EleutherAI's evaluation harness against the server, compared with the harness on the same model in transformers.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::support::{NAME, TestServer, model, template, tokenizer};

#[test]
fn lm_eval_scores_agree_with_those_of_transformers() {
    let python = std::env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let probe = Command::new(&python)
        .args([
            "-c",
            "import lm_eval, torch, transformers, aiohttp, tenacity",
        ])
        .output();
    if !probe.is_ok_and(|output| output.status.success()) {
        eprintln!(
            "SKIPPED: {python} cannot import lm_eval with its `api` extra, torch and transformers; \
             set OVERDRIVE_PYTHON to one that can"
        );
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    model()
        .save_pretrained(folder.path(), &Default::default())
        .unwrap();
    let write = |name: &str, text: String| std::fs::write(folder.path().join(name), text).unwrap();
    write("tokenizer.json", tokenizer().to_string(false).unwrap());
    let settings = json!({
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "clean_up_tokenization_spaces": false,
        "chat_template": template().source("default"),
    });
    write("tokenizer_config.json", settings.to_string());

    let server = TestServer::start(|_| {});
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/evaluation/compare.py");
    let output = Command::new(&python)
        .arg(script)
        .args([&format!("http://{}/v1", server.address), NAME])
        .arg(folder.path())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    println!("{printed}");
    assert!(
        printed.contains("all scores agree with lm_eval"),
        "{printed}"
    );
    server.check_empty();
}
