//! Tests of adapters that requests choose by the name of the model.

use std::path::Path;

use overdrive_generation::GenerationConfig;
use overdrive_lora::{
    AddOptions, InitLoraWeights, LoadAdapterOptions, LoraConfig, TargetModules, add_adapter,
    load_adapter, load_adapter_for_rows, save_adapter,
};
use overdrive_transformer::CausalLm;
use serde_json::json;

use crate::client::{get, post};
use crate::evaluation::check;
use crate::support::{NAME, TestServer, alone_with, defaults, encode, model};

const ADAPTERS: [&str; 2] = ["french", "pirate"];

/// Writes the adapters into folders of their names.
fn write(root: &Path) {
    for (seed, name) in (1..).zip(ADAPTERS) {
        let mut model = model();
        let config = LoraConfig {
            r: 4,
            lora_alpha: 16.0,
            target_modules: Some(TargetModules::AllLinear),
            // The usual one changes nothing before it has been trained.
            init_lora_weights: InitLoraWeights::Random,
            ..LoraConfig::default()
        };
        let options = AddOptions {
            seed,
            ..AddOptions::default()
        };
        add_adapter(&mut model, name, &config, &options).unwrap();
        save_adapter(&mut model, root.join(name), name).unwrap();
    }
}

fn server(root: &Path) -> TestServer {
    let mut model = model();
    for name in ADAPTERS {
        load_adapter_for_rows(&mut model, root.join(name), name, &Default::default()).unwrap();
    }
    TestServer::over(model)
}

/// Returns the model with one adapter alone, or with none.
fn model_with(root: &Path, name: &str) -> CausalLm {
    let mut model = model();
    if name != NAME {
        let options = LoadAdapterOptions::default();
        load_adapter(&mut model, root.join(name), name, &options).unwrap();
    }
    model
}

#[test]
fn log_probabilities_of_a_prompt_are_those_of_its_adapter() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let server = server(folder.path());
    for name in [NAME, ADAPTERS[0], ADAPTERS[1], NAME] {
        let body = json!({"model": name, "prompt": "the same prompt", "max_tokens": 1, "logprobs": 1, "echo": true,
            "temperature": 0});
        let answer = post(server.address, "/v1/completions", &body).json();
        let model = model_with(folder.path(), name);
        check(
            &model,
            &answer["choices"][0]["logprobs"],
            &encode("the same prompt"),
            1,
        );
    }
}

#[test]
fn clients_of_several_adapters_at_once_get_the_answers_of_each_alone() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let server = server(folder.path());
    let answers = std::thread::scope(|scope| {
        let client = |number: usize| {
            let (address, root) = (server.address, folder.path());
            move || {
                let name = [NAME, ADAPTERS[0], ADAPTERS[1]][number % 3];
                // Clients of several adapters have the same prompt: they must not share its blocks.
                let prompt = format!("this is the story of number {}", number / 6);
                let body = json!({
                    "model": name, "prompt": prompt, "max_tokens": 24, "seed": number, "temperature": 0.8,
                });
                let answer = post(address, "/v1/completions", &body).json();
                assert_eq!(answer["model"], name);
                let config = GenerationConfig {
                    temperature: 0.8,
                    max_new_tokens: Some(24),
                    seed: Some(number as u64),
                    ..defaults()
                };
                let model = model_with(root, name);
                let alone = alone_with(&model, &encode(&prompt), config.clone());
                assert_eq!(answer["choices"][0]["text"], alone.texts[0], "{body}");
                let base = alone_with(&crate::support::model(), &encode(&prompt), config);
                (name, alone.texts[0] == base.texts[0])
            }
        };
        let clients: Vec<_> = (0..18).map(|number| scope.spawn(client(number))).collect();
        let join = |client: std::thread::ScopedJoinHandle<'_, _>| client.join().unwrap();
        clients.into_iter().map(join).collect::<Vec<_>>()
    });
    let differ = |(name, same): &(&str, bool)| (*name == NAME) == *same;
    assert!(
        answers.iter().all(differ),
        "an adapter changes nothing: {answers:?}"
    );
    server.check_empty();
}

#[test]
fn adapters_are_listed_with_their_parent() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let server = server(folder.path());
    let list = get(server.address, "/v1/models").json();
    let card = |index: usize| {
        let card = &list["data"][index];
        (card["id"].clone(), card["parent"].clone())
    };
    assert_eq!(card(0), (json!(NAME), json!(null)));
    assert_eq!(card(1), (json!("french"), json!(NAME)));
    assert_eq!(card(2), (json!("pirate"), json!(NAME)));
    let one = get(server.address, "/v1/models/pirate").json();
    assert_eq!(one, list["data"][2]);
    let body = json!({"model": "german", "prompt": "a"});
    let error = post(server.address, "/v1/completions", &body).error(404);
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("\"french\"") && message.contains(NAME),
        "{message}"
    );
}

#[test]
fn chats_and_embeddings_have_adapters_too() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let server = server(folder.path());
    let chat = |name: &str| {
        let messages = json!([{"role": "user", "content": "hello"}]);
        let body = json!({"model": name, "messages": messages, "max_tokens": 16, "temperature": 0});
        let answer = post(server.address, "/v1/chat/completions", &body).json();
        assert_eq!(answer["model"], name);
        answer["choices"][0]["message"]["content"].clone()
    };
    assert_ne!(chat("french"), chat(NAME));
    assert_ne!(chat("french"), chat("pirate"));
    let embedding = |name: &str| {
        let body = json!({"model": name, "input": "hello"});
        let answer = post(server.address, "/v1/embeddings", &body).json();
        assert_eq!(answer["model"], name);
        answer["data"][0]["embedding"].clone()
    };
    assert_ne!(embedding("french"), embedding(NAME));
    assert_ne!(embedding("french"), embedding("pirate"));
}
