//! Tests of the end-of-text tokens that a GGUF file names in its metadata and by their texts.

use std::path::PathBuf;

use overdrive_quantization::GgufFile;
use overdrive_transformer::ModelConfig;

/// An entry of the metadata, as GGUF stores it.
fn entry(key: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = (key.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(key.as_bytes());
    bytes.extend_from_slice(&kind.to_le_bytes());
    bytes.extend_from_slice(value);
    bytes
}

fn strings(texts: &[&str]) -> Vec<u8> {
    // 8 is the type of strings.
    let mut bytes = 8u32.to_le_bytes().to_vec();
    bytes.extend_from_slice(&(texts.len() as u64).to_le_bytes());
    for text in texts {
        bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
    }
    bytes
}

/// Returns the end-of-text tokens of the fixture, whose `eos_token_id` is 2, with these tokens and further ids.
fn end_of_text(tokens: &[&str], ids: &[(&str, u32)]) -> Vec<i64> {
    let fixture = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gguf/llama.gguf");
    let bytes = std::fs::read(fixture).unwrap();
    // 9 is the type of arrays, 4 that of unsigned integers.
    let mut entries = vec![entry("tokenizer.ggml.tokens", 9, &strings(tokens))];
    for (key, id) in ids {
        let key = format!("tokenizer.ggml.{key}");
        entries.push(entry(&key, 4, &id.to_le_bytes()));
    }
    // The tensors behind the metadata are aligned to 32 bytes.
    let length: usize = entries.iter().map(Vec::len).sum();
    let rest = (32 - (length + entry("padding", 8, &[0; 8]).len()) % 32) % 32;
    let mut padding = (rest as u64).to_le_bytes().to_vec();
    padding.resize(8 + rest, b'x');
    entries.push(entry("padding", 8, &padding));
    // Magic number and version, then the numbers of tensors and of entries.
    let (header, old) = bytes.split_at(24);
    let count = u64::from_le_bytes(header[16..].try_into().unwrap()) + entries.len() as u64;
    let bytes = [&header[..16], &count.to_le_bytes(), &entries.concat(), old].concat();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    let config = ModelConfig::from_gguf(&GgufFile::open(path).unwrap()).unwrap();
    config.eos_token_ids().to_vec()
}

#[test]
fn the_ends_of_texts_and_turns_are_those_of_llama_cpp() {
    // The end of a turn is known by its text only, as in SmolLM2's files.
    let tokens = ["<|endoftext|>", "<|im_start|>", "</s>", "<|im_end|>", "a"];
    assert_eq!(end_of_text(&tokens, &[]), [2, 0, 3]);
    // By the metadata, in which an id outside the vocabulary means that there is none.
    let tokens = ["a", "b", "c", "<end_of_turn>", "d", "e"];
    let ids = [
        ("eot_token_id", 5),
        ("eom_token_id", 1),
        ("fim_pad_token_id", u32::MAX),
        ("fim_rep_token_id", 6),
    ];
    assert_eq!(end_of_text(&tokens, &ids), [2, 5, 1, 3]);
    // In the harmony format `<|end|>` ends a message and not the answer.
    let tokens = ["<|end|>", "b", "c", "<|return|>", "<|call|>"];
    assert_eq!(end_of_text(&tokens, &[]), [2, 3, 4]);
    assert_eq!(end_of_text(&["<|end|>", "b", "c"], &[]), [2, 0]);
}
