//! The server under test.

use std::net::{SocketAddr, TcpListener};
use std::ops::ControlFlow;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use overdrive_generation::{
    CacheShape, ChatTemplate, ChatTemplateOptions, Engine, EngineConfig, EngineHandle, EngineModel,
    GenerateOptions, GenerateOutput, GenerationConfig, ImageProcessor, Message, RaggedStep, Result,
    Tokenizer, generate_with_options,
};
use overdrive_serve::{PoolingModel, ServedModel, Server, ServerOptions};
use overdrive_transformer::{CausalLm, ImageFeatures, InitOptions, LlamaConfig, VisionConfig};
use serde_json::{Value, json};
use tch::Tensor;
use tokio::sync::oneshot;

pub(crate) const NAME: &str = "org/tiny";
/// The end of text.
pub(crate) const END: i64 = 256;
/// The number of tokens of a prompt and its answer.
pub(crate) const CONTEXT: usize = 513;

/// Returns a byte-level BPE whose tokens are the 256 bytes, the id of a byte being its index in the sorted alphabet,
/// and one special token.
pub(crate) fn tokenizer() -> Tokenizer {
    let table = (0..=255u8).map(|byte| match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte),
        // GPT-2's characters for the others follow from U+0100 on.
        _ => {
            let before =
                (0..byte).filter(|b| !matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff));
            char::from_u32(0x100 + before.count() as u32).unwrap()
        }
    });
    let mut alphabet: Vec<char> = table.collect();
    alphabet.sort_unstable();
    let vocab: serde_json::Map<String, Value> = alphabet
        .iter()
        .enumerate()
        .map(|(id, c)| (c.to_string(), id.into()))
        .collect();
    let level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let json = json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{"id": END, "content": "<end>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "pre_tokenizer": level, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []},
    });
    serde_json::from_value(json).unwrap()
}

pub(crate) fn encode(text: &str) -> Vec<i64> {
    let encoding = tokenizer().encode(text, false).unwrap();
    encoding.get_ids().iter().map(|&id| i64::from(id)).collect()
}

/// Returns a random model whose distributions are uneven enough to have preferences.
pub(crate) fn model() -> CausalLm {
    // Tests run in parallel, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    let config = LlamaConfig {
        vocab_size: 260,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 512,
        initializer_range: 0.2,
        ..LlamaConfig::default()
    };
    let options = InitOptions {
        seed: 3,
        ..InitOptions::default()
    };
    CausalLm::new(&config.into(), &options).unwrap()
}

pub(crate) fn template() -> ChatTemplate {
    let source = "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}\
                  {% if m.role == 'nobody' %}{{ raise_exception('who is nobody?') }}{% endif %}\
                  {{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}\
                  {% if add_generation_prompt %}assistant:{% endif %}";
    let template = ChatTemplate::new(source).unwrap();
    template.with_special_token("eos_token", "<end>")
}

/// Returns the options of a request without any.
pub(crate) fn defaults() -> GenerationConfig {
    GenerationConfig {
        top_k: 0,
        ..GenerationConfig::default()
    }
}

/// Returns what `generate` gives for a prompt alone, with the options of the server.
pub(crate) fn alone(prompt: &[i64], config: GenerationConfig) -> GenerateOutput {
    alone_with(&model(), prompt, config)
}

/// Returns what `generate` gives with another model.
pub(crate) fn alone_with(
    model: &CausalLm,
    prompt: &[i64],
    config: GenerationConfig,
) -> GenerateOutput {
    let config = GenerationConfig {
        do_sample: true,
        eos_token_id: vec![END],
        ..config
    };
    let tokenizer = tokenizer();
    let options = GenerateOptions {
        tokenizer: Some(&tokenizer),
        ..GenerateOptions::default()
    };
    generate_with_options(model, &[prompt.to_vec()], &config, &options, |_| {
        ControlFlow::Continue(())
    })
    .unwrap()
}

