//! The official Python client against the server.

use std::path::Path;
use std::process::Command;

use overdrive_serve::ApiKey;

use crate::on_python::python;
use crate::support::{NAME, TestServer};

#[test]
#[ignore = "needs Python with openai"]
fn openai_client_agrees_on_python() {
    let python = python(&["openai"]);
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
