//! Instruction data: the tokens, and the labels that enter the loss.

use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use overdrive_datasets::{
    ChatFormat, ChatMessage, Dataset, EncodeOptions, Error, ExampleCache, IGNORE_INDEX,
    InstructionDataset, InstructionEncoder, InstructionOptions, InstructionRecord, OnBadRecord,
    PackPlan, RangeSource, RenderedChat, SequenceRows, Sha256Digest, TokenizedExample,
    register_source,
};
use serde_json::{Value, json};

const END: &str = "<|endoftext|>";

fn encoder(options: EncodeOptions) -> InstructionEncoder {
    let tokenizer = crate::common::tokenizer();
    let end = tokenizer.token_to_id(END);
    assert!(end.is_some());
    InstructionEncoder::new(tokenizer, None, end, options).unwrap()
}

/// A template `<role>content</role>` that does not mark the answers.
struct Tags {
    /// If `true`, the assistant's messages before the last one are left out, as templates do with reasoning.
    forgets: bool,
}

impl ChatFormat for Tags {
    fn render(
        &self,
        messages: &[ChatMessage],
        _tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<RenderedChat, String> {
        let mut text = String::new();
        for (index, message) in messages.iter().enumerate() {
            let role = message["role"].as_str().unwrap();
            if role == "nobody" {
                return Err("roles must be user or assistant".to_owned());
            }
            let content = message["content"].as_str().unwrap();
            let forgotten = self.forgets && role == "assistant" && index + 1 < messages.len();
            let content = if forgotten { "…" } else { content };
            text += &format!("<{role}>{content}</{role}>");
        }
        if add_generation_prompt {
            text += "<assistant>";
        }
        Ok(RenderedChat {
            text,
            answers: None,
        })
    }
}

fn with_tags(forgets: bool, options: EncodeOptions) -> InstructionEncoder {
    let chat: Arc<dyn ChatFormat> = Arc::new(Tags { forgets });
    InstructionEncoder::new(crate::common::tokenizer(), Some(chat), None, options).unwrap()
}

fn record(json: &Value) -> InstructionRecord {
    InstructionRecord::from_json(json.to_string().as_bytes()).unwrap()
}

/// Returns the text of all tokens, and that of the learned ones.
fn texts(encoder: &InstructionEncoder, example: &TokenizedExample) -> (String, String) {
    let decode = |ids: Vec<u32>| encoder.tokenizer().decode(&ids, false).unwrap();
    let learned = example
        .labels
        .iter()
        .filter(|&&label| label != IGNORE_INDEX);
    for (id, label) in example.input_ids.iter().zip(&example.labels) {
        assert!(label == id || *label == IGNORE_INDEX);
    }
    (
        decode(example.input_ids.iter().map(|&id| id as u32).collect()),
        decode(learned.map(|&id| id as u32).collect()),
    )
}

fn encoded(encoder: &InstructionEncoder, json: &Value) -> (String, String) {
    texts(encoder, &encoder.encode(&record(json)).unwrap())
}

#[test]
fn a_prompt_is_ignored_by_the_loss_and_the_end_of_its_answer_is_not() {
    let encoder = encoder(EncodeOptions::default());
    let (all, learned) = encoded(
        &encoder,
        &json!({"prompt": "use std", "response": "::fmt;"}),
    );
    assert_eq!(all, "use std::fmt;<|endoftext|>");
    assert_eq!(learned, "::fmt;<|endoftext|>");
    // An end that is there already is not doubled, and is learned.
    let given = json!({"prompt": "use std", "response": "::fmt;<|endoftext|>"});
    assert_eq!(encoded(&encoder, &given), (all, learned));
}

#[test]
fn a_token_with_a_byte_of_the_answer_enters_the_loss() {
    let encoder = encoder(EncodeOptions::default());
    // Some of these are cut inside a token; whatever the tokens are, no letter of the answer is left
    // unlearned.
    for (prompt, response) in [
        ("x: ", "u64"),
        ("let x", " = 1;"),
        ("pub f", "n main() {}"),
        ("é", "ü🦀"),
    ] {
        let json = json!({"prompt": prompt, "response": response});
        let (_, learned) = encoded(&encoder, &json);
        let learned = learned.strip_suffix(END).unwrap();
        assert!(learned.ends_with(response), "{learned:?} {response:?}");
    }
}

#[test]
fn prompts_enter_the_loss_if_the_option_says_so() {
    let options = EncodeOptions {
        completion_only_loss: false,
        assistant_only_loss: false,
        ..EncodeOptions::default()
    };
    let (all, learned) = encoded(
        &encoder(options.clone()),
        &json!({"prompt": "a ", "response": "b"}),
    );
    assert_eq!(all, learned);
    let chat = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]});
    let (all, learned) = encoded(&with_tags(false, options), &chat);
    assert_eq!(
        (all.as_str(), &learned),
        ("<user>a</user><assistant>b</assistant>", &all)
    );
}

