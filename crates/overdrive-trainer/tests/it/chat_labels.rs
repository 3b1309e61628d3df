//! The labels of a conversation, compared with transformers' assistant masks and TRL's completions.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use overdrive_datasets::{
    ChatFormat, EncodeOptions, InstructionEncoder, InstructionRecord, load_tokenizer,
};
use overdrive_generation::ChatTemplate;
use overdrive_trainer::TemplateFormat;
use serde::Deserialize;

#[derive(Deserialize)]
struct Case {
    template: String,
    record: serde_json::Value,
    input_ids: Vec<i64>,
    labels: Vec<i64>,
}

fn fixture(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/chat_labels")
        .join(name);
    assert!(
        path.exists(),
        "make it: python3 tests/fixtures/gen_chat_labels.py"
    );
    path
}

fn encoder(template: &str) -> InstructionEncoder {
    let template = ChatTemplate::new(template)
        .unwrap()
        .with_special_token("bos_token", "<s>")
        .with_special_token("eos_token", "</s>");
    let chat: Arc<dyn ChatFormat> = Arc::new(TemplateFormat(template));
    let tokenizer = load_tokenizer(fixture("tokenizer.json")).unwrap();
    InstructionEncoder::new(tokenizer, Some(chat), None, EncodeOptions::default()).unwrap()
}

#[test]
fn tokens_and_labels_are_those_of_transformers_and_trl() {
    let text = std::fs::read_to_string(fixture("cases.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_str(&text).unwrap();
    assert_eq!(cases.len(), 12);
    for case in cases {
        let record = InstructionRecord::from_json(case.record.to_string().as_bytes()).unwrap();
        let example = encoder(&case.template).encode(&record).unwrap();
        assert_eq!(example.input_ids, case.input_ids, "{}", case.record);
        assert_eq!(example.labels, case.labels, "{}", case.record);
    }
}

#[test]
fn marks_and_prefixes_find_the_same_answers() {
    let marked = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}\
                  {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}\
                  <|im_end|>{% endif %}{% endfor %}\
                  {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let plain = marked
        .replace("{% generation %}", "")
        .replace("{% endgeneration %}", "");
    let record = br#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"},
        {"role": "user", "content": "d"}, {"role": "assistant", "content": "e"}]}"#;
    let record = InstructionRecord::from_json(record).unwrap();
    let marked = encoder(marked).encode(&record).unwrap();
    assert_eq!(marked, encoder(&plain).encode(&record).unwrap());
    assert!(marked.learned_tokens() > 4);
}

#[test]
fn what_a_template_refuses_is_said_in_its_words() {
    let encoder = encoder("{{ raise_exception('roles must alternate') }}");
    let record = br#"{"messages": [{"role": "user", "content": "a"}]}"#;
    let record = InstructionRecord::from_json(record).unwrap();
    let error = encoder.encode(&record).unwrap_err();
    assert!(error.contains("roles must alternate"), "{error}");
}
