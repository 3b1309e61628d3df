//! Greedy decoding of a GGUF file with mistral.rs: `decode FILE PAST STEPS`, tokens a second. A logits processor, which
//! mistral.rs calls before it draws each token, notes the times.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use anyhow::{Context, bail};
use mistralrs::{
    GgufModelBuilder, NormalRequest, Request, RequestMessage, Response, SamplingParams, Tensor,
};

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let path = std::path::PathBuf::from(arguments.next().context("a GGUF file")?);
    let mut number = || {
        arguments
            .next()
            .and_then(|text| text.parse().ok())
            .unwrap_or(64usize)
    };
    let (past, steps) = (number(), number());
    let start = Instant::now();
    let (folder, file) = (
        path.parent().context("a folder")?,
        path.file_name().context("a file")?,
    );
    let model = GgufModelBuilder::new(folder.display(), vec![file.to_string_lossy()])
        .with_force_cpu()
        .build()
        .await?;
    let prompt: Vec<u32> = (0..past as u32).map(|i| 1000 + i * 7 % 20000).collect();
    let calls = Arc::new(Mutex::new(Vec::new()));
    let noted = calls.clone();
    let note = move |logits: &Tensor, tokens: &[u32]| -> mistralrs::Result<Tensor> {
        noted
            .lock()
            .expect("the notes")
            .push((Instant::now(), tokens.last().copied().unwrap_or(0)));
        Ok(logits.clone())
    };
    // The call before the token after the last one sees the last one.
    let sampling = SamplingParams {
        max_len: Some(steps + 2),
        ..SamplingParams::deterministic()
    };
    let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
    let mut request = NormalRequest::new_simple(
        RequestMessage::CompletionTokens(prompt),
        sampling,
        sender,
        0,
        None,
        None,
    );
    request.logits_processors = Some(vec![Arc::new(note)]);
    model
        .inner()
        .get_sender(None)?
        .send(Request::Normal(Box::new(request)))
        .await?;
    match receiver.recv().await.context("an answer")? {
        Response::CompletionDone(_) => {}
        Response::CompletionModelError(message, _) => bail!(message),
        Response::ValidationError(error) | Response::InternalError(error) => bail!("{error}"),
        _ => bail!("an answer of an unexpected kind"),
    }
    let calls = calls.lock().expect("the notes");
    if calls.len() != steps + 2 {
        bail!("{} tokens instead of {}", calls.len(), steps + 2);
    }
    let mut seconds: Vec<f64> = calls[..=steps]
        .windows(2)
        .map(|pair| (pair[1].0 - pair[0].0).as_secs_f64())
        .collect();
    seconds.sort_by(f64::total_cmp);
    println!(
        r#"{{"tokens_per_second": {}, "first_token_seconds": {}, "tokens": {:?}}}"#,
        1.0 / seconds[steps / 2],
        (calls[0].0 - start).as_secs_f64(),
        calls[1..]
            .iter()
            .map(|(_, token)| token)
            .collect::<Vec<_>>()
    );
    Ok(())
}