#[test]
fn every_token_of_a_text_enters_the_loss() {
    let (all, learned) = encoded(
        &encoder(EncodeOptions::default()),
        &json!({"text": "fn main() {}"}),
    );
    assert_eq!(
        (all.as_str(), learned.as_str()),
        ("fn main() {}<|endoftext|>", all.as_str())
    );
}

#[test]
fn alpaca_records_are_written_with_alpacas_prompt() {
    let encoder = encoder(EncodeOptions::default());
    let with_input = json!({"instruction": "Add.", "input": "2 and 2", "output": "4"});
    let (all, learned) = encoded(&encoder, &with_input);
    assert!(all.starts_with("Below is an instruction that describes a task, paired with an input"));
    assert!(all.ends_with(
        "### Instruction:\nAdd.\n\n### Input:\n2 and 2\n\n### Response:\n4<|endoftext|>"
    ));
    assert_eq!(learned, "4<|endoftext|>");
    let (all, _) = encoded(&encoder, &json!({"instruction": "Hi.", "output": "Ho."}));
    assert!(all.ends_with("request.\n\n### Instruction:\nHi.\n\n### Response:\nHo.<|endoftext|>"));
}

#[test]
fn the_prompt_is_written_with_the_prompt_template_and_the_system_prompt() {
    let encoder = encoder(EncodeOptions {
        prompt_template: "Q: {prompt}\nA: ".to_owned(),
        ..EncodeOptions::default()
    });
    let (all, learned) = encoded(
        &encoder,
        &json!({"system": "Be brief.", "prompt": "2+2?", "response": "4"}),
    );
    assert_eq!(all, "Be brief.\n\nQ: 2+2?\nA: 4<|endoftext|>");
    assert!(learned.ends_with("4<|endoftext|>") && !learned.contains('?'));
}

#[test]
fn without_a_template_every_answer_of_a_conversation_and_its_end_enter_the_loss() {
    let encoder = encoder(EncodeOptions::default());
    let (all, learned) = encoded(
        &encoder,
        &json!({"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"},
            {"role": "user", "content": "3+3?"}, {"role": "assistant", "content": "6"},
        ]}),
    );
    assert_eq!(
        all,
        "### System:\nBe brief.\n\n### User:\n2+2?\n\n### Assistant:\n4<|endoftext|>\n### User:\n3+3?\n\n\
         ### Assistant:\n6<|endoftext|>"
    );
    assert_eq!(learned, "4<|endoftext|>6<|endoftext|>");
}

#[test]
fn answers_are_found_by_rendering_prefixes_if_a_template_marks_none() {
    let encoder = with_tags(false, EncodeOptions::default());
    let turns = json!([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
    ]);
    let (_, learned) = encoded(&encoder, &json!({"messages": turns}));
    assert_eq!(learned, "b</assistant>d</assistant>");
    // A prompt that is a conversation: only what follows it is learned.
    let parts = json!({"prompt": turns.as_array().unwrap()[..3], "completion": turns.as_array().unwrap()[3..]});
    assert_eq!(encoded(&encoder, &parts).1, "d</assistant>");
    // A prompt and a response become a conversation.
    let (all, learned) = encoded(
        &encoder,
        &json!({"prompt": "q", "response": "r", "system": "s"}),
    );
    assert_eq!(
        all,
        "<system>s</system><user>q</user><assistant>r</assistant>"
    );
    assert_eq!(learned, "r</assistant>");
    let (all, _) = encoded(
        &encoder,
        &json!({"instruction": "i", "input": "m", "output": "o"}),
    );
    assert_eq!(all, "<user>i\n\nm</user><assistant>o</assistant>");
}

