//! Continues prompts with a model from a Hugging Face folder, such as the one that `train` writes.
//! The text goes to stdout, the speed to stderr.
//!
//! ```text
//! cargo xtask example generate --model runs/tiny/model --stream \
//!     --prompt "fn main() {" --max-new-tokens 200 --temperature 0.8 --top-p 0.95 --seed 1
//! cargo xtask example generate --model DIR --prompt-ids 1,2,3 --print-ids --temperature 0
//! cargo xtask example generate --model DIR --prompt "Once" --quantize nf4 --quantize-head int8
//! cargo xtask example generate --model DIR --batch-file prompts.txt --cache paged
//! ```

use std::fs::read_to_string;
use std::io::{Write, stdout};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::{Parser, ValueEnum};
use overdrive::constraints::{GrammarConstraint, GrammarVocabulary};
use overdrive::generation::{
    ChoiceConstraint, Constraint, GenerateOptions, GenerateOutput, GenerationConfig, Tokenizer,
    generate_with_options,
};
use overdrive::transformer::CausalLm;
use overdrive_examples::{GenerationFlags, ModelFlags};

/// Continues prompts with a model from a Hugging Face folder
///
/// What a flag does not say is as the folder's generation_config.json says, else greedy.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// Text to continue
    #[arg(long, group = "input")]
    prompt: Option<String>,
    /// Token ids to continue, separated by commas
    #[arg(long, group = "input", value_delimiter = ',')]
    prompt_ids: Option<Vec<i64>>,
    /// Prompts, one a line, continued together
    #[arg(long, group = "input")]
    batch_file: Option<PathBuf>,
    /// Print the new token ids, separated by commas, instead of text
    #[arg(long, conflicts_with = "stream")]
    print_ids: bool,
    /// Print text as it comes
    #[arg(long, conflicts_with = "batch_file")]
    stream: bool,
    /// How keys and values are kept [default: growing; paged for prompts of different lengths]
    #[arg(long, value_enum)]
    cache: Option<Cache>,
    /// Tokens that a sliding cache keeps, of a model without windows of its own
    #[arg(long)]
    window: Option<i64>,
    /// First tokens that a sliding cache keeps besides; with a few of them text goes on without end
    #[arg(long, default_value_t = 0)]
    sinks: i64,
    /// A smaller model of the same vocabulary, whose guesses the model checks
    #[arg(long)]
    assistant_model: Option<PathBuf>,
    /// The answer is one of these texts; give it for each
    #[arg(long, group = "constraint")]
    choice: Vec<String>,
    /// The answer matches this regular expression
    #[arg(long, group = "constraint")]
    regex: Option<String>,
    /// The answer is JSON that fits the schema in this file
    #[arg(long, group = "constraint")]
    json_schema: Option<PathBuf>,
    #[command(flatten)]
    generation: GenerationFlags,
}

#[derive(Clone, Copy, ValueEnum)]
enum Cache {
    Growing,
    Static,
    Sliding,
    Int8,
    Int4,
    Paged,
    None,
}

fn main() -> ExitCode {
    overdrive_examples::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let mut config = flags.generation.config(&flags.model.folder, 128)?;
    config.use_cache = !matches!(flags.cache, Some(Cache::None));
    if let Some(name) = flags.cache.and_then(cache_implementation) {
        config.cache_implementation = Some(name.to_owned());
    }
    config.cache_config.window_length = flags.window.or(config.cache_config.window_length);
    config.cache_config.num_sink_tokens = flags.sinks;
    let model = flags.model.load()?;
    let assistant = flags.assistant_model.as_ref();
    let assistant = assistant
        .map(|folder| flags.model.load_from(folder))
        .transpose()?;
    let by_ids = flags.prompt_ids.is_some() && flags.print_ids;
    let hint = |error| anyhow!("{error}; without a tokenizer use --prompt-ids and --print-ids");
    let tokenizer = (!by_ids)
        .then(|| flags.model.tokenizer().map_err(hint))
        .transpose()?;
    let prompts = prompts(flags, tokenizer.as_ref())?;
    let constraints = match &tokenizer {
        Some(tokenizer) => constraints(flags, tokenizer, &model, &config, prompts.len())?,
        None => Vec::new(),
    };
    let options = GenerateOptions {
        tokenizer: tokenizer.as_ref(),
        assistant_model: assistant.as_ref(),
        constraints,
        ..GenerateOptions::default()
    };
    if flags.stream {
        say(flags.prompt.as_deref().unwrap_or_default())?;
    }
    let output = generate_with_options(&model, &prompts, &config, &options, |token| {
        match flags.stream.then(|| say(token.text)) {
            Some(Err(_)) => ControlFlow::Break(()), // the pipe is closed
            _ => ControlFlow::Continue(()),
        }
    })?;
    print(flags, &output)?;
    eprintln!("{}", output.timings);
    if let Some(guesses) = output.speculation {
        let (accepted, proposed) = (guesses.accepted, guesses.proposed);
        eprintln!("{accepted} of {proposed} guessed tokens were right");
    }
    Ok(())
}

