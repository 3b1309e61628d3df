//! Servers of embeddings and of scores, against sentence-transformers and the model card of Qwen3-Reranker: the folders of
//! overdrive-transformer's `gen_embeddings.py`. Tolerance 1e-5, as there.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use overdrive_generation::ModelFiles;
use overdrive_serve::{Error, PoolingModel};
use overdrive_transformer::{LoadOptions, PoolingTask};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::client::{get, metric, post};
use crate::support::{NAME, TestServer};

const TOLERANCE: f64 = 1e-5;

fn fixture(case: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("../overdrive-transformer/tests/fixtures")
        .join(case);
    assert!(
        folder.is_dir(),
        "make the fixtures: python3 crates/overdrive-transformer/tests/fixtures/gen_embeddings.py"
    );
    folder
}

fn server(case: &str, task: PoolingTask) -> TestServer {
    server_of(&fixture(case), task)
}

/// Starts a server of a folder or a GGUF file.
fn server_of(folder: &Path, task: PoolingTask) -> TestServer {
    let tokenizer = ModelFiles::open(folder).unwrap().tokenizer().unwrap();
    let (tokenizer, options) = (Arc::new(tokenizer), LoadOptions::default());
    let model = PoolingModel::from_pretrained(folder, task, tokenizer, &options).unwrap();
    TestServer::pooling(model)
}

fn embeddings(case: &str) -> TestServer {
    let task = PoolingTask::of(fixture(case)).unwrap();
    assert_eq!(task, Some(PoolingTask::Embed), "{case}");
    server(case, PoolingTask::Embed)
}

fn reranker(case: &str) -> TestServer {
    let task = PoolingTask::of(fixture(case)).unwrap();
    // The folder of Qwen3-Reranker is that of any causal model.
    let known = (case != "reranker_qwen3").then_some(PoolingTask::Score);
    assert_eq!(task, known, "{case}");
    server(case, PoolingTask::Score)
}

/// Returns the texts or the pairs of a fixture, and the tokens of each.
fn texts(case: &str) -> (Value, Vec<Vec<i64>>) {
    let text = std::fs::read_to_string(fixture(case).join("expected.json")).unwrap();
    let mut expected: Value = serde_json::from_str(&text).unwrap();
    let rows = expected["tokens"].as_array().unwrap().iter();
    let ids = rows.map(|row| serde_json::from_value(row["ids"].clone()).unwrap());
    let ids = ids.collect();
    (expected["texts"].take(), ids)
}

