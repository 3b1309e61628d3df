//! Continues prompts with a model from a GGUF file or a Hugging Face folder, such as the one that `train` writes. In an
//! encoder-decoder model (T5, BART) the encoder reads the prompts and the decoder generates the answers. The text goes
//! to stdout, the speed to stderr.
//!
//! ```text
//! cargo xtask example generate --model runs/tiny/model --stream \
//!     --prompt "fn main() {" --max-new-tokens 200 --temperature 0.8 --top-p 0.95 --seed 1
//! cargo xtask example generate --model SmolLM2-135M-Instruct.Q4_1.gguf --prompt "The capital of France is"
//! cargo xtask example generate --model PATH --prompt-ids 1,2,3 --print-ids --temperature 0
//! cargo xtask example generate --model PATH --prompt "Once" --quantize nf4 --quantize-head int8
//! cargo xtask example generate --model PATH --batch-file prompts.txt --cache paged
//! cargo run --release -p overdrive-examples --features image --example generate -- --model QWEN3-VL --image photo.png \
//!     --prompt "<|vision_start|><|image_pad|><|vision_end|>A photo of"
//! ```

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::Parser;
use overdrive::core::text;
use overdrive::generation::{
    GenerateOptions, GenerateOutput, GenerationConfig, GenerationModel, ImagePatches, Tokenizer,
    generate_with_options, warm_up,
};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive_examples::{
    CacheFlags, CompletionFlags, ConstraintFlags, ImageFlags, ModelFlags, assistant_tokenizer,
    generation_config, grids, local_model, print_error_line, print_now,
};

/// Continues prompts with a model from a GGUF file or a Hugging Face folder
///
/// Options that are not given as flags are taken from the folder's generation_config.json or the sampling defaults of a
/// GGUF file; without either, decoding is greedy.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// Text to continue
    #[arg(long, group = "input")]
    prompt: Option<String>,
    /// Prompt as token ids, separated by commas
    #[arg(long, group = "input", value_delimiter = ',', value_parser = token_id)]
    prompt_ids: Option<Vec<i64>>,
    /// File with one prompt per line; the prompts form a batch
    #[arg(long, group = "input")]
    batch_file: Option<PathBuf>,
    /// Print the new token ids, separated by commas, instead of text
    #[arg(long, conflicts_with = "stream")]
    print_ids: bool,
    /// Print the text as it is generated
    #[arg(long, conflicts_with_all = ["batch_file", "num_return_sequences"])]
    stream: bool,
    #[command(flatten)]
    images: ImageFlags,
    #[command(flatten)]
    cache: CacheFlags,
    /// Smaller model with the same vocabulary, by path or name, for assisted (speculative) decoding
    #[arg(long)]
    assistant_model: Option<PathBuf>,
    #[command(flatten)]
    constraint: ConstraintFlags,
    #[command(flatten)]
    generation: CompletionFlags,
}

fn token_id(text: &str) -> Result<i64, &'static str> {
    let id = text.trim().parse();
    id.map_err(|_| "it must be token ids separated by commas")
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    // Makes libtorch's operators flush subnormal numbers too: each one costs a hundred cycles on Intel's processors.
    set_flush_denormals(true);
    ensure!(
        flags.generation.num_assistant_tokens.is_none() || flags.assistant_model.is_some(),
        "`--num-assistant-tokens` has no effect without an assistant; add `--assistant-model MODEL`, or use \
         `--prompt-lookup-num-tokens`"
    );
    let source = flags.model.local()?;
    let mut config = generation_config(&flags.generation, &source.files()?, 128)?;
    flags.cache.apply(&mut config)?;
    // Before the weights: what is wrong with the tokenizer or the prompts is found at once.
    let by_ids = flags.prompt_ids.is_some() && flags.print_ids;
    let hint = |error| {
        anyhow!(
            "{error}; give another tokenizer with --tokenizer, or use --prompt-ids and --print-ids"
        )
    };
    let tokenizer = (!by_ids)
        .then(|| source.tokenizer().map_err(hint))
        .transpose()?;
    let prompts = prompts(flags, tokenizer.as_ref())?;
    let began = Instant::now();
    if source.files()?.is_seq2seq()? {
        let model = source.load_seq2seq()?;
        return answer(
            flags,
            (&model, began),
            (&prompts, &[]),
            &config,
            tokenizer.as_ref(),
        );
    }
    let model = source.load()?;
    CacheFlags::check(&config, &model)?;
    let images = flags.images.load(&source.files()?)?;
    let mut prompts = prompts;
    if let Some(vision) = model.config().vision() {
        for prompt in &mut prompts {
            *prompt = vision.expand(prompt, &grids(&images))?;
        }
    }
    let images = vec![images; prompts.len()];
    answer(
        flags,
        (&model, began),
        (&prompts, &images),
        &config,
        tokenizer.as_ref(),
    )
}

