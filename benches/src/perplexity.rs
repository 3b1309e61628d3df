//! The perplexity of a text in windows of one length.

use std::path::Path;

use overdrive::generation::ModelFiles;
use overdrive::kv_cache::{CacheImplementation, CacheShape};
use overdrive::transformer::{CausalLm, ForwardInput};
use tch::{Kind, Tensor};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Windows of tokens of a text.
#[derive(Debug)]
pub struct Windows {
    windows: Vec<Vec<i64>>,
}

/// The perplexity of a text, and what the cache took.
#[derive(Debug)]
pub struct Perplexity {
    /// The perplexity.
    pub value: f64,
    /// The bytes of the cache per token.
    pub bytes_per_token: f64,
}

impl Windows {
    /// Returns the first windows of the text of `file`, at most `count`, of `length` tokens of the tokenizer in `model`
    /// (a model's folder or a GGUF file) each.
    ///
    /// # Errors
    /// An error if a file cannot be read, or if the text is shorter than a window.
    pub fn of_text(
        model: &str,
        file: &Path,
        length: usize,
        count: usize,
    ) -> Result<Windows, Failure> {
        let tokenizer = ModelFiles::open(model)?.tokenizer()?;
        let encoding = tokenizer.encode(overdrive::core::text::read(file)?, false)?;
        let ids: Vec<i64> = encoding.get_ids().iter().map(|&id| id.into()).collect();
        let windows = ids.chunks_exact(length).take(count);
        let windows: Vec<_> = windows.map(<[i64]>::to_vec).collect();
        if windows.is_empty() {
            return Err(format!(
                "the text has {} tokens, fewer than a window ({length})",
                ids.len()
            )
            .into());
        }
        println!("{} windows of {length} tokens", windows.len());
        Ok(Windows { windows })
    }

    /// Measures the perplexity of all tokens but the first of each window. The model reads `chunk` tokens at a time and
    /// the earlier ones from a cache, a new one for each window.
    ///
    /// # Errors
    /// Errors of the model and of the cache.
    pub fn perplexity(
        &self,
        model: &CausalLm,
        chunk: i64,
        (kind, shape): (&CacheImplementation, &CacheShape),
    ) -> Result<Perplexity, Failure> {
        let _no_grad = tch::no_grad_guard();
        let (mut sum, mut predicted, mut bytes_per_token) = (0.0, 0, 0.0);
        for window in &self.windows {
            let mut cache = kind.build(shape)?;
            let ids = Tensor::f_from_slice(window)?.f_unsqueeze(0)?;
            let last = window.len() as i64 - 1;
            for start in (0..last).step_by(usize::try_from(chunk)?) {
                let count = chunk.min(last - start);
                let input = ids.f_narrow(1, start, count)?;
                let logits = model.forward(ForwardInput::new(&input).with_cache(cache.as_mut()))?;
                let logits = logits.f_squeeze_dim(0)?.f_log_softmax(-1, Kind::Float)?;
                let targets = ids.f_narrow(1, start + 1, count)?.f_view([-1, 1])?;
                let chosen = logits.f_gather(1, &targets, false)?;
                sum -= chosen.f_sum(Kind::Double)?.f_double_value(&[])?;
            }
            predicted += last;
            bytes_per_token = cache.bytes_per_token();
        }
        Ok(Perplexity {
            value: (sum / predicted as f64).exp(),
            bytes_per_token,
        })
    }
}
