//! Many mixed requests of clients that may vanish: answers equal single runs, and no block is lost.

use std::io::Read;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use overdrive_core::random::Generator;
use overdrive_generation::GenerationConfig;
use serde_json::{Value, json};

use crate::client::{metric, post, receive, send};
use crate::support::{TestServer, alone, chat_prompt, defaults, encode, template, wait};

const CLIENTS: u64 = 8;

/// A request, and the texts of its choices as a single run gives them.
struct Case {
    path: &'static str,
    body: Value,
    texts: Vec<String>,
}

fn case(number: u64) -> Case {
    let mut random = Generator::new(number, 1);
    // Prefixes that several cases share, and long prompts beside short ones.
    let text = ["tell me ", "tell me more about this, ", ""][random.below(3) as usize].to_owned()
        + &"word ".repeat(1 + random.below(12) as usize)
        + &number.to_string();
    let n = if random.below(5) == 0 { 3 } else { 1 };
    let temperature = if n == 1 && random.below(3) == 0 {
        0.0
    } else {
        1.1
    };
    let new = 1 + random.below(40) as usize;
    let stops = if random.below(4) == 0 {
        vec!["e".to_owned(), "a".to_owned()]
    } else {
        vec![]
    };
    let config = GenerationConfig {
        max_new_tokens: Some(new),
        seed: Some(number),
        temperature,
        stop_strings: stops.clone(),
        num_return_sequences: n,
        ..defaults()
    };
    let mut body = json!({
        "max_tokens": new, "seed": number, "temperature": temperature, "n": n, "stop": stops,
    });
    let is_chat = random.below(2) == 0;
    let (path, prompt) = if is_chat {
        body["messages"] = json!([{"role": "user", "content": text}]);
        ("/v1/chat/completions", chat_prompt(&text))
    } else {
        body["prompt"] = text.as_str().into();
        ("/v1/completions", encode(&text))
    };
    Case {
        path,
        body,
        texts: alone(&prompt, config).texts,
    }
}

/// Returns the texts of an answer's choices, whole or streamed.
fn texts(case: &Case, address: SocketAddr, stream: bool) -> Vec<String> {
    let mut body = case.body.clone();
    body["stream"] = stream.into();
    let answer = post(address, case.path, &body);
    let part = |choice: &Value| {
        let text = ["/text", "/message/content", "/delta/content"]
            .iter()
            .find_map(|path| choice.pointer(path));
        text.and_then(Value::as_str).unwrap_or_default().to_owned()
    };
    if !stream {
        assert_eq!(answer.status, 200, "{answer:?}");
        return answer.json()["choices"]
            .as_array()
            .unwrap()
            .iter()
            .map(part)
            .collect();
    }
    let mut texts = vec![String::new(); case.texts.len()];
    for event in answer.events() {
        for choice in event["choices"].as_array().unwrap() {
            texts[choice["index"].as_u64().unwrap() as usize].push_str(&part(choice));
        }
    }
    texts
}

fn soak(requests: u64) {
    let cases: Vec<Case> = (0..48).map(case).collect();
    let server = TestServer::with(
        |_| {},
        |engine| {
            // Too few for all, so that sequences wait and are preempted.
            engine.num_blocks = Some(72);
            engine.max_num_seqs = 8;
        },
        Some(template()),
    );
    let address = server.address;
    let [compared, vanished, refused] = [const { AtomicU64::new(0) }; 3];
    std::thread::scope(|scope| {
        for client in 0..CLIENTS {
            let (cases, compared, vanished, refused) = (&cases, &compared, &vanished, &refused);
            scope.spawn(move || {
                let mut random = Generator::new(client, 2);
                for _ in 0..requests / CLIENTS {
                    let case = &cases[random.below(cases.len() as u64) as usize];
                    match random.below(10) {
                        0 => {
                            // Gone before the answer.
                            drop(send(
                                address,
                                "POST",
                                case.path,
                                &[],
                                case.body.to_string().as_bytes(),
                            ));
                            vanished.fetch_add(1, Ordering::Relaxed);
                        }
                        1 => {
                            // Gone in the middle of a stream.
                            let mut body = case.body.clone();
                            body["stream"] = true.into();
                            let mut stream =
                                send(address, "POST", case.path, &[], body.to_string().as_bytes());
                            let mut some = vec![0; 1 + random.below(2000) as usize];
                            let _cut = stream.read(&mut some).unwrap();
                            vanished.fetch_add(1, Ordering::Relaxed);
                        }
                        2 => {
                            let wrong = match random.below(4) {
                                0 => json!({"model": "other", "prompt": "a"}),
                                1 => json!({"prompt": "x".repeat(600)}),
                                2 => json!({"prompt": [1, 260]}),
                                _ => json!({"prompt": "a", "n": 1000}),
                            };
                            let answer = receive(send(
                                address,
                                "POST",
                                "/v1/completions",
                                &[],
                                wrong.to_string().as_bytes(),
                            ));
                            assert!([400, 404].contains(&answer.status), "{answer:?}");
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        other => {
                            assert_eq!(
                                texts(case, address, other % 2 == 0),
                                case.texts,
                                "{}",
                                case.body
                            );
                            compared.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    server.check_empty();
    let count = |name: &str| metric(address, name);
    // A client that is gone early may be seen before or after its request reaches the engine.
    wait("the counters", || count("sequences_waiting") == 0.0);
    let [compared, vanished, refused] = [compared, vanished, refused].map(|n| n.into_inner());
    println!(
        "{compared} answers equal single runs, {vanished} clients vanished, {refused} requests were refused; {} requests \
         of the engine finished, {} were cancelled; {} preemptions, {} tokens reused",
        count("requests_finished_total"),
        count("requests_cancelled_total"),
        count("preemptions_total"),
        count("reused_tokens_total"),
    );
    assert!(compared + vanished + refused >= requests - CLIENTS && compared > requests / 2);
    let (finished, cancelled) = (
        count("requests_finished_total"),
        count("requests_cancelled_total"),
    );
    assert_eq!(count("requests_failed_total"), 0.0);
    assert!(finished >= compared as f64 && finished + cancelled <= (compared + vanished) as f64);
    assert!(count("reused_tokens_total") > 0.0);
}

#[test]
fn mixed_requests_of_clients_that_vanish_lose_nothing() {
    soak(400);
}

#[test]
#[ignore = "takes half a minute: cargo test -p overdrive-serve --test it -- --ignored ten_thousand"]
fn ten_thousand_mixed_requests_lose_nothing() {
    soak(10_000);
}
