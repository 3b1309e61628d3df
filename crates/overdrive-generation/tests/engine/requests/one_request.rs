//! Tests of a request that is computed to its end, as a turn of a conversation is.

use std::ops::ControlFlow;

use overdrive_generation::CacheShape;

use super::*;

/// Computes a request; returns its tokens and the tokens that were handed out.
fn turn(engine: &mut Engine<Faulty>, prompt: &[i64]) -> Result<(Vec<i64>, Vec<i64>)> {
    let mut streamed = Vec::new();
    let completions = engine.run_one(Request::new(prompt, greedy(8)), |events| {
        for event in events {
            if let Event::Token { id, .. } = event {
                streamed.push(*id);
            }
        }
        ControlFlow::Continue(())
    })?;
    Ok((completions[0].tokens.clone(), streamed))
}

#[test]
fn nothing_of_a_failed_turn_appears_in_the_next() {
    // The second step fails, when one token has been handed out.
    let mut engine = Engine::new(Faulty::new(2), config(|_| {})).unwrap();
    let error = turn(&mut engine, &[1, 2, 3]).unwrap_err();
    assert!(error.to_string().contains("out of memory"), "{error}");
    assert!(engine.is_idle(), "neither a sequence nor an event is left");
    assert_no_block_is_held(&engine);
    // The prompt of the failed turn begins the next one: its blocks may be found in the cache.
    for prompt in [vec![4, 5], vec![1, 2, 3, 6], vec![1; 20]] {
        let (tokens, streamed) = turn(&mut engine, &prompt).unwrap();
        let alone = generate(&engine.model().model, &[prompt], &greedy(8)).unwrap();
        assert_eq!(tokens, alone.new_tokens(0));
        assert_eq!(streamed, tokens);
    }
    // A request with logits that are not finite fails alone.
    let error = turn(&mut engine, &[4, 99]).unwrap_err();
    assert!(matches!(error, Error::BadLogits { .. }), "{error}");
    assert!(engine.is_idle());
    assert_no_block_is_held(&engine);
}

#[test]
fn a_broken_turn_keeps_its_tokens_and_the_events_of_others_wait() {
    let model = tiny(128);
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    let other = engine.submit(Request::new([9, 9], greedy(3))).unwrap();
    let mut tokens = 0;
    let completions = engine
        .run_one(Request::new([1, 2], greedy(50)), |events| {
            tokens += events.len();
            match tokens {
                0..5 => ControlFlow::Continue(()),
                _ => ControlFlow::Break(()),
            }
        })
        .unwrap();
    assert_eq!(completions[0].finish_reason, FinishReason::Stopped);
    let alone = generate(&model, &[vec![1, 2]], &greedy(5)).unwrap();
    assert_eq!(completions[0].tokens, alone.new_tokens(0));
    let outcomes = engine.run_to_end().unwrap();
    assert_eq!(outcomes.len(), 1);
    assert_eq!(outcomes[0].0, other);
    let alone = generate(&model, &[vec![9, 9]], &greedy(3)).unwrap();
    assert_eq!(
        outcomes[0].1.as_ref().unwrap()[0].tokens,
        alone.new_tokens(0)
    );
}

