//! A conversation with a model in the terminal.
//!
//! Answers are streamed. Ctrl-C stops an answer; at the prompt it ends the program, as does Ctrl-D.
//! `/reset` starts a new conversation, `/stats` prints the counters of the engine. The cache keeps the
//! conversation, so each turn processes only the new tokens.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example chat -- --model PATH --system "Be brief."
//! cargo run --release -p overdrive-examples --features image --example chat -- --model QWEN3-VL --image photo.png
//! ```

use std::io::{BufRead, stdin};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::Result;
use clap::Parser;
use overdrive::core::Error;
use overdrive::core::text::Lines;
use overdrive::generation::{
    AnswerText, ChatTemplate, ChatTemplateOptions, Engine, EngineConfig, Event, FinishReason,
    GenerationConfig, ImagePatches, Message, ReasoningParser, Request, Tokenizer,
};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::trainer::Interrupt;
use overdrive::transformer::CausalLm;
use overdrive_examples::{
    GenerationFlags, ImageFlags, ModelFlags, TemplateFlags, generation_config, grids,
    print_error_line, print_line, print_now,
};
use serde_json::json;
use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// Chats with a model in the terminal
///
/// Options that are not given as flags are taken from the folder's generation_config.json or the sampling defaults of a
/// GGUF file.
#[derive(Parser)]
pub(crate) struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    template: TemplateFlags,
    /// System message of the conversation
    #[arg(long)]
    system: Option<String>,
    /// Maximum length of the conversation with its answers, in tokens; at most the model's context and one generated
    /// token, which the model does not read [default: that, or what fits in the cache]
    #[arg(long)]
    max_model_len: Option<usize>,
    /// Size of the key/value cache in MiB [default: enough for a conversation of maximum length, between 1024 and 4096]
    #[arg(long)]
    cache_mib: Option<u64>,
    #[command(flatten)]
    images: ImageFlags,
    #[command(flatten)]
    generation: GenerationFlags,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse(), stdin().lock()))
}

/// Answers the lines of `input` until it ends.
pub(crate) fn run(flags: &Flags, input: impl BufRead) -> Result<()> {
    // Makes libtorch's operators flush subnormal numbers too: each one costs a hundred cycles on Intel's processors.
    set_flush_denormals(true);
    let source = flags.model.local()?;
    let files = source.files()?;
    let config = generation_config(&flags.generation, &files, 1024)?;
    let template = flags.template.load(&files, source.adapter.as_deref())?;
    let tokenizer = Arc::new(source.tokenizer()?);
    let images = flags.images.load(&files)?;
    let began = Instant::now();
    let model = source.load()?;
    let engine = EngineConfig {
        max_model_len: flags.max_model_len,
        kv_cache_memory_bytes: flags.cache_mib.map(|mib| mib << 20),
        ..EngineConfig::default()
    };
    let mut chat = Chat {
        engine: Engine::new(&model, engine)?.with_tokenizer(Arc::clone(&tokenizer)),
        config: config.or_end_of_text(&template, &tokenizer),
        tokenizer,
        template,
        images,
        interrupted: Arc::new(AtomicBool::new(false)),
    };
    chat.engine.warm_up()?;
    print_error_line(format_args!(
        "ready after {:.1} s",
        began.elapsed().as_secs_f64()
    ));
    // While an answer is streamed the signal only sets a flag; otherwise it ends the program.
    Interrupt::hand_over(&[SIGINT]);
    let at_prompt = Arc::new(AtomicBool::new(true));
    flag::register_conditional_default(SIGINT, Arc::clone(&at_prompt))?;
    flag::register(SIGINT, Arc::clone(&chat.interrupted))?;

    let opening: Vec<_> = flags
        .system
        .iter()
        .map(|text| Message::system(text.as_str()))
        .collect();
    let mut messages = opening.clone();
    let mut lines = Lines::new(input, "standard input");
    loop {
        print_now("> ")?;
        let line = match lines.next() {
            None => return Ok(print_now("\n")?),
            Some(Ok(line)) => line,
            // The terminal has another encoding, which costs the line and not the conversation.
            Some(Err(error @ Error::Parse { .. })) => {
                print_error_line(format_args!("error: {error}"));
                continue;
            }
            Some(Err(error)) => return Err(error.into()),
        };
        match line.trim() {
            "" => continue,
            "/reset" => messages.clone_from(&opening),
            "/stats" => print_line(format_args!("{}", chat.engine.statistics())),
            word if word.starts_with('/') && !word[1..].contains(['/', ' ']) => {
                print_error_line(format_args!(
                    "error: there is no command {word}; the commands are /reset and /stats"
                ));
            }
            text => {
                // The images belong to the first message of the user.
                messages.push(match messages.len() == opening.len() {
                    true => user_message(text, chat.images.len()),
                    false => Message::user(text),
                });
                at_prompt.store(false, Ordering::SeqCst);
                let answer = chat.answer(&messages);
                at_prompt.store(true, Ordering::SeqCst);
                match answer {
                    Ok(text) => messages.push(text.into()),
                    Err(error) => {
                        // The next turn begins as this one did.
                        print_error_line(format_args!("error: {error}"));
                        messages.pop();
                    }
                }
            }
        }
    }
}