#[test]
fn system_and_history_beside_a_record_are_written_in_each_form() {
    let tags = with_tags(false, EncodeOptions::default());
    let system = "<system>s</system>";
    for record in [
        json!({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}], "system": "s"}),
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}], "system": "s"}),
        json!({"prompt": [{"role": "user", "content": "q"}],
            "completion": [{"role": "assistant", "content": "r"}], "system": "s"}),
        json!({"prompt": "q", "response": "r", "system": "s"}),
        json!({"instruction": "q", "output": "r", "system": "s"}),
        json!({"instruction": "q", "output": "r", "system_prompt": "s"}),
    ] {
        let (all, learned) = encoded(&tags, &record);
        assert_eq!(
            all,
            format!("{system}<user>q</user><assistant>r</assistant>"),
            "{record}"
        );
        assert_eq!(learned, "r</assistant>", "{record}");
    }
    // The answers of the history are learned too, as in LLaMA-Factory.
    let turns = json!([["a", "b"], ["c", "d"]]);
    for record in [
        json!({"instruction": "q", "output": "r", "system": "s", "history": turns}),
        json!({"prompt": "q", "response": "r", "system": "s", "history": turns}),
    ] {
        let (all, learned) = encoded(&tags, &record);
        let before = "<user>a</user><assistant>b</assistant><user>c</user><assistant>d</assistant>";
        let expected = format!("{system}{before}<user>q</user><assistant>r</assistant>");
        assert_eq!(all, expected, "{record}");
        assert_eq!(
            learned, "b</assistant>d</assistant>r</assistant>",
            "{record}"
        );
    }
    // Without a template a system prompt takes the place of Alpaca's, and a history has headings.
    let plain = encoder(EncodeOptions::default());
    let (all, learned) = encoded(
        &plain,
        &json!({"instruction": "q", "output": "r", "system": "s"}),
    );
    assert_eq!(
        all,
        "s\n\n### Instruction:\nq\n\n### Response:\nr<|endoftext|>"
    );
    assert_eq!(learned, "r<|endoftext|>");
    let (all, _) = encoded(
        &plain,
        &json!({"instruction": "q", "output": "r", "history": [["a", "b"]]}),
    );
    assert_eq!(
        all,
        "### User:\na\n\n### Assistant:\nb<|endoftext|>\n### User:\nq\n\n### Assistant:\nr<|endoftext|>"
    );
}

#[test]
fn messages_without_weight_do_not_enter_the_loss() {
    let tags = |options| with_tags(false, options);
    let turns = |key: &str, value: Value| {
        let mut turns = json!([
            {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        ]);
        turns[1][key] = value;
        json!({"messages": turns})
    };
    for (key, value) in [
        ("weight", json!(0)),
        ("weight", json!(0.0)),
        ("train", json!(false)),
        ("training", json!(false)),
        ("loss", json!(false)),
    ] {
        let record = turns(key, value);
        let (all, learned) = encoded(&tags(EncodeOptions::default()), &record);
        assert_eq!(
            all,
            "<user>a</user><assistant>b</assistant><user>c</user><assistant>d</assistant>"
        );
        assert_eq!(learned, "d</assistant>", "{record}");
        let (_, learned) = encoded(&encoder(EncodeOptions::default()), &record);
        assert_eq!(learned, "d<|endoftext|>", "{record}");
    }
    let (_, learned) = encoded(&tags(EncodeOptions::default()), &turns("weight", json!(1)));
    assert_eq!(learned, "b</assistant>d</assistant>");
    // Where all of a conversation is learned, the answer is left out of it.
    let whole = EncodeOptions {
        assistant_only_loss: false,
        ..EncodeOptions::default()
    };
    let record = turns("weight", json!(0));
    let (_, learned) = encoded(&tags(whole.clone()), &record);
    assert_eq!(
        learned,
        "<user>a</user><assistant><user>c</user><assistant>d</assistant>"
    );
    let asked = json!({"messages": [{"role": "user", "content": "a", "weight": 0}, {"role": "assistant", "content": "b"}]});
    assert_eq!(
        encoded(&tags(EncodeOptions::default()), &asked).1,
        "b</assistant>"
    );
    let error = tags(whole).encode(&self::record(&asked)).unwrap_err();
    assert!(error.contains("set assistant_only_loss = true"), "{error}");
    // A record of which nothing is left has no answer.
    let none = json!({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]});
    let example = tags(EncodeOptions::default())
        .encode(&self::record(&none))
        .unwrap();
    assert_eq!(example.learned_tokens(), 0);
}

