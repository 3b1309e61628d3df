//! The loss of quality by caches that drop or quantize entries: the perplexity of a text with each kind of
//! cache, and its bytes per token.
//!
//! ```text
//! cargo run --release -p overdrive-benches --bin cache_perplexity -- runs/tiny-001/model FILE
//! ```

use overdrive::datasets::load_tokenizer;
use overdrive::kv_cache::{CacheImplementation, CacheShape, KvCache};
use overdrive::transformer::{CausalLm, ForwardInput, LoadOptions};
use tch::{Kind, Tensor};

/// The number of tokens in a chunk; all later tokens read the cached form of a chunk.
const CHUNK: i64 = 16;
/// The maximum number of contexts of text.
const TEXTS: usize = 8;

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [dir, file] = arguments.as_slice() else {
        return Err("give a model's folder and a text file".into());
    };
    let model = CausalLm::from_pretrained(dir, &LoadOptions::default())?;
    let tokenizer = load_tokenizer(dir)?;
    let encoding = tokenizer.encode(std::fs::read_to_string(file)?, false)?;
    let ids: Vec<i64> = encoding.get_ids().iter().map(|&id| id.into()).collect();
    let context = usize::try_from(model.config().max_position_embeddings())?;
    let texts: Vec<&[i64]> = ids.chunks_exact(context).take(TEXTS).collect();
    println!("{} texts of {context} tokens", texts.len());
    let _no_grad = tch::no_grad_guard();
    let mut exact = None;
    // A static cache holds the same values as a dynamic one.
    let differ = |kind: &CacheImplementation| *kind != CacheImplementation::Static;
    for kind in CacheImplementation::ALL.into_iter().filter(differ) {
        let shape = CacheShape {
            windows: model.layer_windows(),
            window: Some(context as i64 / 2),
            sinks: 4,
            ..CacheShape::default()
        };
        let (mut sum, mut bytes) = (0.0, 0.0);
        for text in &texts {
            let mut cache = kind.build(&shape)?;
            sum += surprise(&model, text, cache.as_mut())?;
            bytes = cache.bytes_per_token();
        }
        let perplexity = (sum / (texts.len() * (context - 1)) as f64).exp();
        let change = (perplexity / *exact.get_or_insert(perplexity) - 1.0) * 100.0;
        let name = kind.to_string();
        println!(
            "{name:<16}{bytes:>7.0} bytes per token, perplexity {perplexity:9.4} {change:+.3} %"
        );
    }
    Ok(())
}

/// Returns the summed negative log-likelihood of all tokens but the first, in nats.
fn surprise(model: &CausalLm, text: &[i64], cache: &mut dyn KvCache) -> Result<f64, Failure> {
    let ids = Tensor::f_from_slice(text)?.f_unsqueeze(0)?;
    let mut sum = 0.0;
    let last = text.len() as i64 - 1;
    for start in (0..last).step_by(CHUNK as usize) {
        let count = CHUNK.min(last - start);
        let chunk = ids.f_narrow(1, start, count)?;
        let logits = model.forward(ForwardInput::new(&chunk).with_cache(&mut *cache))?;
        let logits = logits.f_squeeze_dim(0)?.f_log_softmax(-1, Kind::Float)?;
        let targets = ids.f_narrow(1, start + 1, count)?.f_view([-1, 1])?;
        let chosen = logits.f_gather(1, &targets, false)?;
        sum -= chosen.f_sum(Kind::Double)?.f_double_value(&[])?;
    }
    Ok(sum)
}
