//! A conversation with a model in the terminal.
//!
//! Answers are streamed. Ctrl-C ends an answer, and at the prompt it ends the program, as Ctrl-D does.
//! `/reset` starts a new conversation, `/stats` prints the counters of the engine. The cache keeps the
//! conversation, so each turn processes only the new tokens.
//!
//! ```text
//! cargo run --release -p overdrive-examples --example chat -- --model DIR --system "Be brief."
//! ```

use std::io::{BufRead, stdin};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use clap::Parser;
use overdrive::generation::{
    ChatTemplate, ChatTemplateOptions, Engine, EngineConfig, Event, GenerationConfig, Message,
    Request, Tokenizer,
};
use overdrive::transformer::CausalLm;
use overdrive_examples::{GenerationFlags, ModelFlags, print_now};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// A conversation with a model, in the terminal
///
/// Options without a flag are taken from the folder's generation_config.json.
#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    /// System message of the conversation
    #[arg(long)]
    system: Option<String>,
    #[command(flatten)]
    generation: GenerationFlags,
}

fn main() -> ExitCode {
    overdrive_examples::exit(run(&Flags::parse()))
}

fn run(flags: &Flags) -> Result<()> {
    let template = ChatTemplate::from_dir(&flags.model.folder)?;
    let tokenizer = Arc::new(flags.model.tokenizer()?);
    let model = flags.model.load()?;
    let mut chat = Chat {
        engine: Engine::new(&model, EngineConfig::default())?
            .with_tokenizer(Arc::clone(&tokenizer)),
        config: generation(flags, &template, &tokenizer)?,
        tokenizer,
        template,
        interrupted: Arc::new(AtomicBool::new(false)),
    };
    // While an answer is streamed the signal only sets a flag; otherwise it ends the program.
    let at_prompt = Arc::new(AtomicBool::new(true));
    flag::register_conditional_default(SIGINT, Arc::clone(&at_prompt))?;
    flag::register(SIGINT, Arc::clone(&chat.interrupted))?;

    let opening: Vec<_> = flags
        .system
        .iter()
        .map(|text| Message::system(text.as_str()))
        .collect();
    let mut messages = opening.clone();
    loop {
        print_now("> ")?;
        let mut line = String::new();
        if stdin().lock().read_line(&mut line)? == 0 {
            return Ok(print_now("\n")?);
        }
        match line.trim() {
            "" => continue,
            "/reset" => messages.clone_from(&opening),
            "/stats" => println!("{}", chat.engine.statistics()),
            text => {
                messages.push(Message::user(text));
                at_prompt.store(false, Ordering::SeqCst);
                let answer = chat.answer(&messages);
                at_prompt.store(true, Ordering::SeqCst);
                match answer {
                    Ok(text) => messages.push(Message::assistant(text)),
                    Err(error) => {
                        eprintln!("error: {error}");
                        messages.pop();
                    }
                }
            }
        }
    }
}

/// Returns the folder's settings with the flags applied, and the template's end-of-turn token if the folder names none.
fn generation(
    flags: &Flags,
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
) -> Result<GenerationConfig> {
    let mut config = flags.generation.config(&flags.model.folder, 1024)?;
    if config.eos_token_id.is_empty() {
        let end = template.special_token("eos_token");
        let id = end.and_then(|end| tokenizer.token_to_id(end));
        config.eos_token_id.extend(id.map(i64::from));
    }
    Ok(config)
}

struct Chat<'m> {
    engine: Engine<&'m CausalLm>,
    config: GenerationConfig,
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    interrupted: Arc<AtomicBool>,
}

impl Chat<'_> {
    /// Streams the answer and returns its text, up to an interruption.
    fn answer(&mut self, messages: &[Message]) -> Result<String> {
        let options = ChatTemplateOptions::default();
        let prompt = self.template.encode(&self.tokenizer, messages, &options)?;
        let request = self
            .engine
            .submit(Request::new(prompt, self.config.clone()))?;
        self.interrupted.store(false, Ordering::SeqCst);
        let mut answer = String::new();
        while !self.engine.is_idle() {
            if self.interrupted.swap(false, Ordering::SeqCst) {
                self.engine.cancel(request)?;
            }
            for event in self.engine.step()? {
                match event {
                    Event::Token { text, .. } => print_now(&text)?,
                    Event::Finished { completion, .. } => {
                        answer = completion.text.unwrap_or_default();
                    }
                    Event::Failed { error, .. } => return Err(error.into()),
                    _ => {}
                }
            }
        }
        print_now("\n")?;
        Ok(answer)
    }
}