#[test]
fn tools_reach_the_template_in_each_form_and_are_refused_without_one() {
    /// Writes the names of the tools before the messages.
    struct Named;
    impl ChatFormat for Named {
        fn render(
            &self,
            messages: &[ChatMessage],
            tools: Option<&Value>,
            add_generation_prompt: bool,
        ) -> Result<RenderedChat, String> {
            let mut rendered =
                Tags { forgets: false }.render(messages, None, add_generation_prompt)?;
            rendered
                .text
                .insert_str(0, &tools.map(Value::to_string).unwrap_or_default());
            Ok(rendered)
        }
    }
    let chat: Arc<dyn ChatFormat> = Arc::new(Named);
    let named = InstructionEncoder::new(
        crate::common::tokenizer(),
        Some(chat),
        None,
        EncodeOptions::default(),
    )
    .unwrap();
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    for record in [
        json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}], "tools": tools}),
        json!({"prompt": "q", "response": "r", "tools": tools}),
        json!({"instruction": "q", "output": "r", "tools": tools.to_string()}),
        json!({"instruction": "q", "output": "r", "functions": [{"name": "f"}]}),
    ] {
        let (all, learned) = encoded(&named, &record);
        assert_eq!(
            all,
            format!("{tools}<user>q</user><assistant>r</assistant>"),
            "{record}"
        );
        assert_eq!(learned, "r</assistant>", "{record}");
        let error = encoder(EncodeOptions::default())
            .encode(&self::record(&record))
            .unwrap_err();
        assert!(
            error.contains("tools, which need a chat template"),
            "{error}"
        );
    }
    let calls = json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]});
    let error = encoder(EncodeOptions::default())
        .encode(&record(&calls))
        .unwrap_err();
    assert!(
        error.starts_with("message 1 has `tool_calls`, which needs a chat template"),
        "{error}"
    );
}

#[test]
fn a_template_that_rewrites_earlier_answers_is_refused_with_ways_out() {
    let turns = json!([
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
    ]);
    let encoder = with_tags(true, EncodeOptions::default());
    let error = encoder
        .encode(&record(&json!({"messages": turns})))
        .unwrap_err();
    assert!(
        error.contains("message 2") && error.contains("{% generation %}"),
        "{error}"
    );
    let one = json!({"messages": turns.as_array().unwrap()[..2]});
    assert_eq!(encoded(&encoder, &one).1, "b</assistant>");
    let refused = json!({"messages": [{"role": "nobody", "content": "a"}]});
    let error = encoder.encode(&record(&refused)).unwrap_err();
    assert_eq!(error, "roles must be user or assistant");
}

#[test]
fn the_prompt_is_the_text_before_the_last_answer() {
    let encoder = encoder(EncodeOptions {
        completion_only_loss: false,
        ..EncodeOptions::default()
    });
    let asked = |json: &Value| encoder.prompt(&record(json)).unwrap();
    let (text, ids) = asked(&json!({"prompt": "use ", "response": "std"})).unwrap();
    assert_eq!(text, "use ");
    assert!(!ids.is_empty());
    assert_eq!(asked(&json!({"text": "abc"})), None);
}