/// Returns a tensor of a fixture as rows.
fn wanted(case: &str, name: &str) -> Vec<Vec<f64>> {
    let path = fixture(case).join("expected.safetensors");
    let tensors = Tensor::read_safetensors(path).unwrap();
    let (_, tensor) = tensors.into_iter().find(|(own, _)| own == name).unwrap();
    let rows = tensor.size()[0];
    Vec::try_from(tensor.view([rows, -1]).to_kind(Kind::Double)).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

fn check_close(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let near = got.iter().zip(want).all(|(a, b)| (a - b).abs() < TOLERANCE);
    assert!(near, "{what}: {got:?} {want:?}");
}

#[test]
fn embeddings_of_texts_token_lists_and_prompts_equal_sentence_transformers() {
    for case in [
        "embedding_bert",
        "embedding_modernbert",
        "embedding_qwen3",
        "embedding_gemma",
    ] {
        let server = embeddings(case);
        let (texts, ids) = texts(case);
        let ask = |body: Value| post(server.address, "/v1/embeddings", &body).json();
        let want = wanted(case, "embeddings");
        let tokens: usize = ids.iter().map(Vec::len).sum();
        for input in [texts.clone(), json!(ids)] {
            let answer = ask(json!({"input": input, "model": NAME}));
            assert_eq!(answer["usage"]["prompt_tokens"], tokens, "{case}: {answer}");
            for (index, want) in want.iter().enumerate() {
                let data = &answer["data"][index];
                assert_eq!(data["index"], index);
                check_close(&numbers(&data["embedding"]), want, case);
            }
        }
        if matches!(case, "embedding_bert" | "embedding_qwen3") {
            let answer = ask(json!({"input": texts, "prompt_name": "query"}));
            for (index, want) in wanted(case, "query").iter().enumerate() {
                check_close(&numbers(&answer["data"][index]["embedding"]), want, case);
            }
        }
        // One text, alone in its batch.
        let answer = ask(json!({"input": texts[1]}));
        check_close(&numbers(&answer["data"][0]["embedding"]), &want[1], case);
    }
}

#[test]
fn a_gguf_file_is_served_without_other_files() {
    let server = server_of(&fixture("gguf").join("bert.gguf"), PoolingTask::Embed);
    let (texts, ids) = texts("embedding_bert");
    let answer = post(server.address, "/v1/embeddings", &json!({"input": texts})).json();
    let tokens: usize = ids.iter().map(Vec::len).sum();
    assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    for (index, want) in wanted("embedding_bert", "embeddings").iter().enumerate() {
        check_close(
            &numbers(&answer["data"][index]["embedding"]),
            want,
            "bert.gguf",
        );
    }
    let body = json!({"input": "a", "prompt_name": "query"});
    let error = post(server.address, "/v1/embeddings", &body).error(400);
    assert!(
        error["message"].as_str().unwrap().contains("no prompts"),
        "{error}"
    );
}

#[test]
fn a_shorter_embedding_is_the_beginning_of_the_whole_one_with_a_norm_of_one() {
    for (case, normalized) in [("embedding_bert", true), ("embedding_modernbert", false)] {
        let server = embeddings(case);
        let (texts, _) = texts(case);
        let body = json!({"input": texts, "dimensions": 5});
        let answer = post(server.address, "/v1/embeddings", &body).json();
        for (index, want) in wanted(case, "embeddings").iter().enumerate() {
            let begin = &want[..5];
            let norm = match normalized {
                true => begin.iter().map(|x| x * x).sum::<f64>().sqrt(),
                false => 1.0,
            };
            let want: Vec<f64> = begin.iter().map(|x| x / norm).collect();
            check_close(&numbers(&answer["data"][index]["embedding"]), &want, case);
        }
    }
}

#[test]
fn documents_are_sorted_by_the_scores_of_the_original() {
    for case in [
        "reranker_bert",
        "reranker_roberta",
        "reranker_qwen3",
        "reranker_logit_score",
    ] {
        let server = reranker(case);
        let (pairs, ids) = texts(case);
        let want = wanted(case, "scores");
        let pairs = pairs.as_array().unwrap();
        // Each pair of the fixture has a query of its own.
        let mut tokens = 0;
        for (index, pair) in pairs.iter().enumerate() {
            let body = json!({"query": pair[0], "documents": [pair[1]]});
            let answer = post(server.address, "/v1/rerank", &body).json();
            let score = answer["results"][0]["relevance_score"].as_f64().unwrap();
            check_close(&[score], &want[index], case);
            assert_eq!(answer["usage"]["total_tokens"], ids[index].len(), "{case}");
            assert!(answer["id"].as_str().unwrap().starts_with("rerank-"));
            tokens += ids[index].len();
        }
        // The first two pairs have one query.
        let documents = json!([pairs[0][1], {"text": pairs[1][1]}]);
        let best = usize::from(want[1][0] > want[0][0]);
        for path in ["/rerank", "/v1/rerank", "/v2/rerank"] {
            let body = json!({"query": pairs[0][0], "documents": documents});
            let answer = post(server.address, path, &body).json();
            let results = answer["results"].as_array().unwrap();
            assert_eq!(results.len(), 2);
            for (rank, index) in [best, 1 - best].into_iter().enumerate() {
                assert_eq!(results[rank]["index"], index, "{case}: {answer}");
                assert_eq!(results[rank]["document"]["text"], pairs[index][1]);
                let score = results[rank]["relevance_score"].as_f64().unwrap();
                check_close(&[score], &want[index], case);
            }
        }
        let body = json!({"query": pairs[0][0], "documents": documents, "top_n": 1, "return_documents": false});
        let answer = post(server.address, "/rerank", &body).json();
        let results = answer["results"].as_array().unwrap();
        assert_eq!((results.len(), &results[0]["index"]), (1, &json!(best)));
        assert_eq!(results[0].get("document"), None);

        let list = |side: usize| pairs.iter().map(|pair| &pair[side]).collect::<Vec<_>>();
        let body = json!({"text_1": list(0), "text_2": list(1)});
        let answer = post(server.address, "/v1/score", &body).json();
        assert_eq!(answer["usage"]["prompt_tokens"], tokens);
        for (index, want) in want.iter().enumerate() {
            let data = &answer["data"][index];
            assert_eq!(
                (&data["index"], &data["object"]),
                (&json!(index), &json!("score"))
            );
            check_close(&[data["score"].as_f64().unwrap()], want, case);
        }
        let body = json!({"text_1": pairs[0][0], "text_2": pairs[0][1]});
        let answer = post(server.address, "/score", &body).json();
        check_close(
            &[answer["data"][0]["score"].as_f64().unwrap()],
            &want[0],
            case,
        );
    }
}

#[test]
fn an_instruction_changes_the_prompt_of_a_causal_reranker_only() {
    let (pairs, _) = texts("reranker_qwen3");
    let body = |instruction: &str| json!({"query": pairs[0][0], "documents": [pairs[0][1]], "instruction": instruction});
    let server = reranker("reranker_qwen3");
    let score = |instruction: &str| {
        let answer = post(server.address, "/v1/rerank", &body(instruction)).json();
        answer["results"][0]["relevance_score"].as_f64().unwrap()
    };
    let card = "Given a web search query, retrieve relevant passages that answer the query";
    check_close(
        &[score(card)],
        &wanted("reranker_qwen3", "scores")[0],
        "card",
    );
    assert!((score("Find the opposite.") - score(card)).abs() > TOLERANCE);

    // The system's message in the template of a folder of sentence-transformers, which has prompts of its own.
    let server = reranker("reranker_logit_score");
    let want = &wanted("reranker_logit_score", "opposite")[0];
    let named =
        json!({"query": pairs[0][0], "documents": [pairs[0][1]], "prompt_name": "opposite"});
    for body in [body("Find the opposite."), named] {
        let answer = post(server.address, "/v1/rerank", &body).json();
        let score = answer["results"][0]["relevance_score"].as_f64().unwrap();
        check_close(&[score], want, "opposite");
    }
    let server = reranker("reranker_bert");
    let error = post(server.address, "/v1/rerank", &body("Find.")).error(400);
    assert_eq!(error["param"], "instruction");
}

#[test]
fn routes_that_the_model_does_not_have_say_which_it_has() {
    let server = embeddings("embedding_bert");
    let refuse = |server: &TestServer, path: &str, body: &Value, text: &str| {
        let error = post(server.address, path, body).error(400);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(text), "{path}: {message}");
        assert_eq!(error["code"], "unsupported_model");
    };
    let messages = json!({"messages": [{"role": "user", "content": "hi"}]});
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "hi"})),
        ("/v1/chat/completions", messages.clone()),
        ("/v1/responses", json!({"input": "hi"})),
    ] {
        refuse(&server, path, &body, "use /v1/embeddings");
        refuse(&reranker("reranker_bert"), path, &body, "use /v1/rerank");
    }
    let pair = json!({"query": "a", "documents": ["b"]});
    refuse(&server, "/v1/rerank", &pair, "serve a reranker");
    let pair = json!({"text_1": "a", "text_2": "b"});
    refuse(
        &TestServer::start(|_| {}),
        "/score",
        &pair,
        "serve a reranker",
    );
    let text = json!({"input": "hi"});
    let scores = reranker("reranker_bert");
    refuse(&scores, "/v1/embeddings", &text, "use /v1/rerank");
}

