//! An HTTP server with OpenAI's API: `/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/v1/responses`,
//! `/v1/embeddings`, `/tokenize`, `/detokenize`, `/tokenizer_info`, `/health` and `/metrics`. All requests share one batch
//! and one cache. Instead of text, a model of embeddings answers `/v1/embeddings`, and a reranker `/v1/rerank`.
//!
//! With `--run-batch` it answers the requests in a file in OpenAI's batch format instead.
//!
//! SIGTERM and Ctrl-C let the requests in progress finish; a second signal aborts them. Clients need a key only if
//! OVERDRIVE_API_KEY is set.
//!
//! ```text
//! cargo xtask example serve --model PATH --port 8000
//! curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
//!     -d '{"messages": [{"role": "user", "content": "What is Rust?"}], "stream": true}'
//! ```

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use overdrive::generation::{
    Engine, EngineConfig, EngineHandle, Error, GenerationConfig, ModelFiles, Tokenizer,
};
use overdrive::kv_cache::KvCacheDtype;
use overdrive::lora::{LoadAdapterOptions, load_adapter_for_rows};
use overdrive::serve::{ApiKey, BatchRequest, PoolingModel, ServedModel, Server, ServerOptions};
use overdrive::trainer::Interrupt;
use overdrive::transformer::{CausalLm, PoolingMode, PoolingTask};
use overdrive_examples::{
    JsonLines, ModelFlags, TemplateFlags, assistant_tokenizer, local_adapter, local_model,
    model_name, open_input, print_error_line, print_line,
};
use serde_json::Value;
use signal_hook::consts::{SIGINT, SIGTERM};

/// Serves a model over HTTP with OpenAI's API
///
/// Sampling options that a request does not set are taken from the folder's generation_config.json or the sampling
/// defaults of a GGUF file.
#[derive(Debug, Clone, Parser)]
struct Flags {
    #[command(flatten)]
    model: ModelFlags,
    #[command(flatten)]
    template: TemplateFlags,
    /// Adapter in PEFT's format, which requests select with NAME as their model; may be repeated
    #[arg(long, value_name = "NAME=DIR", value_parser = adapter, conflicts_with = "adapter")]
    lora: Vec<(String, PathBuf)>,
    /// Answer the requests in this file, JSON Lines in OpenAI's batch format, instead of listening; - is stdin
    #[arg(long, value_name = "FILE")]
    run_batch: Option<PathBuf>,
    /// Output file of --run-batch; - is stdout
    #[arg(long, default_value = "-", requires = "run_batch")]
    output: PathBuf,
    /// Address or host name to listen on; 0.0.0.0 listens on all addresses of this machine
    #[arg(long, default_value = "127.0.0.1")]
    host: String,
    /// Port to listen on; 0 selects a free port
    #[arg(long, default_value_t = 8000)]
    port: u16,
    /// Name of the model in the API [default: the name of the file or folder]
    #[arg(long)]
    served_model_name: Option<String>,
    /// Maximum number of sequences in a batch
    #[arg(long, default_value_t = EngineConfig::default().max_num_seqs)]
    max_num_seqs: usize,
    /// Maximum length of a prompt with its answer, in tokens; at most the model's context and one generated token, which
    /// the model does not read [default: that, or what fits in the cache]
    #[arg(long)]
    max_model_len: Option<usize>,
    /// Size of the key/value cache in MiB [default: 1024 to 4096, depending on the model's context]
    #[arg(long)]
    cache_mib: Option<u64>,
    /// Storage of keys and values: auto (the model's dtype), int8 or fp8; in 8 bits the same memory holds two to four times
    /// as many tokens
    #[arg(long, default_value_t)]
    kv_cache_dtype: KvCacheDtype,
    /// Prompt lookup: number of tokens to propose for each sequence in a step, copied from after an earlier occurrence of its
    /// last tokens. Proposals change no answer. For texts that repeat their prompt: summaries, corrections, code; on CPUs only
    #[arg(long, value_name = "N")]
    prompt_lookup_num_tokens: Option<usize>,
    /// Draft model with the same tokenizer: proposes tokens that the model verifies together; on CPUs only
    #[arg(long, value_name = "MODEL")]
    assistant_model: Option<PathBuf>,
    /// Do not capture CUDA graphs: on a GPU, launch the operations of each step one by one
    #[arg(long)]
    enforce_eager: bool,
    /// Origins of web pages that may use the server (CORS), such as https://chat.example.org; * for every page [default:
    /// only pages of the server's own address]
    #[arg(long, value_name = "ORIGIN", num_args = 1.., value_delimiter = ',')]
    allowed_origins: Vec<String>,
    /// Maximum number of open connections; requests on further connections get status 503
    #[arg(long, default_value_t = ServerOptions::default().max_connections)]
    max_connections: usize,
    /// Seconds within which the head of a request must arrive, and after which an idle connection is closed
    #[arg(long, default_value_t = ServerOptions::default().header_timeout.as_secs())]
    header_timeout: u64,
    /// Seconds after which the connection of a client that does not read its answer is closed
    #[arg(long, default_value_t = ServerOptions::default().write_timeout.as_secs())]
    write_timeout: u64,
    /// Maximum number of running and waiting sequences; further requests get status 429
    #[arg(long, default_value_t = ServerOptions::default().max_queue)]
    max_queue: usize,
    /// Maximum max_tokens of a request [default: what fits in the context]
    #[arg(long)]
    max_tokens: Option<usize>,
    /// Maximum size of a request body in bytes
    #[arg(long, default_value_t = ServerOptions::default().max_body_bytes)]
    max_body_bytes: usize,
    /// Maximum duration of a request in seconds, including waiting
    #[arg(long, default_value_t = ServerOptions::default().max_time.as_secs())]
    max_time: u64,
    /// Seconds that requests in progress have to finish after a signal
    #[arg(long, default_value_t = ServerOptions::default().drain_timeout.as_secs())]
    drain_timeout: u64,
    /// Pooling of the embeddings of a model that generates text: last, mean or cls
    #[arg(long, default_value = "last")]
    pooling: PoolingMode,
    /// Purpose of a model that does not generate text: embed (/v1/embeddings) or score (/v1/rerank) [default: that of an
    /// encoder or a folder of sentence-transformers]
    #[arg(long)]
    task: Option<PoolingTask>,
}

