//! Tests of embeddings.

use overdrive_transformer::{ForwardInput, PoolingMode};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

use crate::client::post;
use crate::support::{TestServer, encode, model};

/// Returns the embedding of a text, computed with tensors.
fn wanted(text: &str, pooling: PoolingMode) -> Vec<f64> {
    let _no_grad = tch::no_grad_guard();
    let ids = Tensor::from_slice(&encode(text)).unsqueeze(0);
    let hidden = model()
        .hidden_states(ForwardInput::new(&ids))
        .unwrap()
        .to_kind(Kind::Double);
    let state = match pooling {
        PoolingMode::LastToken => hidden.select(1, -1),
        _ => hidden.mean_dim(&[1i64][..], false, Kind::Double),
    };
    let state = state.squeeze_dim(0);
    Vec::try_from(&(&state / state.norm())).unwrap()
}

#[test]
fn an_embedding_is_the_pooled_hidden_state_with_a_norm_of_one() {
    for pooling in [PoolingMode::LastToken, PoolingMode::Mean] {
        let server = TestServer::start(|options| options.pooling = pooling);
        let texts = ["hello world", "b"];
        let mut body = json!({"input": texts});
        let answer = post(server.address, "/v1/embeddings", &body).json();
        body["encoding_format"] = "base64".into();
        let packed = post(server.address, "/v1/embeddings", &body).json();
        assert_eq!(
            answer["usage"],
            json!({"prompt_tokens": 12, "total_tokens": 12})
        );
        for (index, text) in texts.into_iter().enumerate() {
            let data = &answer["data"][index];
            assert_eq!(
                (&data["object"], &data["index"]),
                (&json!("embedding"), &json!(index))
            );
            let got: Vec<f64> = data["embedding"]
                .as_array()
                .unwrap()
                .iter()
                .map(|x| x.as_f64().unwrap())
                .collect();
            let want = wanted(text, pooling);
            assert_eq!(got.len(), want.len());
            assert!(
                got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-5),
                "{got:?} {want:?}"
            );
            let bytes = packed["data"][index]["embedding"].as_str().unwrap();
            assert_eq!(
                unpack(bytes),
                got.iter().map(|x| *x as f32).collect::<Vec<_>>()
            );
        }
        let ids = json!({"input": encode("b")});
        let by_ids = post(server.address, "/v1/embeddings", &ids).json();
        assert_eq!(
            by_ids["data"][0]["embedding"],
            answer["data"][1]["embedding"]
        );
        server.check_empty();
    }
}

/// Decodes base64 into little-endian numbers.
fn unpack(text: &str) -> Vec<f32> {
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits = text.trim_end_matches('=').bytes().flat_map(|letter| {
        let value = alphabet.iter().position(|own| *own == letter).unwrap();
        (0..6).rev().map(move |bit| (value >> bit & 1) as u8)
    });
    let bits: Vec<u8> = bits.collect();
    let bytes: Vec<u8> = bits
        .chunks_exact(8)
        .map(|byte| byte.iter().fold(0, |sum, bit| sum << 1 | bit))
        .collect();
    bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes(four.try_into().unwrap()))
        .collect()
}

#[test]
fn inputs_that_cannot_be_embedded_are_refused() {
    let server = TestServer::start(|options| options.max_queue = 2);
    for (input, param, text) in [
        (json!([]), "input", "at least one"),
        (json!(""), "input", "without tokens"),
        (json!("x".repeat(600)), "input", "600 tokens"),
        (json!([300]), "input", "0..260"),
        (json!(["a", "b", "c"]), "input", "max_queue"),
        (Value::Null, "input", "missing"),
    ] {
        let error = post(server.address, "/v1/embeddings", &json!({"input": input})).error(400);
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().unwrap().contains(text), "{error}");
    }
    let body = json!({"input": "a", "encoding_format": "hex"});
    assert_eq!(
        post(server.address, "/v1/embeddings", &body).error(400)["param"],
        "encoding_format"
    );
    let body = json!({"input": "a", "dimensions": 8});
    assert_eq!(
        post(server.address, "/v1/embeddings", &body).error(400)["param"],
        "dimensions"
    );
    server.check_empty();
}
