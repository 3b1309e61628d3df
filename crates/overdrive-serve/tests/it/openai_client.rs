//! The official Python client against the server.

use std::path::Path;
use std::process::Command;

use overdrive_serve::ApiKey;

use crate::support::{NAME, TestServer};

#[test]
fn openai_client_agrees() {
    let python = std::env::var("OVERDRIVE_PYTHON").unwrap_or_else(|_| "python3".to_owned());
    let probe = Command::new(&python).args(["-c", "import openai"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: {python} cannot import openai; set OVERDRIVE_PYTHON to one that can");
        return;
    }
    let server = TestServer::start(|options| {
        options.api_key = Some(ApiKey::new("sk-test").unwrap());
    });
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openai_client.py");
    let output = Command::new(&python)
        .arg(script)
        .args([&format!("http://{}/v1", server.address), "sk-test", NAME])
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{printed}{errors}");
    println!("{printed}");
    assert!(
        printed.contains("all of it agrees with openai"),
        "{printed}"
    );
    server.check_empty();
}