fn main() -> ExitCode {
    overdrive_examples::run_main(|| run(&Flags::parse()))
}

/// The requests that a server answers: those of a network, or those of a file.
enum Requests {
    Network(TcpListener),
    File(Vec<BatchRequest>),
}

fn run(flags: &Flags) -> Result<()> {
    // Before the model is loaded, so that a port in use and a broken line are found at once.
    let (options, requests) = match &flags.run_batch {
        Some(path) => {
            JsonLines::check("--output", &flags.output, ("--run-batch", path))?;
            let (reader, name) = open_input(path)?;
            let requests = BatchRequest::read(reader, &name)?;
            let mut options = ServerOptions::for_batch();
            options.max_tokens = flags.max_tokens;
            options.pooling = flags.pooling;
            (options, Requests::File(requests))
        }
        None => {
            let options = options(flags)?;
            let listener = listener(flags, &options)?;
            (options, Requests::Network(listener))
        }
    };
    let source = flags.model.local()?;
    let tokenizer = Arc::new(source.tokenizer()?);
    let name = match &flags.served_model_name {
        Some(name) => name.clone(),
        None => model_name(&source.path),
    };
    if let Some(task) = task(flags, &source)? {
        let (folder, load) = (&source.path, source.options());
        let model = PoolingModel::from_pretrained(folder, task, tokenizer, &load)?;
        let server = Server::pooling(name.as_str(), model, options)?;
        return answer(flags, server, &name, requests);
    }
    let files = source.files()?;
    let mut config = generation_config(&files)?;
    if let Some(tokens) = flags.prompt_lookup_num_tokens {
        config.prompt_lookup_num_tokens = Some(tokens);
        config.validate()?;
    }
    let template = match flags.template.load(&files, source.adapter.as_deref()) {
        Ok(template) => Some(template),
        Err(error) if matches!(error.downcast_ref(), Some(Error::NoChatTemplate { .. })) => {
            print_error_line(format_args!(
                "there is no /v1/chat/completions and no /v1/responses: {error}"
            ));
            None
        }
        Err(error) => return Err(error),
    };
    let (own, texts) = (flags.clone(), Arc::clone(&tokenizer));
    let began = Instant::now();
    // Loads the model and what its first pass needs: no connection is accepted, and so no health reported, before.
    let engine = EngineHandle::spawn_with(move || engine(&own, &source, texts))?;
    print_error_line(format_args!(
        "ready after {:.1} s",
        began.elapsed().as_secs_f64()
    ));
    if flags.prompt_lookup_num_tokens.is_some() && !engine.speculates() {
        print_error_line(
            "no tokens are proposed: on a GPU the engine replays steps of one token a sequence",
        );
    }
    let mut served = ServedModel::new(name.as_str(), tokenizer, config);
    if let Some(template) = template {
        served = served.with_template(template);
    }
    // Only for a model that sees images: another folder may have a processor of another kind.
    if engine.vision().is_some()
        && let Some(processor) = files.image_processor()?
    {
        served = served.with_image_processor(processor);
        if !cfg!(feature = "image") {
            print_error_line(
                "images    refused, because the program was built without them: \
                 cargo run --release -p overdrive-examples --features image --example serve -- …",
            );
        }
    }
    answer(
        flags,
        Server::new(engine, served, options)?,
        &name,
        requests,
    )
}

