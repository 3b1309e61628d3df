//! Answers a file of conversations: JSON Lines in, JSON Lines out, in the same order. An answer is written as soon as
//! it and all earlier answers are complete, so that an interrupted run leaves complete lines.
//!
//! Each line is a list of messages, or an object with such a list under `messages` and other fields, which are copied
//! to the output. The conversations are batched: a finished conversation makes room for the next, and common prefixes
//! are computed once. A conversation that cannot be answered gets an `error`.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example chat_batch -- --model PATH \
//!     --input questions.jsonl --output answers.jsonl --max-new-tokens 200
//! ```

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, anyhow};
use clap::Parser;
use overdrive::core::text::{Lines, in_one_line};
use overdrive::generation::{Answer, ChatBatchOptions, chat_batch_with, conversation_from_json};
use overdrive::kv_cache::KvCacheDtype;
use overdrive::sys::denormals::set_flush_denormals;
use overdrive_examples::{
    GenerationFlags, JsonLines, ModelFlags, TemplateFlags, generation_config, open_input,
    print_error_line,
};
use serde_json::{Map, Value, json};

/// Answers a file of conversations
///
/// Options that are not given as flags are taken from the folder's generation_config.json or the sampling defaults of a
/// GGUF file; without either, decoding is greedy.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    template: TemplateFlags,
    /// JSON Lines file with one conversation per line; - is stdin
    #[arg(long, default_value = "-")]
    input: PathBuf,
    /// Output file; - is stdout
    #[arg(long, default_value = "-")]
    output: PathBuf,
    /// System message for conversations without one
    #[arg(long)]
    system: Option<String>,
    /// Maximum number of conversations in a batch
    #[arg(long, default_value_t = 64)]
    max_num_seqs: usize,
    /// Maximum length of a conversation with its answer, in tokens; at most the model's context and one generated token,
    /// which the model does not read [default: that, or what fits in the cache]
    #[arg(long)]
    max_model_len: Option<usize>,
    /// Size of the key/value cache in MiB [default: enough for one conversation of maximum length, between 1024 and
    /// 4096]
    #[arg(long)]
    cache_mib: Option<u64>,
    /// Storage of keys and values: auto (the model's dtype), int8 or fp8; in 8 bits the same memory holds two to four times
    /// as many tokens
    #[arg(long, default_value_t)]
    kv_cache_dtype: KvCacheDtype,
    /// Do not capture CUDA graphs: on a GPU, launch the operations of each step one by one
    #[arg(long)]
    enforce_eager: bool,
    #[command(flatten)]
    generation: GenerationFlags,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    // Makes libtorch's operators flush subnormal numbers too: each one costs a hundred cycles on Intel's processors.
    set_flush_denormals(true);
    JsonLines::check("--output", &flags.output, ("--input", &flags.input))?;
    let source = flags.model.local()?;
    let files = source.files()?;
    let config = generation_config(&flags.generation, &files, 256)?;
    let template = flags.template.load(&files, source.adapter.as_deref())?;
    let tokenizer = Arc::new(source.tokenizer()?);
    // Read completely before the model is loaded, so that a broken line is found at once.
    let mut lines = Vec::new();
    let mut conversations = Vec::new();
    for line in read(&flags.input)? {
        let (location, value) = line?;
        let mut messages = conversation_from_json(&value).context(location)?;
        lines.push(value);
        if let Some(system) = &flags.system
            && messages
                .first()
                // A conversation's own system message takes precedence.
                .is_none_or(|first| first.role() != "system")
        {
            messages.insert(0, overdrive::generation::Message::system(system.as_str()));
        }
        conversations.push(messages);
    }

    let began = Instant::now();
    let model = source.load()?;
    let loading = began.elapsed();
    let mut options = ChatBatchOptions::default();
    options.engine.max_num_seqs = flags.max_num_seqs;
    options.engine.max_model_len = flags.max_model_len;
    options.engine.kv_cache_memory_bytes = flags.cache_mib.map(|mib| mib << 20);
    options.engine.kv_cache_dtype = flags.kv_cache_dtype;
    options.engine.enforce_eager = flags.enforce_eager;
    let mut output = JsonLines::create(&flags.output)?;
    let mut answers = 0;
    let mut written = Ok(());
    let mut lines = lines.into_iter();
    let statistics = chat_batch_with(
        &model,
        &tokenizer,
        &template,
        &conversations,
        &config,
        &options,
        |answer| {
            answers += 1;
            let line = lines.next().unwrap_or_default();
            written = output.write(&answered(line, answer));
            match written {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        },
    )?;
    written?;
    print_error_line(format_args!(
        "ready after {:.1} s, {answers} answers, {} tokens, {:.1} tokens/s",
        (loading + statistics.warm_up).as_secs_f64(),
        statistics.generated_tokens,
        statistics.tokens_per_second()
    ));
    Ok(())
}

/// Reads JSON Lines; each value comes with its file and line.
fn read(path: &Path) -> Result<impl Iterator<Item = Result<(String, Value)>>> {
    let (source, name) = open_input(path)?;
    let lines = (1..).zip(Lines::new(source, &name));
    Ok(lines.filter_map(move |(number, line)| {
        let location = format!("{name}, line {number}");
        match line {
            Ok(line) if line.trim().is_empty() => None,
            Ok(line) => {
                let value = serde_json::from_str(&line).map_err(|error| {
                    let error = in_one_line(&error.to_string());
                    anyhow!("{location}: the line is not JSON: {error}")
                });
                Some(value.map(|value| (location, value)))
            }
            Err(error) => Some(Err(error.into())),
        }
    }))
}

/// Returns the line of one conversation with its answer.
fn answered(line: Value, answer: overdrive::generation::Result<Answer>) -> Map<String, Value> {
    // A plain list has no other fields to copy.
    let mut fields = match line {
        Value::Object(fields) => fields,
        list => [("messages".to_owned(), list)].into_iter().collect(),
    };
    // Those of an earlier run, if its output is the input of this one.
    fields.retain(|key, _| !["answer", "reasoning", "error"].contains(&key.as_str()));
    match answer {
        Ok(answer) => {
            if !answer.reasoning.is_empty() {
                fields.insert("reasoning".to_owned(), json!(answer.reasoning));
            }
            fields.insert("answer".to_owned(), json!(answer.text))
        }
        Err(error) => fields.insert("error".to_owned(), json!(error.to_string())),
    };
    fields
}