#[test]
fn a_cache_smaller_than_the_context_bounds_a_sequence_instead_of_refusing_it() {
    // As Llama-2-7B, whose folder says `max_length` 4096, in a cache that takes less.
    let model = tiny(128);
    let to_context = GenerationConfig {
        max_length: Some(256),
        ..GenerationConfig::default()
    };
    let alone = generate(&model, &[vec![1, 2, 3]], &greedy(50)).unwrap();
    let mut engine = Engine::new(&model, config(|c| c.num_blocks = Some(8))).unwrap();
    let run = |engine: &mut Engine<&CausalLm>, prompt: Vec<i64>| {
        engine.run_one(Request::new(prompt, to_context.clone()), |_| {
            ControlFlow::Continue(())
        })
    };
    let completion = run(&mut engine, vec![1, 2, 3]).unwrap().remove(0);
    // 32 slots: the last token is never read.
    assert_eq!(completion.tokens, alone.new_tokens(0)[..30]);
    assert_eq!(completion.finish_reason, FinishReason::ContextFull);
    // The longest prompt has room for one token; a longer one is refused with the numbers.
    let last = run(&mut engine, vec![1; 32]).unwrap().remove(0);
    assert_eq!(last.tokens.len(), 1);
    let error = run(&mut engine, vec![1; 33]).unwrap_err();
    assert!(
        matches!(
            error,
            Error::RequestTooLarge {
                prompt: 33,
                blocks: 9,
                num_blocks: 8,
                ..
            }
        ),
        "{error}"
    );
    // A length of the caller's own is a promise that the cache has to hold.
    let mut engine = Engine::new(
        &model,
        config(|c| {
            c.num_blocks = Some(8);
            c.max_model_len = Some(100);
        }),
    )
    .unwrap();
    let error = run(&mut engine, vec![1, 2, 3]).unwrap_err();
    assert!(matches!(error, Error::RequestTooLarge { .. }), "{error}");
}

#[test]
fn the_default_cache_holds_one_context_up_to_a_bound() {
    let blocks = |context: i64, hidden_size: i64| {
        let sizes = LlamaConfig {
            vocab_size: 16,
            hidden_size,
            intermediate_size: 32,
            num_hidden_layers: 1,
            num_attention_heads: 1,
            max_position_embeddings: context,
            ..LlamaConfig::default()
        };
        let model = Shape(sizes);
        let config = EngineConfig {
            max_num_seqs: 2,
            block_size: 1,
            ..EngineConfig::default()
        };
        let engine = Engine::new(model, config).unwrap();
        engine.statistics().blocks as u64
    };
    // A token takes 2 · 4 bytes a channel. Two short contexts take less than the default of 1 GiB.
    assert_eq!(blocks(100, 64), 2 * 101);
    // One context of 2 GiB fits, one of 8 GiB has 4 GiB.
    assert_eq!(blocks(1 << 12, 1 << 16), (1 << 12) + 1);
    assert_eq!(blocks(1 << 14, 1 << 16), 1 << 13);
}

/// A model of which only the sizes are asked.
struct Shape(LlamaConfig);

impl EngineModel for Shape {
    fn cache_shape(&self) -> Result<CacheShape> {
        Ok(CacheShape {
            windows: vec![None],
            kv_heads: 1,
            head_dim: self.0.hidden_size,
            ..CacheShape::default()
        })
    }

    fn vocab_size(&self) -> usize {
        16
    }

    fn context(&self) -> usize {
        self.0.max_position_embeddings as usize
    }

    fn forward(&self, _step: RaggedStep<'_, '_>) -> Result<Tensor> {
        unreachable!("no request is submitted")
    }
}

#[test]
fn the_cache_of_the_settings_does_not_stop_the_engine() {
    let model = tiny(128);
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    let want = generate(&model, &[vec![1, 2, 3]], &greedy(6)).unwrap();
    for name in ["static", "dynamic", "sliding_window", "quantized", "paged"] {
        let config = GenerationConfig {
            cache_implementation: Some(name.to_owned()),
            ..greedy(6)
        };
        let request = Request::new([1, 2, 3], config);
        let completions = engine.run_one(request, |_| ControlFlow::Continue(()));
        assert_eq!(completions.unwrap()[0].tokens, want.new_tokens(0), "{name}");
    }
    // A window that the model does not have would give other tokens.
    let mut config = greedy(6);
    config.cache_implementation = Some("sliding_window".to_owned());
    config.cache_config.window_length = Some(8);
    let error = engine.submit(Request::new([1], config)).unwrap_err();
    assert!(error.to_string().contains("window_length"), "{error}");
}
