//! Greedy decoding of a GGUF file with mistral.rs: `decode FILE PAST STEPS`, tokens a second. It answers chats, so
//! the prompt has about PAST tokens; the figure is its own, of the tokens after the first.

use mistralrs::{GgufModelBuilder, RequestBuilder, TextMessageRole};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut arguments = std::env::args().skip(1);
    let path = std::path::PathBuf::from(arguments.next().ok_or("a GGUF file")?);
    let mut number = || arguments.next().and_then(|text| text.parse().ok()).unwrap_or(64usize);
    let (past, steps) = (number(), number());
    let (folder, file) = (path.parent().ok_or("a folder")?, path.file_name().ok_or("a file")?);
    let start = std::time::Instant::now();
    let model = GgufModelBuilder::new(folder.to_string_lossy(), vec![file.to_string_lossy()])
        .with_force_cpu()
        .build()
        .await?;
    let text = "Write a long story about a lighthouse. ".repeat(past / 9);
    let request = || RequestBuilder::new().set_deterministic_sampler().add_message(TextMessageRole::User, &text);
    model.send_chat_request(request().set_sampler_max_len(1)).await?;
    let first = start.elapsed().as_secs_f64();
    let response = model.send_chat_request(request().set_sampler_max_len(steps)).await?;
    println!(
        r#"{{"tokens_per_second": {}, "first_token_seconds": {first}, "tokens": {}}}"#,
        response.usage.avg_compl_tok_per_sec, response.usage.completion_tokens
    );
    Ok(())
}
