//! Tests of requests and steps that fail.

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