/// Returns a message of the user with some images before the text.
fn user_message(text: &str, images: usize) -> Message {
    if images == 0 {
        return Message::user(text);
    }
    let mut parts = vec![json!({"type": "image"}); images];
    parts.push(json!({"type": "text", "text": text}));
    Message::user("").with("content", parts)
}

/// Prints an answer while it is generated, its reasoning between two marks.
struct Stream {
    parser: ReasoningParser,
    in_reasoning: bool,
}

impl Stream {
    fn new(parser: ReasoningParser) -> Stream {
        Stream {
            parser,
            in_reasoning: false,
        }
    }

    fn print(&mut self, piece: &str) -> std::io::Result<()> {
        let text = self.parser.push(piece);
        self.print_text(&text)
    }

    fn print_text(&mut self, text: &AnswerText) -> std::io::Result<()> {
        if !text.reasoning.is_empty() {
            if !std::mem::replace(&mut self.in_reasoning, true) {
                print_now("<think>\n")?;
            }
            print_now(&text.reasoning)?;
        }
        if !text.content.is_empty() && std::mem::take(&mut self.in_reasoning) {
            print_now("\n</think>\n\n")?;
        }
        print_now(&text.content)
    }

    /// Prints what the parser has held back, and ends the line.
    fn end(&mut self) -> std::io::Result<()> {
        let rest = self.parser.clone().finish();
        self.print_text(&rest)?;
        print_now("\n")
    }
}

struct Chat<'m> {
    engine: Engine<&'m CausalLm>,
    config: GenerationConfig,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    images: Vec<ImagePatches>,
    interrupted: Arc<AtomicBool>,
}

impl Chat<'_> {
    /// Streams the answer and returns its text, up to an interruption.
    fn answer(&mut self, messages: &[Message]) -> Result<AnswerText> {
        let options = ChatTemplateOptions::default();
        let mut prompt = self.template.encode(&self.tokenizer, messages, &options)?;
        if let Some(vision) = self.engine.vision() {
            prompt = vision.expand(&prompt, &grids(&self.images))?;
        }
        let parser = ReasoningParser::new(&self.tokenizer, &prompt)?;
        let mut stream = Stream::new(parser.clone());
        let request = Request::new(prompt, self.config.clone()).with_images(self.images.clone());
        self.interrupted.store(false, Ordering::SeqCst);
        let interrupted = &self.interrupted;
        let mut printed = Ok(());
        let completions = self.engine.run_one(request, |events| {
            for event in events {
                if let Event::Token { text, .. } = event
                    && printed.is_ok()
                {
                    printed = stream.print(text);
                }
            }
            match interrupted.swap(false, Ordering::SeqCst) || printed.is_err() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })?;
        printed?;
        stream.end()?;
        let Some(first) = completions.into_iter().next() else {
            return Ok(AnswerText::default());
        };
        if first.finish_reason == FinishReason::ContextFull {
            print_error_line(format_args!(
                "the context is full; /reset starts a new conversation, --cache-mib and --max-model-len set its size"
            ));
        }
        Ok(parser.parse(&first.text.unwrap_or_default()))
    }
}
