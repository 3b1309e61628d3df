//! The cache of encoded examples.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_datasets::{
    ChatFormat, ChatMessage, Dataset, EncodeOptions, ExampleCache, InstructionDataset,
    InstructionEncoder, InstructionOptions, OnBadRecord, RenderedChat, Sha256Digest,
    TokenizedExample, Tokenizer,
};
use serde_json::{Value, json};

/// A template that counts how often it is rendered.
struct Counting(Arc<AtomicUsize>);

impl ChatFormat for Counting {
    fn render(
        &self,
        messages: &[ChatMessage],
        _tools: Option<&Value>,
        add_generation_prompt: bool,
    ) -> Result<RenderedChat, String> {
        self.0.fetch_add(1, Ordering::SeqCst);
        let contents = messages
            .iter()
            .map(|message| message["content"].as_str().unwrap());
        let mut text: String = contents.map(|content| format!("<{content}>")).collect();
        if add_generation_prompt {
            text += "<";
        }
        Ok(RenderedChat {
            text,
            answers: None,
        })
    }
}

/// A run's inputs, which the tests change one at a time.
struct Setting {
    folder: tempfile::TempDir,
    data: PathBuf,
    tokenizer: Tokenizer,
    options: EncodeOptions,
    records: InstructionOptions,
    format: &'static [u8],
    rendered: Arc<AtomicUsize>,
}

impl Setting {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let data = folder.path().join("data.jsonl");
        write(&data, 40);
        Self {
            data,
            folder,
            tokenizer: crate::common::tokenizer(),
            options: EncodeOptions {
                max_seq_length: 24,
                ..EncodeOptions::default()
            },
            records: InstructionOptions {
                on_bad_record: OnBadRecord::Skip,
                ..InstructionOptions::default()
            },
            format: b"template 1",
            rendered: Arc::default(),
        }
    }

    fn encoder(&self) -> InstructionEncoder {
        let chat: Arc<dyn ChatFormat> = Arc::new(Counting(Arc::clone(&self.rendered)));
        InstructionEncoder::new(
            self.tokenizer.clone(),
            Some(chat),
            None,
            self.options.clone(),
        )
        .unwrap()
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    /// Opens the data, and returns it with the number of renderings that took.
    fn open(&self) -> (InstructionDataset, usize) {
        let before = self.rendered.load(Ordering::SeqCst);
        let cache = ExampleCache {
            folder: self.cache(),
            format: Sha256Digest::of(self.format),
        };
        let data =
            InstructionDataset::open_cached([&self.data], self.encoder(), self.records, &cache)
                .unwrap();
        all(&data);
        (data, self.rendered.load(Ordering::SeqCst) - before)
    }

    fn uncached(&self) -> InstructionDataset {
        InstructionDataset::open([&self.data], self.encoder(), self.records).unwrap()
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.cache()).unwrap();
        let paths = entries.map(|entry| entry.unwrap().path());
        let mut files: Vec<PathBuf> = paths
            .filter(|path| path.extension().is_some_and(|end| end == "examples"))
            .collect();
        files.sort();
        files
    }
}

/// Writes questions of different lengths, with a broken record and one without an answer among them.
fn write(path: &Path, count: usize) {
    let mut text = String::new();
    for index in 0..count {
        let answer = "yes ".repeat(index % 11 + 1);
        text += &format!(
            "{}\n",
            json!({"prompt": format!("is {index}?"), "response": answer})
        );
        match index {
            7 => text += "{\"prompt\": \"broken\"}\n",
            9 => text += "{\"prompt\": \"no answer\", \"response\": \"\"}\n",
            _ => {}
        }
    }
    std::fs::write(path, text).unwrap();
}

fn all(data: &InstructionDataset) -> Vec<TokenizedExample> {
    (0..data.len())
        .map(|index| data.get(index).unwrap())
        .collect()
}

#[test]
fn a_second_start_reads_the_same_examples_without_rendering_any() {
    let setting = Setting::new();
    let expected = setting.uncached();
    let (first, rendered) = setting.open();
    assert!(rendered > 0);
    let (second, rendered) = setting.open();
    assert_eq!(rendered, 0);
    assert!(!first.was_cached() && second.was_cached());
    for data in [&first, &second] {
        assert_eq!(all(data), all(&expected));
        assert_eq!(data.lengths(), expected.lengths());
        assert_eq!(data.report(), expected.report());
        assert_eq!(data.content_digest(), expected.content_digest());
        assert!(data.cached_bytes().is_some_and(|bytes| bytes > 128));
    }
    assert!(expected.report().truncated > 0);
    assert_eq!(expected.cached_bytes(), None);
    // Splits and subsets read the same file.
    let (train, held) = second.split(0.25, 3).unwrap();
    let (train_expected, held_expected) = expected.split(0.25, 3).unwrap();
    assert_eq!(all(&train), all(&train_expected));
    assert_eq!(all(&held), all(&held_expected));
    let order = [5, 0, 17];
    assert_eq!(
        all(&second.subset(&order).unwrap()),
        all(&expected.subset(&order).unwrap())
    );
    assert!(second.get(second.len()).is_err());
}