/// Returns the prompt of a conversation of one message.
pub(crate) fn chat_prompt(text: &str) -> Vec<i64> {
    let options = ChatTemplateOptions::default();
    let rendered = template().render(&[Message::user(text)], &options).unwrap();
    encode(&rendered)
}

/// A gate before every step of the engine.
#[derive(Debug, Clone)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub(crate) fn new(is_open: bool) -> Gate {
        Gate(Arc::new((Mutex::new(is_open), Condvar::new())))
    }

    pub(crate) fn set(&self, is_open: bool) {
        *self.0.0.lock().unwrap() = is_open;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let is_open = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(is_open, |is_open| !*is_open).unwrap());
    }
}

/// A model that computes while the gate is open.
struct Gated<M>(M, Gate);

impl<M: EngineModel> EngineModel for Gated<M> {
    fn cache_shape(&self) -> Result<CacheShape> {
        self.0.cache_shape()
    }

    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    fn context(&self) -> usize {
        self.0.context()
    }

    fn adapters(&self) -> Vec<String> {
        self.0.adapters()
    }

    fn vision(&self) -> Option<&VisionConfig> {
        self.0.vision()
    }

    fn encode_images(&self, pixels: &Tensor, grids: &[[i64; 2]]) -> Result<ImageFeatures> {
        self.0.encode_images(pixels, grids)
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        self.1.pass();
        self.0.forward(step)
    }

    fn hidden_states(&self, input_ids: &Tensor) -> Result<Tensor> {
        self.0.hidden_states(input_ids)
    }
}

/// A server on a port of the system's choice, which ends with the value.
#[derive(Debug)]
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) gate: Gate,
    shutdown: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<overdrive_serve::Result<()>>>,
}

impl TestServer {
    pub(crate) fn start(change: impl FnOnce(&mut ServerOptions)) -> TestServer {
        TestServer::with(change, |_| {}, Some(template()))
    }

    pub(crate) fn with(
        change: impl FnOnce(&mut ServerOptions),
        engine: impl FnOnce(&mut EngineConfig),
        template: Option<ChatTemplate>,
    ) -> TestServer {
        let gate = Gate::new(true);
        let server = server(model(), gate.clone(), change, engine, template);
        TestServer::of(server, gate)
    }

    /// Starts a server over another model.
    pub(crate) fn over(model: CausalLm) -> TestServer {
        let gate = Gate::new(true);
        let server = server(model, gate.clone(), |_| {}, |_| {}, Some(template()));
        TestServer::of(server, gate)
    }

    /// Starts a server with another tokenizer.
    pub(crate) fn with_tokenizer(tokenizer: Tokenizer) -> TestServer {
        let gate = Gate::new(true);
        let engine = gated_engine(model(), gate.clone(), |_| {});
        let tokenizer = Arc::new(tokenizer);
        let engine = engine.with_tokenizer(Arc::clone(&tokenizer));
        let engine = EngineHandle::spawn(engine).unwrap();
        let options = ServerOptions::default();
        let server = Server::new(engine, served(tokenizer), options).unwrap();
        TestServer::of(server, gate)
    }

    /// Starts a server over another model, with its tokenizer and template.
    pub(crate) fn with_model(
        model: impl EngineModel + Send + 'static,
        tokenizer: Tokenizer,
        template: ChatTemplate,
    ) -> TestServer {
        let gate = Gate::new(true);
        let tokenizer = Arc::new(tokenizer);
        let engine = gated_engine(model, gate.clone(), |_| {});
        let engine = engine.with_tokenizer(Arc::clone(&tokenizer));
        let served = served(tokenizer).with_template(template);
        let engine = EngineHandle::spawn(engine).unwrap();
        let server = Server::new(engine, served, ServerOptions::default()).unwrap();
        TestServer::of(server, gate)
    }