fn cache_implementation(cache: Cache) -> Option<&'static str> {
    match cache {
        Cache::Growing => Some("dynamic"),
        Cache::Static => Some("static"),
        Cache::Sliding => Some("sliding_window"),
        Cache::Int8 => Some("int8"),
        Cache::Int4 => Some("int4"),
        Cache::Paged => Some("paged"),
        Cache::None => None,
    }
}

fn prompts(flags: &Flags, tokenizer: Option<&Tokenizer>) -> Result<Vec<Vec<i64>>> {
    if let Some(ids) = &flags.prompt_ids {
        return Ok(vec![ids.clone()]);
    }
    let texts = match (&flags.prompt, &flags.batch_file) {
        (Some(text), _) => vec![text.clone()],
        (None, Some(path)) => {
            let text = read_to_string(path).with_context(|| path.display().to_string())?;
            text.lines().map(str::to_owned).collect()
        }
        (None, None) => return Err(anyhow!("give --prompt, --prompt-ids or --batch-file")),
    };
    let tokenizer = tokenizer.context("text needs a tokenizer")?;
    let encode = |text: String| -> Result<Vec<i64>> {
        let ids = tokenizer
            .encode(text, true)
            .map_err(|error| anyhow!(error))?;
        Ok(ids.get_ids().iter().map(|&id| id.into()).collect())
    };
    texts.into_iter().map(encode).collect()
}

/// What each answer may be, one for each prompt; none where anything may.
fn constraints(
    flags: &Flags,
    tokenizer: &Tokenizer,
    model: &CausalLm,
    config: &GenerationConfig,
    count: usize,
) -> Result<Vec<Box<dyn Constraint>>> {
    let ends = &config.eos_token_id;
    let vocabulary = || {
        let size = usize::try_from(model.config().vocab_size())?;
        anyhow::Ok(GrammarVocabulary::new(tokenizer, size, ends)?)
    };
    let one: Box<dyn Constraint> = if !flags.choice.is_empty() {
        Box::new(ChoiceConstraint::from_texts(
            tokenizer,
            &flags.choice,
            ends,
        )?)
    } else if let Some(pattern) = &flags.regex {
        Box::new(GrammarConstraint::regex(&vocabulary()?, pattern)?)
    } else if let Some(path) = &flags.json_schema {
        let schema = serde_json::from_str(&read_to_string(path)?)?;
        Box::new(GrammarConstraint::json_schema(&vocabulary()?, &schema)?)
    } else {
        return Ok(Vec::new());
    };
    Ok((0..count).map(|_| one.fork()).collect())
}

/// What was not streamed.
fn print(flags: &Flags, output: &GenerateOutput) -> Result<()> {
    for row in 0..output.sequences.len() {
        if flags.print_ids {
            let ids: Vec<String> = output.new_tokens(row).iter().map(i64::to_string).collect();
            say(&ids.join(","))?;
        } else if !flags.stream {
            say(&output.texts[row])?;
        }
        say("\n")?;
        if let Some(rows) = &output.logprobs {
            for (id, token) in output.new_tokens(row).iter().zip(&rows[row]) {
                say(&format!("{id}\t{:.4}\t{:?}\n", token.logprob, token.top))?;
            }
        }
    }
    Ok(())
}

/// Writes to stdout at once, for a reader who watches.
fn say(text: &str) -> std::io::Result<()> {
    stdout().write_all(text.as_bytes())?;
    stdout().flush()
}
