//! Window, ALiBi, softcap and sinks mean what they mean in flash-attn: against a fixture.

use std::collections::HashMap;
use std::path::PathBuf;

use overdrive_attention::{AttentionOptions, Backend, Window, attention, attention_with_lse};
use tch::{Kind, Tensor};

fn fixture(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    assert!(
        path.exists(),
        "{} is missing: run gen_attention.py there",
        path.display()
    );
    path
}

fn largest_difference(got: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(got.size(), expected.size());
    // Equal infinities differ by nothing.
    let off = (got.to_kind(Kind::Double) - expected).abs();
    off.masked_fill(&got.eq_tensor(expected), 0.0)
        .max()
        .double_value(&[])
}

fn check(backend: Backend, kind: Kind, tolerance: f64) {
    let cases = std::fs::read_to_string(fixture("attention.json")).unwrap();
    let cases: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&cases).unwrap();
    let tensors: HashMap<String, Tensor> =
        Tensor::read_safetensors(fixture("attention.safetensors"))
            .unwrap()
            .into_iter()
            .collect();
    assert!(cases.len() > 20);
    for (name, case) in &cases {
        let stored = |what: &str| tensors.get(&format!("{name}.{what}"));
        let leaf = |what: &str| {
            stored(what).map(|x| x.to_kind(kind).detach().copy().set_requires_grad(true))
        };
        let number = |key: &str| case.get(key).and_then(serde_json::Value::as_f64);
        let side = |at: usize| {
            let size = case.get("window")?.get(at)?.as_i64()?;
            // flash-attn's -1 is no limit.
            usize::try_from(size).ok()
        };
        let (query, key, value) = (
            leaf("query").unwrap(),
            leaf("key").unwrap(),
            leaf("value").unwrap(),
        );
        let sinks = leaf("sinks");
        let options = AttentionOptions {
            causal: case.get("causal").is_some(),
            window: Window {
                left: side(0),
                right: side(1),
            },
            sink_tokens: number("sink_tokens").unwrap_or(0.0) as usize,
            scale: number("scale"),
            softcap: number("softcap"),
            alibi_slopes: stored("slopes"),
            sinks: sinks.as_ref(),
            backend,
            ..AttentionOptions::default()
        };
        let output = attention(&query, &key, &value, &options).unwrap();
        let (_, lse) = attention_with_lse(&query, &key, &value, &options).unwrap();
        let gradient = stored("gradient").unwrap().to_kind(kind);
        (&output * gradient).sum(kind).backward();
        let mut results = vec![
            ("output", output),
            ("lse", lse),
            ("dq", query.grad()),
            ("dk", key.grad()),
            ("dv", value.grad()),
        ];
        results.extend(sinks.map(|sinks| ("ds", sinks.grad())));
        for (what, got) in results {
            let off = largest_difference(&got, stored(what).unwrap());
            assert!(
                off < tolerance,
                "{backend}, {kind:?}: {what} of {name} is off by {off}"
            );
        }
    }
}

#[test]
fn the_blockwise_kernel_has_flash_attns_semantics() {
    check(Backend::Blockwise, Kind::Double, 1e-12);
    check(Backend::Blockwise, Kind::Float, 1e-5);
}

#[test]
fn the_math_back_end_has_flash_attns_semantics() {
    check(Backend::Math, Kind::Double, 1e-12);
}
