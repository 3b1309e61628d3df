//! Tokenizes text once, for any number of training runs: a folder with the tokens and their tokenizer.
//!
//! ```text
//! cargo xtask example tokenize books/ --tokenizer org/name --out tokens/books
//! cargo xtask example tokenize rows.csv --text-column body --tokenizer model.gguf --out tokens/rows
//! cargo xtask train --data tokens/books
//! ```
//!
//! Files are text, JSON Lines, JSON, CSV, TSV and (feature `parquet`) Parquet and Arrow, compressed or not. `train`
//! reads the same tokens from the folder as from the text, and starts without tokenizing.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::Parser;
use overdrive::core::OutputFolder;
use overdrive::datasets::{BuildOptions, load_tokenizer, save_tokenizer};
use overdrive::generation::{ModelFiles, Tokenizer};
use overdrive::trainer::{SampleBy, TrainingArguments, tokenize};
use overdrive_examples::{local_data, local_tokenizer, print_line};

/// The end-of-document token if the tokenizer's files name none.
const END_OF_TEXT: &str = "<|endoftext|>";

/// Tokenizes text files into a folder that `train --data` reads
#[derive(Parser)]
pub(crate) struct Flags {
    /// Files, folders or glob patterns of text, JSON Lines, JSON, CSV, TSV or Parquet
    #[arg(required = true)]
    pub(crate) data: Vec<PathBuf>,
    /// tokenizer.json, folder of a model, GGUF file, or name on the Hugging Face hub
    #[arg(long, value_name = "MODEL")]
    pub(crate) tokenizer: PathBuf,
    /// Output folder for text.tokens and the tokenizer
    #[arg(long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Field of the records that contains the text
    #[arg(long, value_name = "NAME", default_value = "text")]
    pub(crate) text_column: String,
    /// Treat each line of a text file as a document, instead of the whole file
    #[arg(long)]
    pub(crate) lines: bool,
    /// Skip documents that equal an earlier one
    #[arg(long)]
    pub(crate) remove_duplicates: bool,
    /// Token after each document, or `none` [default: the tokenizer's `eos_token`, else <|endoftext|> if it exists]
    #[arg(long, value_name = "TOKEN")]
    pub(crate) end_of_document: Option<String>,
    /// Token before each document [default: none]
    #[arg(long, value_name = "TOKEN")]
    pub(crate) begin_of_document: Option<String>,
    /// Number of threads [default: one per core]
    #[arg(long)]
    pub(crate) threads: Option<usize>,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| {
        let out = run(&Flags::parse(), |line| print_line(line))?;
        print_line(format_args!(
            "written     {}; train with --data {0}",
            out.display()
        ));
        anyhow::Ok(())
    })
}

/// Tokenizes, passes log lines to `say`, and returns the folder.
pub(crate) fn run(flags: &Flags, mut say: impl FnMut(&str)) -> Result<PathBuf> {
    let path = local_tokenizer(&flags.tokenizer)?;
    let inputs = [("--tokenizer", path.as_path())];
    let output = OutputFolder::check("tokenize", "--out", &flags.out, &inputs)?;
    let (tokenizer, eos_token) = tokenizer_of(&path)?;
    let end_of_document = match flags.end_of_document.as_deref() {
        Some("none") => None,
        Some(token) => Some(token.to_owned()),
        None => eos_token.or_else(|| {
            let known = tokenizer.token_to_id(END_OF_TEXT).is_some();
            known.then(|| END_OF_TEXT.to_owned())
        }),
    };
    say(&format!(
        "tokenizer   {} tokens, documents end with {}",
        tokenizer.get_vocab_size(true),
        end_of_document.as_deref().unwrap_or("no token"),
    ));
    let arguments = TrainingArguments {
        data: local_data(&flags.data)?,
        dataset_text_field: flags.text_column.clone(),
        sample_by: match flags.lines {
            true => SampleBy::Line,
            false => SampleBy::Document,
        },
        remove_duplicates: flags.remove_duplicates,
        ..TrainingArguments::default()
    };
    let options = BuildOptions {
        end_of_document: end_of_document.clone(),
        begin_of_document: flags.begin_of_document.clone(),
        threads: flags.threads,
        ..BuildOptions::default()
    };
    let output = output.begin()?;
    let path = output.path().join("text.tokens");
    let (store, report) = tokenize(&arguments, &tokenizer, &options, &path, &mut say)?;
    if store.is_empty() {
        bail!("the text has no tokens; give other files or another `--text-column`");
    }
    let context = usize::try_from(arguments.context_length)?;
    save_tokenizer(
        output.path(),
        &tokenizer,
        end_of_document.as_deref(),
        context,
    )?;
    let (tokens, bytes) = (report.tokens as f64, report.text_bytes as f64);
    let seconds = report.elapsed.as_secs_f64();
    say(&format!(
        "tokens      {} of {} documents, {:.2} bytes of text per token, {} bytes on disk per token",
        report.tokens,
        report.documents,
        bytes / tokens,
        store.width().bytes(),
    ));
    say(&format!(
        "time        {seconds:.2} s, {:.1} MB/s, {:.2}M tokens/s",
        bytes / 1e6 / seconds,
        tokens / 1e6 / seconds,
    ));
    // Not every system renames a file that is mapped.
    drop(store);
    output.finish()?;
    Ok(flags.out.clone())
}

/// Returns the tokenizer in a `tokenizer.json`, a folder or a GGUF file, and the end-of-text token that the files name.
fn tokenizer_of(path: &Path) -> Result<(Tokenizer, Option<String>)> {
    if path
        .extension()
        .is_some_and(|extension| extension == "json")
    {
        return Ok((load_tokenizer(path)?, None));
    }
    let files = ModelFiles::open(path)?;
    let tokenizer = files.tokenizer()?;
    let eos_token = files.special_token("eos_token")?;
    // The configuration may name a token that the tokenizer does not have.
    let eos_token = eos_token.filter(|token| tokenizer.token_to_id(token).is_some());
    Ok((tokenizer, eos_token))
}