/// Continues the prompts with a model whose loading started at `began`, and prints the results.
fn answer(
    flags: &Flags,
    (model, began): (&dyn GenerationModel, Instant),
    (prompts, images): (&[Vec<i64>], &[Vec<ImagePatches>]),
    config: &GenerationConfig,
    tokenizer: Option<&Tokenizer>,
) -> Result<()> {
    let assistant = flags.assistant_model.as_deref();
    let assistant = assistant.map(local_model).transpose()?;
    let assistant = assistant.as_ref();
    let assistant_tokenizer = assistant
        .map(|path| assistant_tokenizer(path))
        .transpose()?
        .flatten();
    let assistant = assistant
        .map(|path| flags.model.load_from(path))
        .transpose()?;
    let mut constraints = Vec::new();
    if let Some(tokenizer) = tokenizer
        && let Some(constraint) = flags
            .constraint
            .build(tokenizer, model.num_logits(), config)?
    {
        constraints.extend(prompts.iter().map(|_| constraint.fork()));
    }
    let options = GenerateOptions {
        tokenizer,
        assistant_model: assistant.as_ref(),
        assistant_tokenizer: assistant_tokenizer.as_ref(),
        constraints,
        images,
        ..GenerateOptions::default()
    };
    // What the first pass loads is not the time of the prompts.
    warm_up(model, prompts, config, &options)?;
    let ready = began.elapsed().as_secs_f64();
    if flags.stream && model.as_causal_lm().is_some() {
        print_now(flags.prompt.as_deref().unwrap_or_default())?;
    }
    let output = generate_with_options(model, prompts, config, &options, |token| {
        match flags.stream.then(|| print_now(token.text)) {
            Some(Err(_)) => ControlFlow::Break(()), // the pipe is closed
            _ => ControlFlow::Continue(()),
        }
    })?;
    print(flags, &output)?;
    print_error_line(format_args!("ready after {ready:.1} s, {}", output.timings));
    if let Some(guesses) = output.speculation {
        let (accepted, proposed) = (guesses.accepted, guesses.proposed);
        print_error_line(format_args!(
            "{accepted} of {proposed} proposed tokens were accepted"
        ));
    }
    Ok(())
}

fn prompts(flags: &Flags, tokenizer: Option<&Tokenizer>) -> Result<Vec<Vec<i64>>> {
    if let Some(ids) = &flags.prompt_ids {
        return Ok(vec![ids.clone()]);
    }
    let texts = match (&flags.prompt, &flags.batch_file) {
        (Some(text), _) => vec![text.clone()],
        (None, Some(path)) => {
            let text = text::read(path)?;
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
    let prompts: Vec<_> = texts.into_iter().map(encode).collect::<Result<_>>()?;
    if let Some(path) = &flags.batch_file
        && let Some(line) = prompts.iter().position(Vec::is_empty)
    {
        bail!(
            "{}, line {}: the line has no tokens; remove it, or give it a prompt",
            path.display(),
            line + 1
        );
    }
    Ok(prompts)
}

/// Prints the results that were not streamed: text or token ids, and the log-probabilities.
fn print(flags: &Flags, output: &GenerateOutput) -> Result<()> {
    for row in 0..output.sequences.len() {
        if flags.print_ids {
            let ids: Vec<String> = output.new_tokens(row).iter().map(i64::to_string).collect();
            print_now(&ids.join(","))?;
        } else if !flags.stream {
            print_now(&output.texts[row])?;
        }
        print_now("\n")?;
        if let Some(rows) = &output.logprobs {
            for (id, token) in output.new_tokens(row).iter().zip(&rows[row]) {
                print_now(&format!("{id}\t{:.4}\t{:?}\n", token.logprob, token.top))?;
            }
        }
    }
    Ok(())
}
