//! The first pass of a model, before the first request.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::{
    Engine, EngineConfig, EngineModel, GenerateOptions, GenerationConfig, GenerationModel, Request,
    Result, generate_with_options,
};

/// The tokens of each prompt that are read: more than one, as in a real prompt, and too few to take time.
const PROMPT: usize = 8;

/// The tokens that continue a prompt: the first comes from its pass, the second from a decode step.
const NEW: usize = 2;

/// Prepares a model for a call of [`generate_with_options`](crate::generate_with_options) with the same arguments, and
/// returns the time that this took.
///
/// The first pass through a model on a GPU loads libraries (cuBLAS, cuDNN) and kernels, which takes a second or more.
/// Without a warm-up, this time is included in that of the prompts. This function reads the first tokens of `prompts`
/// and runs one decode step, with the cache and the kind of sampling of `config`. The results are dropped, and the
/// following generation returns the same tokens as without a warm-up. Does nothing if
/// [`loads_on_first_use`](GenerationModel::loads_on_first_use) is `false`, as on a CPU.
///
/// ```
/// use overdrive_generation::{GenerateOptions, GenerationConfig, generate, warm_up};
/// # use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let config = LlamaConfig { vocab_size: 100, hidden_size: 32, intermediate_size: 64,
/// #     num_hidden_layers: 2, num_attention_heads: 4, ..LlamaConfig::default() };
/// # let model = CausalLm::new(&config.into(), &InitOptions::default())?;
/// let config = GenerationConfig { max_new_tokens: Some(8), ..GenerationConfig::default() };
/// let prompts = [vec![1, 2, 3]];
/// let loading = warm_up(&model, &prompts, &config, &GenerateOptions::default())?;
/// let output = generate(&model, &prompts, &config)?;
/// println!("ready after {:.1} s, {}", loading.as_secs_f64(), output.timings);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`generate`](crate::generate()).
pub fn warm_up<M: GenerationModel + ?Sized>(
    model: &M,
    prompts: &[Vec<i64>],
    config: &GenerationConfig,
    options: &GenerateOptions<'_>,
) -> Result<Duration> {
    if !model.loads_on_first_use() {
        return Ok(Duration::ZERO);
    }
    let began = Instant::now();
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    // Prompts of different lengths keep different lengths, because their memory layout differs from that of
    // prompts of equal length.
    let most = |prompt: &Vec<i64>| PROMPT - usize::from(prompt.len() < longest);
    let beginnings: Vec<Vec<i64>> = prompts
        .iter()
        .map(|prompt| prompt.iter().copied().take(most(prompt)).collect())
        .collect();
    let config = GenerationConfig {
        max_new_tokens: Some(NEW),
        max_time: None,
        // No token ends the sequence early.
        eos_token_id: Vec::new(),
        stop_token_ids: Vec::new(),
        stop_strings: Vec::new(),
        min_length: 0,
        min_new_tokens: 0,
        min_tokens: 0,
        ..config.clone()
    };
    let options = GenerateOptions {
        assistant_model: options.assistant_model,
        assistant_tokenizer: options.assistant_tokenizer,
        tokenizer: options.tokenizer,
        ..GenerateOptions::default()
    };
    // It returns when the tokens have been read from the device, which is then ready.
    generate_with_options(model, &beginnings, &config, &options, |_| {
        ControlFlow::Continue(())
    })?;
    Ok(began.elapsed())
}

impl<M: EngineModel> Engine<M> {
    /// Prepares the model for the first request, and returns the time that it took.
    ///
    /// The first pass through a model on a GPU loads libraries (cuBLAS, cuDNN) and kernels, which takes a second or
    /// more. Without a warm-up, this time delays the first token of the first request. A small engine over the same
    /// model answers two requests of a few tokens, greedily and by sampling; then the decoding steps of every number of
    /// sequences are captured, where steps are captured. The state, the cache, the answers and the counters of this
    /// engine do not change, except for those of graphs and [`warm_up`](crate::EngineStatistics::warm_up). Does nothing if
    /// [`loads_on_first_use`](EngineModel::loads_on_first_use) is `false`, as on a CPU.
    ///
    /// [`EngineHandle`](crate::EngineHandle) and [`chat_batch`](crate::chat_batch) call it themselves.
    ///
    /// # Errors
    /// When the model fails, or memory runs out.
    pub fn warm_up(&mut self) -> Result<Duration> {
        if !self.model().loads_on_first_use() {
            return Ok(Duration::ZERO);
        }
        let began = Instant::now();
        let greedy = GenerationConfig {
            max_new_tokens: Some(NEW),
            ..GenerationConfig::default()
        };
        let sampled = GenerationConfig {
            do_sample: true,
            top_k: 50,
            top_p: 0.9,
            seed: Some(0),
            ..greedy.clone()
        };
        let block_size = self.block_size();
        let prompt = vec![
            0;
            PROMPT
                .min(self.model().context().saturating_sub(NEW))
                .max(1)
        ];
        let mut small = Engine::new(
            self.model(),
            EngineConfig {
                max_num_seqs: 2,
                block_size,
                num_blocks: Some(2 * (prompt.len() + NEW).div_ceil(block_size)),
                enable_prefix_caching: false,
                watermark: 0.0,
                enforce_eager: true,
                ..EngineConfig::default()
            },
        )?;
        for config in [greedy, sampled] {
            small.submit(Request::new(prompt.clone(), config))?;
        }
        // An error of a warm-up request is ignored: later requests report their own errors.
        let _outcomes = small.run_to_end()?;
        drop(small);
        self.capture_steps()?;
        let time = began.elapsed();
        self.record_warm_up(time);
        Ok(time)
    }
}