#[test]
fn inputs_that_cannot_be_read_are_refused() {
    let server = embeddings("embedding_bert");
    for (body, param, text) in [
        (json!({"input": vec![2; 65]}), "input", "65 tokens"),
        (json!({"input": [120]}), "input", "0..120"),
        (
            json!({"input": "a", "dimensions": 17}),
            "dimensions",
            "from 1 to 16",
        ),
        (
            json!({"input": "a", "dimensions": 0}),
            "dimensions",
            "from 1 to 16",
        ),
        (
            json!({"input": "a", "prompt_name": "passage"}),
            "prompt_name",
            "[\"document\", \"query\"]",
        ),
    ] {
        let error = post(server.address, "/v1/embeddings", &body).error(400);
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(text), "{error}");
    }
    let server = reranker("reranker_bert");
    for (body, param, text) in [
        (
            json!({"query": "a", "documents": []}),
            "documents",
            "at least one",
        ),
        (json!({"documents": ["a"]}), "query", "missing"),
        (
            json!({"query": "a", "documents": ["a", 1]}),
            "documents",
            "`documents[1]` must be a string or an object with `text`",
        ),
        (
            json!({"query": "a", "documents": ["a ".repeat(80)]}),
            "documents",
            "context",
        ),
        (
            json!({"query": "a", "documents": vec!["a"; 257]}),
            "documents",
            "max_queue",
        ),
    ] {
        let error = post(server.address, "/v1/rerank", &body).error(400);
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(text), "{error}");
    }
    let error = post(
        server.address,
        "/v1/score",
        &json!({"text_1": 1, "text_2": "a"}),
    )
    .error(400);
    let message = "`text_1` is 1; it must be a string or a list of strings";
    assert_eq!(error["message"], message);
    let uneven = json!({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]});
    let error = post(server.address, "/v1/score", &uneven).error(400);
    assert_eq!(error["param"], "text_1");
}

