//! Images in the messages of chats and responses.

use std::ops::ControlFlow;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use overdrive_generation::{
    ChatTemplate, ChatTemplateOptions, GenerateOptions, GenerationConfig, ImageProcessor, Message,
    Tokenizer, generate_with_options,
};
use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig, LlamaFamily};
use serde_json::{Value, json};

use crate::client::post;
use crate::support::{END, TestServer, defaults, tokenizer};

/// The ids of the tokens of images, after those of the bytes.
const TOKENS: [(&str, i64); 3] = [
    ("<|image_pad|>", 257),
    ("<|vision_start|>", 258),
    ("<|vision_end|>", 259),
];

fn model() -> CausalLm {
    // Tests run in parallel, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    let mut config = LlamaConfig {
        vocab_size: 264,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        head_dim: Some(16),
        max_position_embeddings: 512,
        initializer_range: 0.2,
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
    (vision.image_token_id, vision.vision_start_token_id) = (257, 258);
    (vision.vision_end_token_id, vision.video_token_id) = (259, 260);
    vision.initializer_range = 0.2;
    let options = InitOptions {
        seed: 5,
        ..InitOptions::default()
    };
    CausalLm::new(&config.into(), &options).unwrap()
}

fn processor() -> ImageProcessor {
    ImageProcessor {
        min_pixels: 256,
        max_pixels: 4096,
        patch_size: 8,
        ..ImageProcessor::default()
    }
}

/// As in Qwen3-VL's template.
fn template() -> ChatTemplate {
    let source = "{% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}\
                  {% for part in m.content %}{% if part.type == 'image' %}\
                  <|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}\
                  {% endif %}{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}";
    let template = ChatTemplate::new(source).unwrap();
    template.with_special_token("eos_token", "<end>")
}

fn own_tokenizer() -> Tokenizer {
    let mut value = serde_json::to_value(tokenizer()).unwrap();
    for (content, id) in TOKENS {
        value["added_tokens"].as_array_mut().unwrap().push(json!({
            "id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }));
    }
    serde_json::from_value(value).unwrap()
}

fn server() -> TestServer {
    TestServer::with_images(model(), own_tokenizer(), template(), processor())
}

fn png(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = folder.join("../overdrive-datasets/tests/fixtures/image_patches");
    std::fs::read(folder.join(name)).unwrap()
}

fn data_url(file: &[u8]) -> String {
    format!("data:image/png;base64,{}", STANDARD.encode(file))
}

/// Returns the greedy answer to a message whose parts are texts and images.
fn alone(content: &Value, files: &[Vec<u8>], new: usize) -> String {
    let message = Message::new("user", "").with("content", content.clone());
    let (tokenizer, model) = (own_tokenizer(), model());
    let prompt = template().encode(&tokenizer, &[message], &ChatTemplateOptions::default());
    let images: Vec<_> = files
        .iter()
        .map(|file| processor().decode(file).unwrap())
        .collect();
    let grids: Vec<_> = images
        .iter()
        .map(|image| image.grid.map(|side| side as i64))
        .collect();
    let vision = model.config().vision().unwrap();
    let prompt = vision.expand(&prompt.unwrap(), &grids).unwrap();
    let config = GenerationConfig {
        max_new_tokens: Some(new),
        eos_token_id: vec![END],
        ..defaults()
    };
    let images = [images];
    let options = GenerateOptions {
        tokenizer: Some(&tokenizer),
        images: &images,
        ..GenerateOptions::default()
    };
    let go = |_: overdrive_generation::GeneratedToken<'_>| ControlFlow::Continue(());
    let output = generate_with_options(&model, &[prompt], &config, &options, go);
    output.unwrap().texts[0].clone()
}

#[test]
fn an_answer_to_a_message_with_images_is_that_of_generate() {
    let server = server();
    let files = [png("32x48.png"), png("24x40.png")];
    let content = json!([{"type": "text", "text": "first "}, {"type": "image"}, {"type": "image"},
        {"type": "text", "text": " what is it?"}]);
    let wanted = alone(&content, &files, 10);
    let sent = json!([
        {"type": "text", "text": "first "},
        {"type": "image_url", "image_url": {"url": data_url(&files[0]), "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": data_url(&files[1])}},
        {"type": "text", "text": " what is it?"},
    ]);
    let body = json!({"messages": [{"role": "user", "content": sent}], "max_tokens": 10, "temperature": 0});
    for _ in 0..2 {
        let answer = post(server.address, "/v1/chat/completions", &body).json();
        assert_eq!(answer["choices"][0]["message"]["content"], wanted);
        // Six and four image tokens, and two around each.
        let text = "user: first  what is it?".len() + 1 + 1 + "assistant:".len();
        assert_eq!(answer["usage"]["prompt_tokens"], text + 6 + 4 + 4);
    }
    // Other pixels of the same number of tokens are another image.
    let swapped = [png("32x48.png"), png("33x40.png")];
    let mut other = body.clone();
    other["messages"][0]["content"][2]["image_url"]["url"] = data_url(&swapped[1]).into();
    let answer = post(server.address, "/v1/chat/completions", &other).json();
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        alone(&content, &swapped, 10)
    );
    server.check_empty();
}

#[test]
fn a_response_reads_its_images() {
    let server = server();
    let file = png("32x48.png");
    let content = json!([{"type": "text", "text": "look"}, {"type": "image"}]);
    let body = json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "look"},
        {"type": "input_image", "image_url": data_url(&file)}]}], "max_output_tokens": 8, "temperature": 0});
    let answer = post(server.address, "/v1/responses", &body).json();
    assert_eq!(
        answer["output"][0]["content"][0]["text"],
        alone(&content, &[file], 8)
    );
}

