//! Chat templates and generation settings of GGUF files, and their copies in Hugging Face's format.

use overdrive_generation::{
    ChatTemplate, ChatTemplateOptions, Error, GenerationConfig, Message, ModelFiles,
};
use overdrive_quantization::GgufValue;
use serde_json::json;

use crate::gguf_files::{changed, fixture, string, strings};

const TEMPLATE: &str = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}";

fn render(template: &ChatTemplate, name: Option<&str>) -> String {
    let options = ChatTemplateOptions {
        template: name.map(str::to_owned),
        ..Default::default()
    };
    template.render(&[Message::user("hi")], &options).unwrap()
}

#[test]
fn templates_of_a_file_have_names_and_its_special_tokens() {
    let file = changed(
        "words.gguf",
        &[
            ("tokenizer.chat_template", Some(string(TEMPLATE))),
            ("tokenizer.chat_templates", Some(strings(&["tool_use"]))),
            ("tokenizer.chat_template.tool_use", Some(string("tools"))),
        ],
    );
    let template = ChatTemplate::from_gguf(&file).unwrap();
    assert_eq!(
        template.names().collect::<Vec<_>>(),
        ["default", "tool_use"]
    );
    assert_eq!(render(&template, None), "<|im_start|>[user]hi<|im_end|>");
    assert_eq!(render(&template, Some("tool_use")), "tools");
    assert_eq!(template.special_token("pad_token"), Some("<|endoftext|>"));

    let none = changed("words.gguf", &[]);
    let error = ChatTemplate::from_gguf(&none).unwrap_err();
    assert!(matches!(error, Error::NoChatTemplate { .. }));
    assert!(error.to_string().contains("model.gguf"), "{error}");
    let wrong = changed(
        "words.gguf",
        &[("tokenizer.chat_template", Some(string("{% for")))],
    );
    let error = ChatTemplate::from_gguf(&wrong).unwrap_err().to_string();
    assert!(error.starts_with("chat template: "), "{error}");
    let wrong = changed(
        "words.gguf",
        &[("tokenizer.chat_template", Some(GgufValue::U32(1)))],
    );
    let error = ChatTemplate::from_gguf(&wrong).unwrap_err().to_string();
    assert!(error.contains("tokenizer.chat_template"), "{error}");
}

#[test]
fn sampling_defaults_and_ends_become_generation_settings() {
    let number = |key, value| (key, Some(GgufValue::F32(value)));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let file = changed(
        "words.gguf",
        &[
            number("general.sampling.temp", 0.8),
            number("general.sampling.top_p", 0.95),
            number("general.sampling.min_p", 0.05),
            number("general.sampling.penalty_repeat", 1.1),
            number("general.sampling.xtc_probability", 0.5),
            ("general.sampling.top_k", Some(GgufValue::I32(40))),
        ],
    );
    crate::gguf_files::write(file.metadata(), &path);
    let map = ModelFiles::open(&path)
        .unwrap()
        .generation_config()
        .unwrap();
    // `<|im_end|>`, `<|endoftext|>`.
    assert_eq!(map["eos_token_id"], json!([2, 0]));
    let config = GenerationConfig::from_map(&map).unwrap();
    assert!(config.do_sample);
    assert_eq!(
        (config.temperature, config.top_p, config.min_p),
        (0.8, 0.95, Some(0.05))
    );
    assert_eq!((config.top_k, config.repetition_penalty), (40, 1.1));
    assert_eq!(
        (config.pad_token_id, config.eos_token_id),
        (Some(0), vec![2, 0])
    );

    let plain = ModelFiles::open(fixture("words.gguf")).unwrap();
    let map = plain.generation_config().unwrap();
    assert!(!map.contains_key("do_sample"), "{map:?}");
    let wrong = changed("words.gguf", &[number("general.sampling.temp", f32::NAN)]);
    crate::gguf_files::write(wrong.metadata(), &path);
    let error = ModelFiles::open(&path)
        .unwrap()
        .generation_config()
        .unwrap_err();
    assert!(
        error.to_string().contains("general.sampling.temp"),
        "{error}"
    );
}

#[test]
fn a_copy_of_the_tokenizer_is_a_folder_with_the_same_ids() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["byte_level", "sentencepiece", "unigram", "word_piece"] {
        let file = changed(
            &format!("{name}.gguf"),
            &[
                ("tokenizer.chat_template", Some(string(TEMPLATE))),
                ("tokenizer.chat_template.tool_use", Some(string("tools"))),
                (
                    "tokenizer.chat_template.../up",
                    Some(string("no file name")),
                ),
            ],
        );
        let path = folder.path().join(format!("{name}.gguf"));
        crate::gguf_files::write(file.metadata(), &path);
        let files = ModelFiles::open(&path).unwrap();
        let copy = folder.path().join(name);
        files.copy_tokenizer(&copy).unwrap();
        let copied = ModelFiles::open(&copy).unwrap();
        let (ours, theirs) = (files.tokenizer().unwrap(), copied.tokenizer().unwrap());
        let text = "Hello <|im_start|> wörld</s> 😀 [MASK] 123\n  x";
        let ids = ours.encode(text, true).unwrap();
        assert_eq!(
            ids.get_ids(),
            theirs.encode(text, true).unwrap().get_ids(),
            "{name}"
        );
        for token in [
            "bos_token",
            "eos_token",
            "unk_token",
            "pad_token",
            "mask_token",
            "other",
        ] {
            let (here, there) = (files.special_token(token), copied.special_token(token));
            assert_eq!(here.unwrap(), there.unwrap(), "{name} {token}");
        }
        let template = copied.chat_template().unwrap();
        assert_eq!(
            template.names().collect::<Vec<_>>(),
            ["default", "tool_use"]
        );
        assert_eq!(
            render(&template, None),
            render(&files.chat_template().unwrap(), None).as_str()
        );
        // A copy of the copy is a copy of files.
        let again = folder.path().join("again");
        copied.copy_tokenizer(&again).unwrap();
        assert!(again.join("tokenizer.json").is_file());
    }
}

#[test]
fn a_path_that_is_no_model_is_an_error_with_its_name() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing");
    let error = ModelFiles::open(&missing).unwrap_err().to_string();
    assert!(error.contains("missing"), "{error}");
    let other = folder.path().join("model.bin");
    std::fs::write(&other, b"something else").unwrap();
    let error = ModelFiles::open(&other).unwrap_err().to_string();
    assert!(
        error.contains("model.bin") && error.contains("GGUF"),
        "{error}"
    );
}
