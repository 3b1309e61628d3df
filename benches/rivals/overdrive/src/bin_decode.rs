//! Greedy decoding of a GGUF file with Overdrive: `decode FILE PAST STEPS`, tokens a second.

use overdrive_kv_cache::DynamicCache;
use overdrive_transformer::{CausalLm, ForwardInput, LoadOptions, Logits};
use tch::Tensor;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().ok_or("a GGUF file")?;
    let mut number = || {
        arguments
            .next()
            .and_then(|text| text.parse().ok())
            .unwrap_or(64usize)
    };
    let (past, steps) = (number(), number());
    let _no_grad = tch::no_grad_guard();
    let start = std::time::Instant::now();
    let model = CausalLm::from_gguf(&path, &LoadOptions::default())?;
    let mut cache = DynamicCache::with_capacity(model.num_layers(), (past + steps) as i64);
    let prompt: Vec<i64> = (0..past as i64).map(|i| 1000 + i * 7 % 20000).collect();
    let mut next = |ids: &[i64]| -> Result<i64, Box<dyn std::error::Error>> {
        let ids = Tensor::from_slice(ids).unsqueeze(0);
        let logits = model.forward(
            ForwardInput::new(&ids)
                .with_cache(&mut cache)
                .with_logits(Logits::Last),
        )?;
        Ok(logits.argmax(-1, false).int64_value(&[]))
    };
    let mut token = next(&prompt)?;
    let first = start.elapsed().as_secs_f64();
    let (mut seconds, mut tokens) = (Vec::new(), vec![token]);
    for _ in 0..steps {
        let start = std::time::Instant::now();
        token = next(&[token])?;
        seconds.push(start.elapsed().as_secs_f64());
        tokens.push(token);
    }
    seconds.sort_by(f64::total_cmp);
    println!(
        r#"{{"tokens_per_second": {}, "first_token_seconds": {first}, "tokens": {tokens:?}}}"#,
        1.0 / seconds[steps / 2]
    );
    Ok(())
}