/// Returns the options of a server of a network.
fn options(flags: &Flags) -> Result<ServerOptions> {
    let options = ServerOptions {
        api_key: ApiKey::from_env()?,
        allowed_origins: flags.allowed_origins.clone(),
        max_connections: flags.max_connections,
        header_timeout: Duration::from_secs(flags.header_timeout),
        write_timeout: Duration::from_secs(flags.write_timeout),
        max_queue: flags.max_queue,
        max_tokens: flags.max_tokens,
        max_body_bytes: flags.max_body_bytes,
        max_time: Duration::from_secs(flags.max_time),
        drain_timeout: Duration::from_secs(flags.drain_timeout),
        pooling: flags.pooling,
        ..ServerOptions::default()
    };
    options.validate()?;
    Ok(options)
}

fn listener(flags: &Flags, options: &ServerOptions) -> Result<TcpListener> {
    let listener = TcpListener::bind((flags.host.as_str(), flags.port))
        .with_context(|| format!("cannot listen on {}:{}", flags.host, flags.port))?;
    if !listener.local_addr()?.ip().is_loopback() && options.api_key.is_none() {
        print_error_line(format_args!(
            "warning: every machine that can reach {} can use this server; OVERDRIVE_API_KEY sets a key",
            flags.host
        ));
    }
    Ok(listener)
}

/// Returns the purpose of a model that does not generate text.
fn task(flags: &Flags, source: &ModelFlags) -> Result<Option<PoolingTask>> {
    let own = PoolingTask::of(&source.path)?;
    let task = flags.task.or(own);
    anyhow::ensure!(
        task.is_none() || source.adapter.is_none() && flags.lora.is_empty(),
        "an adapter is set, and a model of embeddings or scores takes none; merge it into the folder first"
    );
    Ok(task)
}

/// Answers the requests of the file, or those of the network until a signal ends the server.
fn answer(flags: &Flags, server: Server, name: &str, requests: Requests) -> Result<()> {
    match requests {
        Requests::Network(listener) => {
            print_line(format!("{name} on http://{}/v1", listener.local_addr()?));
            // The server lets requests end, also as the first process of a container.
            Interrupt::hand_over(&[SIGTERM, SIGINT]);
            server.run(listener)?;
            print_line("ended");
        }
        Requests::File(requests) => {
            let mut output = JsonLines::create(&flags.output)?;
            let counts = server.run_batch(requests, |answer| output.write(&answer))?;
            print_error_line(format_args!(
                "requests: {} completed, {} failed",
                counts.completed, counts.failed
            ));
        }
    }
    Ok(())
}

/// Returns the engine over the model in `source`.
fn engine(
    flags: &Flags,
    source: &ModelFlags,
    tokenizer: Arc<Tokenizer>,
) -> Result<Engine<CausalLm>> {
    let mut model = source.load()?;
    for (name, adapter) in &flags.lora {
        let folder = local_adapter(adapter)?;
        load_adapter_for_rows(&mut model, &folder, name, &LoadAdapterOptions::default())
            .with_context(|| format!("--lora {name}={}", folder.display()))?;
    }
    let config = EngineConfig {
        max_num_seqs: flags.max_num_seqs,
        max_model_len: flags.max_model_len,
        kv_cache_memory_bytes: flags.cache_mib.map(|mib| mib << 20),
        kv_cache_dtype: flags.kv_cache_dtype,
        enforce_eager: flags.enforce_eager,
        ..EngineConfig::default()
    };
    let engine = Engine::new(model, config)?.with_tokenizer(tokenizer);
    let Some(path) = &flags.assistant_model else {
        return Ok(engine);
    };
    let path = local_model(path)?;
    let tokenizer = assistant_tokenizer(&path)?;
    let assistant = source.load_from(&path)?;
    Ok(engine.with_assistant(assistant, tokenizer.as_ref())?)
}

/// Parses `NAME=DIR`.
fn adapter(flag: &str) -> Result<(String, PathBuf), String> {
    match flag.split_once('=') {
        Some((name, folder)) if !name.is_empty() && !folder.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(folder)))
        }
        _ => Err("it must be NAME=DIR, such as french=runs/french".to_owned()),
    }
}

/// Returns the model's configuration. Without a `top_k` of its own a request samples among all tokens, as in OpenAI's
/// and vLLM's servers, and not among the 50 of transformers.
fn generation_config(files: &ModelFiles) -> Result<GenerationConfig> {
    let mut keys = files.generation_config()?;
    keys.entry("top_k").or_insert(Value::from(0));
    Ok(GenerationConfig::from_map(&keys)?)
}
