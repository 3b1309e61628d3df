//! The pass before the first request.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_generation::{
    ChatTemplate, Engine, EngineConfig, EngineHandle, EngineModel, Error, GenerationConfig,
    Message, Outcome, RaggedStep, Request, Result, chat_batch,
};
use overdrive_transformer::CausalLm;
use tch::Tensor;

use crate::support::{byte_tokenizer, greedy, random_model};

/// A model that loads something in its first pass, as one on a GPU does, and counts its passes.
struct Loading {
    model: CausalLm,
    passes: Arc<AtomicUsize>,
    fails: bool,
}

impl Loading {
    fn new() -> Self {
        Self {
            model: random_model(257, 1, 3),
            passes: Arc::default(),
            fails: false,
        }
    }

    fn passes(&self) -> usize {
        self.passes.load(Ordering::SeqCst)
    }
}

impl EngineModel for Loading {
    forwards_shape!(model);

    fn loads_on_first_use(&self) -> bool {
        true
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> Result<Tensor> {
        self.passes.fetch_add(1, Ordering::SeqCst);
        if self.fails {
            return Err(tch::TchError::Kind("no kernel image".to_owned()).into());
        }
        EngineModel::forward(&self.model, step)
    }
}

fn config() -> EngineConfig {
    tch::set_num_threads(1);
    EngineConfig {
        num_blocks: Some(64),
        ..EngineConfig::default()
    }
}

fn tokens(engine: &mut Engine<Loading>) -> Vec<(String, Vec<i64>)> {
    let sampled = GenerationConfig {
        do_sample: true,
        seed: Some(7),
        ..greedy(8)
    };
    for length in [30, 3, 17] {
        let prompt: Vec<i64> = (0..length).collect();
        engine
            .submit(Request::new(prompt, sampled.clone()))
            .unwrap();
    }
    let outcomes: Vec<Outcome> = engine.run_to_end().unwrap();
    let tokens = outcomes
        .into_iter()
        .map(|(id, done)| (id.to_string(), done.unwrap()[0].tokens.clone()));
    tokens.collect()
}

#[test]
fn a_warm_up_changes_neither_answers_nor_counters() {
    let mut cold = Engine::new(Loading::new(), config()).unwrap();
    let mut warm = Engine::new(Loading::new(), config()).unwrap();
    let before = warm.statistics();
    let time = warm.warm_up().unwrap();
    // A step for the prompts of two requests, another for their second tokens.
    assert_eq!(warm.model().passes(), 2);
    let mut after = warm.statistics();
    assert_eq!(std::mem::take(&mut after.warm_up), time);
    assert_eq!(after, before);
    assert!(warm.is_idle());
    assert_eq!(tokens(&mut warm), tokens(&mut cold));
}

#[test]
fn a_handle_is_there_only_when_its_model_has_loaded_everything() {
    let model = Loading::new();
    let passes = Arc::clone(&model.passes);
    let engine = EngineHandle::spawn_with(|| Engine::new(model, config())).unwrap();
    assert_eq!(passes.load(Ordering::SeqCst), 2);
    assert!(!engine.statistics().warm_up.is_zero());
}

#[test]
fn a_model_that_cannot_run_fails_when_the_handle_starts() {
    let model = Loading {
        fails: true,
        ..Loading::new()
    };
    let spawned = EngineHandle::spawn_with(|| Engine::new(model, config()));
    let error: Error = spawned.unwrap_err();
    assert!(error.to_string().contains("no kernel image"), "{error}");
}

#[test]
fn a_batch_of_conversations_is_answered_after_the_warm_up() {
    let model = Loading::new();
    let template = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    let conversations = [vec![Message::user("hi")]];
    let options = overdrive_generation::ChatBatchOptions {
        engine: config(),
        ..Default::default()
    };
    let tokenizer = Arc::new(byte_tokenizer());
    let answers = chat_batch(
        &model,
        &tokenizer,
        &template,
        &conversations,
        &greedy(4),
        &options,
    )
    .unwrap();
    assert_eq!(answers[0].as_ref().unwrap().completions[0].tokens.len(), 4);
    assert_eq!(model.passes(), 2 + 4);
}
