//! Tests of requests and steps that fail.

use overdrive_transformer::{DeltaNetConfig, LayerType, LlamaFamily};

use super::*;

#[test]
fn a_request_with_bad_logits_fails_and_no_other_does() {
    let mut engine = Engine::new(Faulty::new(0), config(|_| {})).unwrap();
    let good = engine.submit(Request::new([1, 2, 3], greedy(8))).unwrap();
    let bad = engine
        .submit(Request::new(
            [4, 99],
            GenerationConfig {
                num_return_sequences: 3,
                ..sampled(8, 1)
            },
        ))
        .unwrap();
    let other = engine.submit(Request::new([5, 6], greedy(8))).unwrap();
    let outcomes: BTreeMap<_, _> = engine.run_to_end().unwrap().into_iter().collect();
    assert!(
        matches!(outcomes[&bad], Err(Error::BadLogits { .. })),
        "{:?}",
        outcomes[&bad]
    );
    for (id, prompt) in [(good, vec![1, 2, 3]), (other, vec![5, 6])] {
        let alone = generate(&engine.model().model, &[prompt], &greedy(8)).unwrap();
        assert_eq!(
            outcomes[&id].as_ref().unwrap()[0].tokens,
            alone.new_tokens(0)
        );
    }
    let statistics = engine.statistics();
    assert_eq!((statistics.finished, statistics.failed), (2, 1));
    assert_no_block_is_held(&engine);
}

#[test]
fn a_step_that_fails_is_undone_and_computed_again() {
    let mut engine = Engine::new(Faulty::new(4), config(|_| {})).unwrap();
    engine
        .submit(Request::new([1, 2, 3], sampled(10, 5)))
        .unwrap();
    engine.submit(Request::new([7; 20], greedy(10))).unwrap();
    let mut errors = 0;
    let outcomes = loop {
        match engine.run_to_end() {
            Ok(outcomes) => break outcomes,
            Err(error) => {
                assert!(error.to_string().contains("out of memory"));
                errors += 1;
            }
        }
    };
    assert_eq!(errors, 3);
    let model = &engine.model().model;
    for (outcome, (prompt, config)) in outcomes
        .iter()
        .zip([(vec![1, 2, 3], sampled(10, 5)), (vec![7; 20], greedy(10))])
    {
        let alone = generate(model, &[prompt], &config).unwrap();
        assert_eq!(outcome.1.as_ref().unwrap()[0].tokens, alone.new_tokens(0));
    }
    assert_no_block_is_held(&engine);
}

/// The state of the draft model does not reach the token before its proposals, which has to be read again.
#[test]
fn a_draft_model_with_states_reads_a_prompt_again_after_a_step_that_fails() {
    let defaults = LlamaConfig::of(LlamaFamily::Qwen35);
    let draft = LlamaConfig {
        vocab_size: 128,
        hidden_size: 16,
        intermediate_size: 32,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        head_dim: Some(8),
        partial_rotary_factor: 0.5,
        max_position_embeddings: 256,
        layer_types: Some(vec![LayerType::Linear, LayerType::Full]),
        delta_net: defaults.delta_net.clone().map(|sizes| DeltaNetConfig {
            linear_key_head_dim: 8,
            linear_value_head_dim: 8,
            linear_num_key_heads: 1,
            linear_num_value_heads: 2,
            ..sizes
        }),
        ..defaults
    };
    let draft = CausalLm::new(&draft.into(), &InitOptions::default()).unwrap();
    let config = config(|c| {
        c.num_blocks = Some(64);
        c.max_num_batched_tokens = Some(256);
    });
    let engine = Engine::new(Faulty::new(2), config).unwrap();
    let mut engine = engine.with_assistant(draft, None).unwrap();
    let prompt: Vec<i64> = (0..90).map(|at| at * at % 97).collect();
    engine
        .submit(Request::new(prompt.clone(), greedy(6)))
        .unwrap();
    engine.step().unwrap();
    // The draft model has read the prompt before this step.
    let error = engine.step().unwrap_err().to_string();
    assert!(error.contains("out of memory"), "{error}");
    let (_, outcome) = engine.run_to_end().unwrap().remove(0);
    let alone = generate(&engine.model().model, &[prompt], &greedy(6)).unwrap();
    assert_eq!(outcome.unwrap()[0].tokens, alone.new_tokens(0));
    assert_no_block_is_held(&engine);
}