#[test]
fn images_beyond_the_context_are_refused_before_they_are_decoded() {
    let server = server();
    // Files whose pixels are missing.
    let file = data_url(&png("101x87.png")[..60]);
    let parts = vec![json!({"type": "image_url", "image_url": {"url": file}}); 100];
    let body = json!({"messages": [{"role": "user", "content": parts}], "max_tokens": 4});
    let error = post(server.address, "/v1/chat/completions", &body).error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("fewer or smaller images")
    );
    // Those that fit are decoded.
    let body = json!({"messages": [{"role": "user", "content": parts[..1]}], "max_tokens": 4});
    let error = post(server.address, "/v1/chat/completions", &body).error(400);
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("a PNG, a JPEG or a WebP")
    );
}

#[test]
fn the_tokens_of_a_chat_are_counted_with_those_of_its_images() {
    let server = server();
    let parts =
        json!([{"type": "image_url", "image_url": {"url": data_url(&png("32x48.png"))}}, "?"]);
    let messages = json!([{"role": "user", "content": parts}]);
    let counted = post(server.address, "/tokenize", &json!({"messages": messages})).json();
    let body = json!({"messages": messages, "max_tokens": 1});
    let answer = post(server.address, "/v1/chat/completions", &body).json();
    assert_eq!(counted["count"], answer["usage"]["prompt_tokens"]);
    let images = counted["tokens"].as_array().unwrap().iter();
    assert_eq!(images.filter(|id| **id == json!(257)).count(), 6);
}

#[test]
fn a_message_without_images_stays_a_text() {
    let server = server();
    let (whole, parts) = (
        json!("a\nb"),
        json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    );
    let answers = [whole, parts].map(|content| {
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0});
        let answer = post(server.address, "/v1/chat/completions", &body).json();
        answer["choices"][0]["message"]["content"].clone()
    });
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn images_that_cannot_be_read_are_refused_with_the_reason() {
    let server = server();
    let with = |url: &str| json!([{"type": "image_url", "image_url": {"url": url}}]);
    let file = data_url(&png("32x48.png"));
    let typed = json!([{"type": "text", "text": "<|image_pad|>"}, {"type": "image_url", "image_url": {"url": file}}]);
    let audio = json!([{"type": "input_audio"}, {"type": "image_url", "image_url": {"url": file}}]);
    for (content, reason) in [
        (
            with("https://example.org/cat.png"),
            "loads no images from elsewhere",
        ),
        (with("data:image/png;base64,@@"), "not valid Base64"),
        (
            with("data:image/png;base64,AAAA"),
            "a PNG, a JPEG or a WebP",
        ),
        (
            json!([{"type": "image_url"}]),
            "loads no images from elsewhere",
        ),
        (typed, "must not contain the token as text"),
        (audio, "reads texts and images"),
    ] {
        let body = json!({"messages": [{"role": "user", "content": content}], "max_tokens": 4});
        let error = post(server.address, "/v1/chat/completions", &body).error(400);
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(reason), "{reason}: {message}");
        assert_eq!(error["param"], "messages");
    }
    // A model that sees none.
    let text = TestServer::start(|_| {});
    let body = json!({"messages": [{"role": "user", "content": with(&file)}], "max_tokens": 4});
    let error = post(text.address, "/v1/chat/completions", &body).error(400);
    assert!(error["message"].as_str().unwrap().contains("are read here"));
}
