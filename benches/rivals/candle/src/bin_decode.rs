//! Greedy decoding of a GGUF file with candle's quantized Llama: `decode FILE PAST STEPS`, tokens a second.

use candle_core::{Device, Result, Tensor, quantized::gguf_file};
use candle_transformers::models::quantized_llama::ModelWeights;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("a GGUF file");
    let mut number = || {
        arguments
            .next()
            .and_then(|text| text.parse().ok())
            .unwrap_or(64usize)
    };
    let (past, steps) = (number(), number());
    let start = std::time::Instant::now();
    let mut file = std::fs::File::open(&path)?;
    let content = gguf_file::Content::read(&mut file)?;
    let mut model = ModelWeights::from_gguf(content, &mut file, &Device::Cpu)?;
    let prompt: Vec<u32> = (0..past as u32).map(|i| 1000 + i * 7 % 20000).collect();
    let next = |logits: Tensor| logits.squeeze(0)?.argmax(0)?.to_scalar::<u32>();
    let logits = model.forward(
        &Tensor::new(prompt.as_slice(), &Device::Cpu)?.unsqueeze(0)?,
        0,
    )?;
    let mut token = next(logits)?;
    let first = start.elapsed().as_secs_f64();
    let (mut seconds, mut tokens) = (Vec::new(), vec![token]);
    for index in 0..steps {
        let start = std::time::Instant::now();
        let logits = model.forward(
            &Tensor::new(&[token], &Device::Cpu)?.unsqueeze(0)?,
            past + index,
        )?;
        token = next(logits)?;
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