#[test]
fn a_change_of_anything_that_decides_the_tokens_makes_a_new_file() {
    let mut setting = Setting::new();
    setting.open();
    let mut files = 1;
    let mut changed = |setting: &Setting, what: &str| {
        let (data, rendered) = setting.open();
        files += 1;
        assert!(rendered > 0, "{what}");
        assert_eq!(setting.files().len(), files, "{what}");
        assert_eq!(all(&data), all(&setting.uncached()), "{what}");
        assert_eq!(setting.open().1, 0, "{what}");
    };
    setting.format = b"template 2";
    changed(&setting, "the template");
    setting.options.max_seq_length = 20;
    changed(&setting, "the length");
    setting.options.completion_only_loss = false;
    changed(&setting, "the loss");
    setting.records.max_records = Some(20);
    changed(&setting, "the number of records");
    setting
        .tokenizer
        .add_tokens([tokenizers::AddedToken::from("yes yes", false)])
        .unwrap();
    changed(&setting, "the tokenizer");
    // The length stays the same, and so does the time of the change.
    let time = std::fs::metadata(&setting.data)
        .unwrap()
        .modified()
        .unwrap();
    let text = std::fs::read_to_string(&setting.data).unwrap();
    std::fs::write(&setting.data, text.replacen("is 3?", "is 4?", 1)).unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(&setting.data)
        .unwrap();
    file.set_modified(time).unwrap();
    changed(&setting, "the content");
}

#[test]
fn a_file_that_was_moved_is_the_same_and_its_errors_name_where_it_is_now() {
    let mut setting = Setting::new();
    let (first, _) = setting.open();
    let moved = setting.folder.path().join("moved.jsonl");
    std::fs::rename(&setting.data, &moved).unwrap();
    setting.data = moved;
    let (second, rendered) = setting.open();
    assert_eq!((rendered, setting.files().len()), (0, 1));
    let message = |data: &InstructionDataset| data.report().first_broken.clone().unwrap();
    assert!(
        message(&first).contains("data.jsonl, line 9"),
        "{}",
        message(&first)
    );
    assert!(
        message(&second).contains("moved.jsonl, line 9"),
        "{}",
        message(&second)
    );
}

#[test]
fn damaged_files_are_made_again() {
    let setting = Setting::new();
    let (first, _) = setting.open();
    let expected = all(&first);
    drop(first);
    let path = setting.files().remove(0);
    let whole = std::fs::read(&path).unwrap();
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 1;
        bytes
    };
    let tokens: usize = expected.iter().map(|example| example.input_ids.len()).sum();
    for (what, bytes) in [
        ("magic", flipped(0)),
        ("version", flipped(8)),
        ("count", flipped(16)),
        ("key", flipped(40)),
        ("a token", flipped(128)),
        ("a label", flipped(128 + 4 * tokens)),
        (
            "an entry",
            flipped(128 + 4 * tokens + tokens.div_ceil(8) + 9),
        ),
        ("the report", flipped(whole.len() - 2)),
        ("cut", whole[..whole.len() - 1].to_vec()),
        ("cut in the header", whole[..100].to_vec()),
        ("empty", Vec::new()),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let (data, rendered) = setting.open();
        assert!(rendered > 0, "{what}");
        assert_eq!(all(&data), expected, "{what}");
        drop(data);
        assert_eq!(std::fs::read(&path).unwrap(), whole, "{what}");
    }
}

#[test]
fn a_start_that_fails_leaves_no_file() {
    let mut setting = Setting::new();
    setting.records.on_bad_record = OnBadRecord::Stop;
    let cache = ExampleCache {
        folder: setting.cache(),
        format: Sha256Digest::UNKNOWN,
    };
    let error = InstructionDataset::open_cached(
        [&setting.data],
        setting.encoder(),
        setting.records,
        &cache,
    );
    let error = error.unwrap_err().to_string();
    assert!(error.contains("data.jsonl, line 9"), "{error}");
    assert!(setting.files().is_empty());
}