fn write(dir: &Path, name: &str, lines: &[String]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

/// Returns records whose answers have this many letters.
fn lines(letters: &[usize]) -> Vec<String> {
    let line = |(index, &count): (usize, &usize)| {
        let answer: String = (0..count)
            .map(|at| char::from(b'a' + ((at * 7 + index) % 26) as u8))
            .collect();
        json!({"prompt": format!("{index}: "), "response": answer}).to_string()
    };
    letters.iter().enumerate().map(line).collect()
}

fn open(path: &Path, options: EncodeOptions) -> InstructionDataset {
    InstructionDataset::open([path], encoder(options), InstructionOptions::default()).unwrap()
}

#[test]
fn an_invalid_record_is_an_error_with_its_position_or_counted() {
    let dir = tempfile::tempdir().unwrap();
    let good = lines(&[3, 4]);
    let all = [
        good[0].clone(),
        "{\"prompt\": 1}".to_owned(),
        "{oops".to_owned(),
        good[1].clone(),
    ];
    let path = write(dir.path(), "data.jsonl", &all);
    let open = |on_bad_record| {
        let options = InstructionOptions {
            on_bad_record,
            ..InstructionOptions::default()
        };
        InstructionDataset::open([&path], encoder(EncodeOptions::default()), options)
    };
    let error = open(OnBadRecord::Stop).unwrap_err().to_string();
    let position = format!("data.jsonl, line 2 (byte {})", good[0].len() + 1);
    assert!(
        error.contains(&position) && error.contains("neither `response`"),
        "{error}"
    );

    let data = open(OnBadRecord::Skip).unwrap();
    assert_eq!(
        (data.len(), data.report().broken, data.report().records),
        (2, 2, 4)
    );
    assert!(data.report().to_string().contains(&position));
}

/// A file on a server, in memory, whose records after the first cannot be read while the server is down.
#[derive(Debug, Default)]
struct Object {
    bytes: Vec<u8>,
    is_down: AtomicBool,
    announced: Mutex<Vec<Range<u64>>>,
}

impl RangeSource for Object {
    fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn version(&self) -> &str {
        "1"
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> overdrive_datasets::Result<()> {
        if offset > 0 && self.is_down.load(Ordering::SeqCst) {
            return Err(Error::Remote {
                path: "https://host/instruction.jsonl".into(),
                problem: "the server does not answer".to_owned(),
            });
        }
        out.copy_from_slice(&self.bytes[offset as usize..][..out.len()]);
        Ok(())
    }

    fn prefetch(&self, ranges: &[Range<u64>]) {
        self.announced.lock().unwrap().extend_from_slice(ranges);
    }

    fn check_unchanged(&self) -> overdrive_datasets::Result<()> {
        Ok(())
    }
}

fn object(url: &str, lines: &[String]) -> Arc<Object> {
    let object = Arc::new(Object {
        bytes: (lines.join("\n") + "\n").into_bytes(),
        ..Object::default()
    });
    register_source(url, Arc::clone(&object) as Arc<dyn RangeSource>);
    object
}

#[test]
fn a_failure_of_the_server_is_not_an_invalid_record() {
    let dir = tempfile::tempdir().unwrap();
    let url = "https://host/instruction.jsonl";
    let object = object(url, &lines(&[3, 4, 5]));
    object.is_down.store(true, Ordering::SeqCst);
    let options = InstructionOptions {
        on_bad_record: OnBadRecord::Skip,
        ..InstructionOptions::default()
    };
    let cache = ExampleCache {
        folder: dir.path().to_owned(),
        format: Sha256Digest::of(b"plain"),
    };
    let encoder = || encoder(EncodeOptions::default());
    let error = InstructionDataset::open([url], encoder(), options).unwrap_err();
    assert!(matches!(error, Error::Remote { .. }), "{error}");
    let cached = || InstructionDataset::open_cached([url], encoder(), options, &cache);
    let error = cached().unwrap_err();
    assert!(matches!(error, Error::Remote { .. }), "{error}");
    object.is_down.store(false, Ordering::SeqCst);
    assert_eq!(cached().unwrap().len(), 3);
}

#[test]
fn rows_of_packed_examples_announce_the_records_of_their_sequences() {
    let url = "https://host/announced.jsonl";
    let all = lines(&[3, 4, 5, 6]);
    let object = object(url, &all);
    let options = InstructionOptions::default();
    let data = InstructionDataset::open([url], encoder(EncodeOptions::default()), options).unwrap();
    let plan = PackPlan::one_each(data.lengths(), 64).unwrap();
    let rows = SequenceRows::new(data, Arc::new(plan));
    object.announced.lock().unwrap().clear();
    rows.prefetch(&[3, 1, 99]);
    let starts: Vec<u64> = object
        .announced
        .lock()
        .unwrap()
        .iter()
        .map(|range| range.start)
        .collect();
    let start =
        |record: usize| -> u64 { all[..record].iter().map(|line| line.len() as u64 + 1).sum() };
    assert_eq!(starts, [start(1), start(3)]);
}

#[test]
fn long_records_are_truncated_and_those_without_an_answer_counted() {
    let dir = tempfile::tempdir().unwrap();
    let long_prompt = json!({"prompt": "0123456789 ".repeat(20), "response": "x"}).to_string();
    let empty = json!({"messages": [{"role": "user", "content": "a"}]}).to_string();
    let mut all = lines(&[2, 90]);
    all.extend([long_prompt, empty]);
    let path = write(dir.path(), "data.jsonl", &all);
    let data = open(
        &path,
        EncodeOptions {
            max_seq_length: 24,
            ..EncodeOptions::default()
        },
    );
    let report = data.report();
    assert_eq!(
        (
            report.records,
            report.kept,
            report.truncated,
            report.without_answer
        ),
        (4, 2, 1, 2)
    );
    assert_eq!((data.lengths()[1], report.longest), (24, 24));
    let examples: Vec<_> = (0..2).map(|index| data.get(index).unwrap()).collect();
    let sum =
        |count: fn(&TokenizedExample) -> usize| examples.iter().map(count).sum::<usize>() as u64;
    assert_eq!(report.tokens, sum(|example| example.input_ids.len()));
    assert_eq!(report.learned_tokens, sum(TokenizedExample::learned_tokens));
    // The end of text is cut off with the rest of the answer, and learned where it is there.
    assert!(examples[1].labels[23] != IGNORE_INDEX && examples[1].truncated);
}

#[test]
fn data_without_an_answer_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), "data.jsonl", &[]);
    let encoder = encoder(EncodeOptions::default());
    let error = InstructionDataset::open([&path], encoder, InstructionOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("there are no records") && error.starts_with("no data found in "),
        "{error}"
    );
}

