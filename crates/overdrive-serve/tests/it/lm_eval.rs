//! EleutherAI's evaluation harness against the server, compared with the harness on the same model in transformers.

use std::path::Path;
use std::process::Command;

use serde_json::json;

use crate::on_python::python;
use crate::support::{NAME, TestServer, model, template, tokenizer};

#[test]
#[ignore = "needs Python with lm_eval[api], torch and transformers"]
fn lm_eval_scores_agree_with_those_of_transformers_on_python() {
    let python = python(&["lm_eval", "torch", "transformers", "aiohttp", "tenacity"]);
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