    /// Starts a server over a model that sees images.
    pub(crate) fn with_images(
        model: CausalLm,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        processor: ImageProcessor,
    ) -> TestServer {
        let gate = Gate::new(true);
        let tokenizer = Arc::new(tokenizer);
        let engine = gated_engine(model, gate.clone(), |_| {});
        let engine = engine.with_tokenizer(Arc::clone(&tokenizer));
        let served = served(tokenizer)
            .with_template(template)
            .with_image_processor(processor);
        let engine = EngineHandle::spawn(engine).unwrap();
        let server = Server::new(engine, served, ServerOptions::default()).unwrap();
        TestServer::of(server, gate)
    }

    /// Starts a server without an engine.
    pub(crate) fn pooling(model: PoolingModel) -> TestServer {
        // Tests run in parallel, and their models are too small for threads of their own.
        tch::set_num_threads(1);
        let options = ServerOptions::default();
        let server = Server::pooling(NAME, model, options).unwrap();
        TestServer::of(server, Gate::new(true))
    }

    fn of(server: Server, gate: Gate) -> TestServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, told) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            server.run_until(listener, async {
                // A sender that is dropped shuts down, too.
                let _told = told.await;
            })
        });
        TestServer {
            address,
            gate,
            shutdown: Some(shutdown),
            thread: Some(thread),
        }
    }

    /// Tells the server to end.
    pub(crate) fn shut_down(&mut self) {
        drop(self.shutdown.take());
    }

    /// Waits for the end.
    pub(crate) fn join(mut self) -> overdrive_serve::Result<()> {
        self.shut_down();
        self.thread.take().unwrap().join().unwrap()
    }

    /// Waits until no request is in flight, and checks that nothing of any is left.
    pub(crate) fn check_empty(&self) {
        let metric = |name: &str| crate::client::metric(self.address, name);
        wait("the requests to end", || {
            metric("sequences_in_flight") == 0.0 && metric("sequences_running") == 0.0
        });
        wait("the blocks to be free", || {
            metric("kv_cache_blocks_used") == 0.0
        });
        assert_eq!(metric("sequences_waiting"), 0.0);
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        // The engine would otherwise wait for ever, and its thread is joined.
        self.gate.set(true);
        self.shut_down();
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

/// Returns a server over a tiny model.
pub(crate) fn server(
    model: CausalLm,
    gate: Gate,
    change: impl FnOnce(&mut ServerOptions),
    engine: impl FnOnce(&mut EngineConfig),
    template: Option<ChatTemplate>,
) -> Server {
    let tokenizer = Arc::new(tokenizer());
    let engine = gated_engine(model, gate, engine).with_tokenizer(Arc::clone(&tokenizer));
    let mut served = served(tokenizer);
    if let Some(template) = template {
        served = served.with_template(template);
    }
    let mut options = ServerOptions::default();
    change(&mut options);
    Server::new(EngineHandle::spawn(engine).unwrap(), served, options).unwrap()
}

fn gated_engine<M: EngineModel>(
    model: M,
    gate: Gate,
    change: impl FnOnce(&mut EngineConfig),
) -> Engine<Gated<M>> {
    let mut config = EngineConfig {
        block_size: 4,
        num_blocks: Some(512),
        max_num_seqs: 16,
        max_num_batched_tokens: Some(64),
        ..EngineConfig::default()
    };
    change(&mut config);
    Engine::new(Gated(model, gate), config).unwrap()
}

fn served(tokenizer: Arc<Tokenizer>) -> ServedModel {
    let base = GenerationConfig {
        eos_token_id: vec![END],
        ..defaults()
    };
    ServedModel::new(NAME, tokenizer, base)
}

pub(crate) fn open_gate() -> Gate {
    Gate::new(true)
}

/// Waits for a condition that another thread brings about.
pub(crate) fn wait(what: &str, mut is_true: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_true() {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "waited in vain for {what}"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
}