#[test]
fn folders_and_arrays_are_read_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let all = lines(&[3, 4, 5, 6]);
    write(dir.path(), "b.jsonl", &all[2..]);
    std::fs::write(
        dir.path().join("a.json"),
        format!("[{},\n {}]", all[0], all[1]),
    )
    .unwrap();
    std::fs::write(dir.path().join("c.txt"), "not data").unwrap();
    let folder = open(dir.path(), EncodeOptions::default());
    let path = write(dir.path(), "c.jsonl", &all);
    let flat = open(&path, EncodeOptions::default());
    assert_eq!(folder.len(), 4);
    for index in 0..4 {
        assert_eq!(folder.get(index).unwrap(), flat.get(index).unwrap());
    }
}

#[test]
fn folders_with_compressed_files_and_patterns_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let all = lines(&[3, 4, 5]);
    write(dir.path(), "a.jsonl", &all[..1]);
    // A block of text, and the empty one at the end of a file of bgzip.
    let block = |text: &str| {
        let mut deflate = flate2::write::DeflateEncoder::new(Vec::new(), Default::default());
        deflate.write_all(text.as_bytes()).unwrap();
        let packed = deflate.finish().unwrap();
        let mut checksum = flate2::Crc::new();
        checksum.update(text.as_bytes());
        let mut block = b"\x1f\x8b\x08\x04\0\0\0\0\0\xff\x06\0BC\x02\0".to_vec();
        block.extend_from_slice(&u16::try_from(packed.len() + 25).unwrap().to_le_bytes());
        block.extend_from_slice(&packed);
        block.extend_from_slice(&checksum.sum().to_le_bytes());
        block.extend_from_slice(&u32::try_from(text.len()).unwrap().to_le_bytes());
        block
    };
    let packed = [block(&format!("{}\n{}\n", all[1], all[2])), block("")].concat();
    std::fs::write(dir.path().join("b.jsonl.gz"), packed).unwrap();
    std::fs::write(dir.path().join(".hidden.jsonl"), "not data").unwrap();
    let folder = open(dir.path(), EncodeOptions::default());
    let flat = open(
        &write(dir.path(), "c.jsonl", &all),
        EncodeOptions::default(),
    );
    let pattern = open(&dir.path().join("[ab].jsonl*"), EncodeOptions::default());
    assert_eq!((folder.len(), pattern.len()), (3, 3));
    for index in 0..3 {
        assert_eq!(folder.get(index).unwrap(), flat.get(index).unwrap());
        assert_eq!(pattern.get(index).unwrap(), flat.get(index).unwrap());
    }
}

#[test]
fn splits_are_disjoint_complete_and_decided_by_the_seed() {
    let dir = tempfile::tempdir().unwrap();
    let path = write(dir.path(), "data.jsonl", &lines(&[3; 40]));
    let data = open(&path, EncodeOptions::default());
    let (train, held) = data.split(0.25, 7).unwrap();
    assert_eq!((train.len(), held.len()), (30, 10));
    let mut seen: Vec<_> = (0..30).map(|i| train.get(i).unwrap().input_ids).collect();
    seen.extend((0..10).map(|i| held.get(i).unwrap().input_ids));
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 40);
    let ids = |part: &InstructionDataset| part.get(0).unwrap().input_ids;
    assert_eq!(ids(&data.split(0.25, 7).unwrap().1), ids(&held));
    assert!(data.split(1.0, 7).is_err());
    let whole = data.split(0.0, 7).unwrap();
    assert_eq!((whole.0.len(), whole.1.len()), (40, 0));
}