/// A copy of the query for each document would be hundreds of gigabytes.
#[test]
fn a_long_query_with_many_documents_is_refused_before_it_is_copied() {
    let server = reranker("reranker_bert");
    let (query, documents) = ("a".repeat(1 << 20), vec![""; 700_000]);
    for (path, body, param) in [
        (
            "/rerank",
            json!({"query": query, "documents": documents}),
            "documents",
        ),
        (
            "/score",
            json!({"text_1": query, "text_2": documents}),
            "text_2",
        ),
    ] {
        let error = post(server.address, path, &body).error(400);
        assert_eq!(error["param"], param);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("split the request"), "{message}");
    }
}

#[test]
fn the_operator_sees_the_model_and_its_requests() {
    let server = embeddings("embedding_bert");
    assert_eq!(get(server.address, "/health").json()["status"], "ok");
    let card = &get(server.address, "/v1/models").json()["data"][0];
    assert_eq!(
        (&card["id"], &card["max_model_len"]),
        (&json!(NAME), &json!(64))
    );
    let body = json!({"prompt": "no"});
    let tokens = post(server.address, "/tokenize", &body).json();
    let ids = &texts("embedding_bert").1[2];
    assert_eq!(tokens["tokens"], json!(ids));
    post(server.address, "/v1/embeddings", &json!({"input": "no"})).json();
    assert_eq!(
        metric(server.address, "prompt_tokens_total"),
        ids.len() as f64
    );
    assert_eq!(metric(server.address, "sequences_in_flight"), 0.0);
}

#[test]
fn many_clients_share_batches() {
    let server = embeddings("embedding_qwen3");
    let (texts, _) = texts("embedding_qwen3");
    let want = wanted("embedding_qwen3", "embeddings");
    std::thread::scope(|scope| {
        for client in 0..16 {
            let (texts, want, address) = (&texts, &want, server.address);
            scope.spawn(move || {
                let index = client % want.len();
                let body = json!({"input": [texts[index], texts[0]]});
                let answer = post(address, "/v1/embeddings", &body).json();
                let got = |index: usize| numbers(&answer["data"][index]["embedding"]);
                check_close(&got(0), &want[index], "first");
                check_close(&got(1), &want[0], "second");
            });
        }
    });
    server.check_empty();
}

#[test]
fn a_causal_model_without_the_answers_of_a_reranker_is_refused_with_what_to_do() {
    // Its tokens are the bytes.
    let tokenizer = Arc::new(crate::support::tokenizer());
    let folder = fixture("reranker_qwen3");
    let (task, options) = (PoolingTask::Score, LoadOptions::default());
    let error = PoolingModel::from_pretrained(&folder, task, tokenizer, &options).unwrap_err();
    let is_known = matches!(&error, Error::NotReranker { path, token: "no" } if *path == folder);
    assert!(is_known, "{error}");
    assert!(
        error.to_string().contains("use a reranker, or name"),
        "{error}"
    );
}
