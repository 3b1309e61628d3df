//! The example `finetune_vision` on the images that `images` generates, and `chat` with an image.

use std::path::{Path, PathBuf};

use clap::Parser;
use overdrive::lora::{LoadAdapterOptions, load_adapter};
use overdrive::transformer::{CausalLm, InitOptions, LlamaConfig, LlamaFamily};
use serde_json::{Value, json};
use tch::Tensor;

use crate::{alone, chat_example, finetune_vision_example, images_example};

/// The special tokens, after those of the bytes.
const SPECIAL: [&str; 4] = [
    "<end>",
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
];

/// Writes the folder of a small random model that sees images.
fn model(folder: &Path) -> PathBuf {
    let mut config = LlamaConfig {
        vocab_size: 264,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        max_position_embeddings: 256,
        initializer_range: 0.2,
        eos_token_id: vec![256],
        ..LlamaConfig::of(LlamaFamily::Qwen3Vl)
    };
    let vision = config.vision.as_mut().unwrap();
    (
        vision.hidden_size,
        vision.num_heads,
        vision.intermediate_size,
    ) = (24, 2, 32);
    (vision.depth, vision.out_hidden_size) = (2, 32);
    (vision.patch_size, vision.num_position_embeddings) = (8, 16);
    vision.deepstack_visual_indexes = vec![0];
    vision.mrope_section = [4, 2, 2];
    vision.initializer_range = 0.2;
    (vision.image_token_id, vision.vision_start_token_id) = (257, 258);
    (vision.vision_end_token_id, vision.video_token_id) = (259, 260);
    let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    let path = folder.join("model");
    model.save_pretrained(&path, &Default::default()).unwrap();
    let write = |name: &str, text: String| std::fs::write(path.join(name), text).unwrap();
    write("tokenizer.json", tokenizer().to_string());
    write(
        "tokenizer_config.json",
        json!({"eos_token": "<end>"}).to_string(),
    );
    write(
        "chat_template.jinja",
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}\
         {% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
         {% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
            .to_owned(),
    );
    let processor = json!({
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8,
        "size": {"shortest_edge": 256, "longest_edge": 1024},
    });
    write("preprocessor_config.json", processor.to_string());
    path
}

/// Returns a byte-level BPE without merges, and the special tokens.
fn tokenizer() -> Value {
    let printable = |byte: &u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..=255_u8).filter(|byte| !printable(byte)).count() as u32;
    // GPT-2's letters for the other bytes follow from U+0100 on.
    let letters = (0..=255_u8).filter(printable).map(char::from);
    let letters = letters.chain((0x100..0x100 + others).filter_map(char::from_u32));
    let vocab = letters
        .zip(0..)
        .map(|(letter, id)| (letter.to_string(), json!(id)));
    let vocab: serde_json::Map<String, Value> = vocab.collect();
    let added = SPECIAL.iter().zip(256..).map(|(content, id)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true})
    });
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": added.collect::<Vec<_>>(), "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    })
}

#[test]
fn an_adapter_learns_captions_and_chats_about_an_image() {
    let _alone = alone();
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let (model, images) = (model(folder.path()), folder.path().join("images"));
    let generate =
        images_example::Flags::parse_from(["images", "--generate", images.to_str().unwrap()]);
    images_example::run(&generate, |_| {}).unwrap();
    let train = |steps: usize, out: &str| {
        let flags = finetune_vision_example::Flags {
            model: model.clone(),
            data: vec![images.join("captions.jsonl")],
            out: folder.path().join(out),
            prompt: "What is it?".to_owned(),
            steps,
            batch_size: 6,
            learning_rate: 1e-2,
            rank: 8,
            quantize: None,
            workers: 1,
            seed: 1,
        };
        finetune_vision_example::run(&flags).unwrap()
    };
    let (first, last) = (train(1, "first"), train(40, "adapter"));
    assert!(last < 0.5 * first, "{first} {last}");

    let adapter = folder.path().join("adapter");
    let tensors = Tensor::read_safetensors(adapter.join("adapter_model.safetensors")).unwrap();
    let name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight";
    assert!(tensors.iter().any(|(own, _)| own == name));
    assert!(tensors.iter().all(|(own, _)| !own.contains("visual")));
    let mut loaded = CausalLm::from_pretrained(&model, &Default::default()).unwrap();
    load_adapter(
        &mut loaded,
        &adapter,
        "captions",
        &LoadAdapterOptions::default(),
    )
    .unwrap();

    let flags = chat_example::Flags::parse_from([
        "chat",
        "--model",
        model.to_str().unwrap(),
        "--adapter",
        adapter.to_str().unwrap(),
        "--image",
        images.join("00.png").to_str().unwrap(),
        "--max-new-tokens",
        "8",
    ]);
    chat_example::run(&flags, &b"What is it?\nAnd now?\n"[..]).unwrap();
}
