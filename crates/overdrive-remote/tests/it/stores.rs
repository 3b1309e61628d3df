//! S3 and Google Cloud Storage: signatures, keys, folders.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use overdrive_datasets::{
    Dataset, IndexLocation, IndexOptions, JsonOptions, JsonRecords, registered_source,
};
use overdrive_remote::{data_paths, open};
use serde_json::Value;

use crate::on_python::python;
use crate::records::json_lines;
use crate::server::{Server, options};

/// A server with S3's protocol: `moto`, a Python package, which compares signatures.
struct Moto {
    process: Child,
    host: String,
}

impl Moto {
    fn start() -> Moto {
        let python = python(&["moto.server"]);
        // A port that was free a moment ago.
        let port = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let process = Command::new(&python)
            .args([
                "-m",
                "moto.server",
                "-H",
                "127.0.0.1",
                "-p",
                &port.to_string(),
            ])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut moto = Moto {
            process,
            host: format!("127.0.0.1:{port}"),
        };
        let started = Instant::now();
        while TcpStream::connect(&moto.host).is_err() {
            let ended = moto.process.try_wait().unwrap();
            assert!(ended.is_none(), "moto ended: {ended:?}");
            assert!(
                started.elapsed() < Duration::from_secs(120),
                "moto does not start"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
        moto
    }

    /// Makes a user who may read S3; returns the two parts of the key.
    fn make_user(&self) -> (String, String) {
        let policy = "%7B%22Version%22%3A%222012-10-17%22%2C%22Statement%22%3A%5B%7B%22Effect%22%3A%22Allow%22%2C\
                      %22Action%22%3A%22s3%3A%2A%22%2C%22Resource%22%3A%22%2A%22%7D%5D%7D";
        let iam = |action: &str| {
            let body = format!("Action={action}&UserName=u&Version=2010-05-08");
            let (status, text) = self.send("POST", "/", body.as_bytes());
            assert_eq!(status, 200, "{text}");
            text
        };
        iam("CreateUser");
        iam(&format!(
            "PutUserPolicy&PolicyName=p&PolicyDocument={policy}"
        ));
        let text = iam("CreateAccessKey");
        let field = |name: &str| {
            let (_, after) = text.split_once(&format!("<{name}>")).unwrap();
            after.split_once('<').unwrap().0.to_owned()
        };
        (field("AccessKeyId"), field("SecretAccessKey"))
    }

    /// Turns the comparison of signatures on or off.
    fn compare_signatures(&self, on: bool) {
        let unsigned: &[u8] = if on { b"0" } else { b"inf" };
        assert_eq!(self.send("POST", "/moto-api/reset-auth", unsigned).0, 200);
    }

    /// Sends a request without a valid signature; returns the status and the body.
    fn send(&self, method: &str, path: &str, body: &[u8]) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.host).unwrap();
        // The service is known by the host, or by the scope of a signature, which is not compared at first.
        let (kind, scope) = match path {
            "/" => ("application/x-www-form-urlencoded", "iam"),
            _ => ("application/octet-stream", "s3"),
        };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: {}\r\ncontent-length: {}\r\ncontent-type: {kind}\r\nauthorization: \
             AWS4-HMAC-SHA256 Credential=x/20260101/us-east-1/{scope}/aws4_request, SignedHeaders=host, \
             Signature=x\r\nconnection: close\r\n\r\n",
            self.host,
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut reader = BufReader::new(stream);
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let status = line.split(' ').nth(1).unwrap().parse().unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        (status, text)
    }
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn records(path: PathBuf) -> JsonRecords<Value> {
    let json = JsonOptions {
        index: IndexOptions {
            location: IndexLocation::Memory,
            ..IndexOptions::default()
        },
        ..JsonOptions::default()
    };
    JsonRecords::open([path], &json).unwrap()
}

#[test]
#[ignore = "needs Python with moto[server]"]
fn objects_of_s3_are_read_with_signed_requests_on_python() {
    let moto = Moto::start();
    let lines = json_lines();
    assert_eq!(moto.send("PUT", "/bucket", b"").0, 200);
    for key in ["data/a%20b-00.jsonl", "data/a%20b-01.jsonl", "data/.hidden"] {
        assert_eq!(
            moto.send("PUT", &format!("/bucket/{key}"), lines.as_bytes())
                .0,
            200
        );
    }
    let (id, secret) = moto.make_user();
    moto.compare_signatures(true);
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    let mut set =
        |name: &str, value: &str| options.settings.insert(name.to_owned(), value.to_owned());
    set("AWS_ENDPOINT_URL", &format!("http://{}", moto.host));
    set("AWS_ACCESS_KEY_ID", &id);
    set("AWS_SECRET_ACCESS_KEY", &secret);
    set("AWS_REGION", "us-east-1");
    let path = open("s3://bucket/data/a b-01.jsonl", &options).unwrap();
    assert_eq!(path, PathBuf::from("s3://bucket/data/a b-01.jsonl"));
    let found = records(path.clone());
    assert_eq!(found.len(), 500);
    assert_eq!(found.get(321).unwrap()["id"], 321);
    let folder_paths = data_paths(&["s3://bucket/data/".into()], &options).unwrap();
    let expected = ["a b-00.jsonl", "a b-01.jsonl"]
        .map(|name| PathBuf::from(format!("s3://bucket/data/{name}")));
    assert_eq!(folder_paths, expected);
    let missing = open("s3://bucket/data/none.jsonl", &options)
        .unwrap_err()
        .to_string();
    assert!(
        missing.contains("404") && missing.contains("s3://bucket/data/none.jsonl"),
        "{missing}"
    );
    // Another object in its place.
    let source = registered_source(&path).unwrap();
    moto.compare_signatures(false);
    assert_eq!(
        moto.send("PUT", "/bucket/data/a%20b-01.jsonl", b"{}\n").0,
        200
    );
    moto.compare_signatures(true);
    assert!(matches!(
        source.check_unchanged(),
        Err(overdrive_datasets::Error::FileChanged { .. })
    ));
    // A wrong key, whose signature does not fit.
    let wrong = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";
    options
        .settings
        .insert("AWS_SECRET_ACCESS_KEY".to_owned(), wrong.to_owned());
    let refused = open("s3://bucket/data/a b-00.jsonl", &options).unwrap_err();
    let text = format!("{refused} {refused:?}");
    assert!(
        text.contains("status 403") && text.contains("AWS_SECRET_ACCESS_KEY"),
        "{text}"
    );
    assert!(!text.contains("wJalr") && !text.contains(&secret), "{text}");
}

#[test]
fn objects_of_google_cloud_storage_are_read_from_its_endpoint() {
    let lines = json_lines();
    let server = Server::new(&[("bucket/folder/a.jsonl", lines.as_bytes())]);
    let folder = tempfile::tempdir().unwrap();
    let mut options = options(folder.path());
    let mut set =
        |name: &str, value: &str| options.settings.insert(name.to_owned(), value.to_owned());
    set("GOOGLE_BASE_URL", &format!("http://{}", server.host));
    set("GOOGLE_SKIP_SIGNATURE", "true");
    let path = open("gs://bucket/folder/a.jsonl", &options).unwrap();
    let found = records(path);
    assert_eq!(found.len(), 500);
    assert_eq!(found.get(499).unwrap()["id"], 499);
    let requests = server.requests();
    assert!(requests.iter().all(|request| request.method == "GET"));
    assert!(
        requests
            .iter()
            .all(|request| !request.headers.contains_key("authorization"))
    );
}
