//! Tests of constraints, log-probabilities, time limits, text and stop strings.

use super::*;

#[test]
fn constraints_log_probabilities_and_a_time_limit_are_heeded() {
    let model = tiny(128);
    let config_of = GenerationConfig {
        logprobs: Some(2),
        eos_token_id: vec![0],
        ..greedy(10)
    };
    let choices = || ChoiceConstraint::new(&[vec![9, 8, 7], vec![9, 8, 6, 5]], &[0]).unwrap();
    let options = GenerateOptions {
        constraints: vec![Box::new(choices())],
        ..GenerateOptions::default()
    };
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| std::ops::ControlFlow::Continue(());
    let prompt = vec![1, 2, 3];
    let want = generate_with_options(
        &model,
        std::slice::from_ref(&prompt),
        &config_of,
        &options,
        go_on,
    )
    .unwrap();
    let mut engine = Engine::new(&model, config(|_| {})).unwrap();
    let config_of_lookup = config_of.clone();
    let request = Request::new(prompt, config_of).with_constraint(Box::new(choices()));
    engine.submit(request).unwrap();
    let late = GenerationConfig {
        max_time: Some(1e-9),
        ..greedy(100)
    };
    engine.submit(Request::new([1], late)).unwrap();
    let mut outcomes = engine.run_to_end().unwrap();
    let late = outcomes.remove(1).1.unwrap().remove(0);
    assert_eq!(
        (late.tokens.len(), late.finish_reason),
        (0, FinishReason::TimeLimit)
    );
    let got = outcomes.remove(0).1.unwrap().remove(0);
    assert_eq!(got.tokens, want.new_tokens(0));
    assert_eq!(got.finish_reason, want.finish_reasons[0]);
    // A constraint holds for each of several tokens of a step.
    let lookup = GenerationConfig {
        prompt_lookup_num_tokens: Some(4),
        ..config_of_lookup
    };
    let request = Request::new(vec![9, 8, 6, 5, 1, 9, 8, 6, 5], lookup);
    engine
        .submit(request.with_constraint(Box::new(choices())))
        .unwrap();
    let outcome = engine.run_to_end().unwrap().remove(0).1;
    let constrained = outcome.unwrap().remove(0);
    let allowed = [vec![9, 8, 7], vec![9, 8, 6, 5]];
    let is_allowed = |choice: &Vec<i64>| constrained.tokens.starts_with(choice);
    assert!(allowed.iter().any(is_allowed), "{constrained:?}");
    assert!(engine.statistics().proposed_tokens > 0);

    let (got, want) = (got.logprobs.unwrap(), want.logprobs.unwrap().remove(0));
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(&want) {
        assert!(
            (got.logprob - want.logprob).abs() < 1e-4,
            "{got:?} for {want:?}"
        );
    }
}

#[test]
fn texts_and_stop_strings_are_those_of_generate() {
    let (model, tokenizer) = (tiny(256), byte_tokenizer());
    let prompt: Vec<i64> = vec![10, 20, 30];
    let free = generate(&model, std::slice::from_ref(&prompt), &sampled(40, 8)).unwrap();
    let ids: Vec<u32> = free.new_tokens(0).iter().map(|&id| id as u32).collect();
    let all = tokenizer.decode(&ids, true).unwrap();
    let stop: String = all.chars().skip(12).take(2).collect();
    let config_of = GenerationConfig {
        stop_strings: vec!["never".to_owned(), stop.clone()],
        ..sampled(40, 8)
    };
    let options = GenerateOptions {
        tokenizer: Some(&tokenizer),
        ..GenerateOptions::default()
    };
    let go_on = |_: overdrive_generation::GeneratedToken<'_>| std::ops::ControlFlow::Continue(());
    let want = generate_with_options(
        &model,
        std::slice::from_ref(&prompt),
        &config_of,
        &options,
        go_on,
    )
    .unwrap();
    let mut engine = Engine::new(&model, config(|_| {}))
        .unwrap()
        .with_tokenizer(tokenizer);
    engine
        .submit(Request::new(prompt.clone(), config_of))
        .unwrap();
    let whole = engine.submit(Request::new(prompt, sampled(40, 8))).unwrap();
    let (mut streamed, mut done) = (BTreeMap::<_, String>::new(), BTreeMap::new());
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            match event {
                Event::Token { request, text, .. } => {
                    streamed.entry(request).or_default().push_str(&text);
                }
                Event::Finished {
                    request,
                    completion,
                    ..
                } => {
                    done.insert(request, completion);
                }
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!(done[&whole].text.as_deref(), Some(all.as_str()));
    assert_eq!(streamed[&whole], all);
    let (id, stopped) = done.first_key_value().unwrap();
    assert_eq!(
        stopped.finish_reason,
        FinishReason::StopString { number: 1 }
    );
    assert_eq!(stopped.text.as_deref(), Some(want.texts[0].as_str()));
    assert_eq!(streamed[id], want.texts[0]);
    assert!(!want.texts[0].contains(&stop));
}
