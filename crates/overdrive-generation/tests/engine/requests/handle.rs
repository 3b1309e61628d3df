//! Tests of a handle that many threads use.

use super::*;

#[test]
fn a_handle_serves_many_threads() {
    let model = tiny(128);
    let want: Vec<_> = (0..24)
        .map(|n| generate(&model, &[vec![n, 5, 9]], &greedy(10)).unwrap())
        .collect();
    let engine = EngineHandle::spawn(Engine::new(model, config(|_| {})).unwrap()).unwrap();
    let engine = &engine;
    std::thread::scope(|scope| {
        for thread in 0..4i64 {
            let want = &want;
            scope.spawn(move || {
                for n in (thread..24).step_by(4) {
                    let events = engine.submit(Request::new([n, 5, 9], greedy(10))).unwrap();
                    if n % 3 == 0 {
                        continue; // The client goes away, and its request with it.
                    }
                    let completions = events.wait().unwrap();
                    assert_eq!(completions[0].tokens, want[n as usize].new_tokens(0));
                }
            });
        }
    });
    assert!(
        engine.submit(Request::new([500], greedy(1))).is_err(),
        "checked before it is sent"
    );
    let mut events = engine.submit(Request::new([1], greedy(200))).unwrap();
    let first = events.next().unwrap();
    assert!(matches!(first, Event::Token { .. }));
    events.cancel();
    let last = events.by_ref().last().unwrap();
    assert!(last.is_last());
    let Event::Finished { completion, .. } = last else {
        panic!("{last:?}");
    };
    assert_eq!(completion.finish_reason, FinishReason::Stopped);
}

#[test]
fn a_handle_fails_requests_that_cannot_be_computed_and_serves_later_ones() {
    // The first call succeeds; the four after it fail.
    let engine = Engine::new(Faulty::new(5), config(|_| {})).unwrap();
    let engine = EngineHandle::spawn(engine).unwrap();
    let error = engine
        .submit(Request::new([1, 2], greedy(8)))
        .unwrap()
        .wait()
        .unwrap_err();
    assert!(matches!(error, Error::EngineFailed { .. }), "{error}");
    assert!(error.to_string().contains("out of memory"));
    let completions = engine
        .submit(Request::new([1, 2], greedy(8)))
        .unwrap()
        .wait()
        .unwrap();
    let alone = generate(&tiny(128), &[vec![1, 2]], &greedy(8)).unwrap();
    assert_eq!(completions[0].tokens, alone.new_tokens(0));
    let statistics = engine.finish().unwrap();
    assert_eq!(
        (
            statistics.failed,
            statistics.finished,
            statistics.blocks_used
        ),
        (1, 1, 0)
    );
    assert!(statistics.tokens_per_second() > 0.0);
    assert!(statistics.time_to_first_token.max > Duration::ZERO);
}

#[test]
fn a_request_whose_steps_fail_ends_no_other() {
    let model = tiny(128);
    let good: Vec<Vec<i64>> = (1..6).map(|n| vec![n; 3 * n as usize]).collect();
    let alone = |prompt: &Vec<i64>| {
        let prompt = std::slice::from_ref(prompt);
        let mut output = generate(&model, prompt, &greedy(12)).unwrap();
        output.sequences.remove(0)
    };
    let want: Vec<Vec<i64>> = good.iter().map(alone).collect();
    let unused = |id: &i64| !want.iter().any(|tokens| tokens.contains(id));
    let fatal = (0..128).find(unused).unwrap();
    let faulty = Faulty {
        fatal: Some(fatal),
        ..Faulty::new(0)
    };
    let engine = EngineHandle::spawn(Engine::new(faulty, config(|_| {})).unwrap()).unwrap();
    let submit = |prompt: &[i64]| {
        let request = Request::new(prompt, greedy(12));
        engine.submit(request).unwrap()
    };
    let mut events: Vec<_> = good[..3].iter().map(|prompt| submit(prompt)).collect();
    let bad = submit(&[7, fatal, 7]);
    events.extend(good[3..].iter().map(|prompt| submit(prompt)));
    let error = bad.wait().unwrap_err();
    assert!(matches!(error, Error::EngineFailed { .. }), "{error}");
    assert!(error.to_string().contains("a fatal token"), "{error}");
    for ((events, prompt), want) in events.into_iter().zip(&good).zip(&want) {
        let completions = events.wait().unwrap();
        assert_eq!(completions[0].tokens, want[prompt.len()..]);
    }
    let statistics = engine.finish().unwrap();
    let ends = (statistics.failed, statistics.finished);
    assert_eq!((ends, statistics.blocks_used), ((1, 5), 0));
}

#[test]
fn an_engine_is_made_on_the_thread_of_its_handle() {
    let here = std::thread::current().id();
    let engine = EngineHandle::spawn_with(move || {
        assert_ne!(std::thread::current().id(), here);
        Engine::new(tiny(128), config(|_| {}))
    })
    .unwrap();
    let completions = engine
        .submit(Request::new([1, 2], greedy(8)))
        .unwrap()
        .wait()
        .unwrap();
    let alone = generate(&tiny(128), &[vec![1, 2]], &greedy(8)).unwrap();
    assert_eq!(completions[0].tokens, alone.new_tokens(0));

    let refused = EngineHandle::spawn_with(|| {
        Engine::new(tiny(128), config(|config| config.max_num_seqs = 0))
    });
    assert!(refused.unwrap_err().to_string().contains("max_num_seqs"));
    let panicked = EngineHandle::spawn_with(|| -> std::result::Result<Engine<CausalLm>, Error> {
        panic!("on purpose")
    });
    assert!(matches!(panicked, Err(Error::EngineStopped)));
}

#[test]
fn a_dropped_handle_ends_its_requests() {
    let engine = EngineHandle::spawn(Engine::new(tiny(128), config(|_| {})).unwrap()).unwrap();
    let events = engine.submit(Request::new([1], greedy(250))).unwrap();
    drop(engine);
    assert!(matches!(events.wait(), Err(Error::EngineStopped)));
}

#[test]
fn events_reach_a_function_and_a_dropped_ticket_cancels() {
    let model = tiny(128);
    let want = generate(&model, &[vec![7, 5, 9]], &greedy(10)).unwrap();
    let engine = EngineHandle::spawn(Engine::new(model, config(|_| {})).unwrap()).unwrap();
    let (sender, events) = std::sync::mpsc::channel();
    let ticket = engine
        .submit_with(Request::new([7, 5, 9], greedy(10)), move |event| {
            sender.send(event).unwrap();
        })
        .unwrap();
    // The function is dropped after the last event, which ends the iteration.
    let events: Vec<Event> = events.iter().collect();
    assert_eq!(events.len(), 11);
    let Some(Event::Finished { completion, .. }) = events.last() else {
        panic!("{events:?}");
    };
    assert_eq!(completion.tokens, want.new_tokens(0));
    // Of a request that has ended nothing is left to cancel.
    drop(ticket);

    let (sender, events) = std::sync::mpsc::channel();
    let ticket = engine
        .submit_with(Request::new([1], greedy(200)), move |event| {
            sender.send(event).unwrap();
        })
        .unwrap();
    assert!(matches!(events.recv().unwrap(), Event::Token { .. }));
    drop(ticket);
    let Some(Event::Finished { completion, .. }) = events.iter().last() else {
        panic!("no end");
    };
    assert_eq!(completion.finish_reason, FinishReason::Stopped);
    let statistics = engine.finish().unwrap();
    assert_eq!(
        (
            statistics.finished,
            statistics.cancelled,
            statistics.blocks_used
        ),
        (1, 1, 0)
    );
}

#[test]
fn a_job_gets_the_model_between_two_steps() {
    let model = tiny(64);
    let ids = Tensor::from_slice(&[3i64, 4, 5]).unsqueeze(0);
    let want = EngineModel::hidden_states(&model, &ids).unwrap();
    let engine = EngineHandle::spawn(Engine::new(model, config(|_| {})).unwrap()).unwrap();
    let events = engine.submit(Request::new([1, 2], greedy(20))).unwrap();
    let (sender, receiver) = std::sync::mpsc::channel();
    engine
        .run(move |model| {
            let _no_grad = tch::no_grad_guard();
            sender.send(model.hidden_states(&ids).unwrap()).unwrap();
        })
        .unwrap();
    assert!(receiver.recv().unwrap().allclose(&want, 1e-6, 1e-6, false));
    assert_eq!(events.wait().unwrap()[0].tokens.len(), 20);
    assert_eq!(engine.vocab_size(), 64);
    assert_eq!(
        (engine.max_prompt_len(), engine.max_model_len()),
        (256, 257)
    );
}

/// Stops the engine's thread in a job, so that commands can be sent together, until the sender is used.
fn hold(engine: &EngineHandle) -> std::sync::mpsc::Sender<()> {
    let ((open, gate), (begin, begun)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel());
    let job = move |_: &dyn EngineModel| {
        begin.send(()).unwrap();
        gate.recv().unwrap();
    };
    engine.run(job).unwrap();
    begun.recv().unwrap();
    open
}

#[test]
fn a_step_follows_each_job_while_there_is_a_request() {
    let engine = EngineHandle::spawn(Engine::new(tiny(64), config(|_| {})).unwrap()).unwrap();
    let open = hold(&engine);
    let tokens = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&tokens);
    let _ticket = engine
        .submit_with(Request::new([1, 2], greedy(20)), move |event| {
            let is_token = matches!(event, Event::Token { .. });
            counted.fetch_add(usize::from(is_token), Ordering::Relaxed);
        })
        .unwrap();
    let (sender, seen) = std::sync::mpsc::channel();
    for _ in 0..4 {
        let (sender, tokens) = (sender.clone(), Arc::clone(&tokens));
        let job = move |_: &dyn EngineModel| sender.send(tokens.load(Ordering::Relaxed)).unwrap();
        engine.run(job).unwrap();
    }
    open.send(()).unwrap();
    let seen: Vec<usize> = seen.iter().take(4).collect();
    assert_eq!(seen, [0, 1, 2, 3]);
}

#[test]
fn a_request_that_follows_jobs_begins_before_them() {
    let engine = EngineHandle::spawn(Engine::new(tiny(64), config(|_| {})).unwrap()).unwrap();
    let open = hold(&engine);
    let first = engine.submit(Request::new([1, 2], greedy(20))).unwrap();
    let tokens = Arc::new(AtomicUsize::new(0));
    let (sender, seen) = std::sync::mpsc::channel();
    for _ in 0..4 {
        let (sender, tokens) = (sender.clone(), Arc::clone(&tokens));
        let job = move |_: &dyn EngineModel| sender.send(tokens.load(Ordering::Relaxed)).unwrap();
        engine.run(job).unwrap();
    }
    let counted = Arc::clone(&tokens);
    let _second = engine
        .submit_with(Request::new([3, 4], greedy(20)), move |event| {
            let is_token = matches!(event, Event::Token { .. });
            counted.fetch_add(usize::from(is_token), Ordering::Relaxed);
        })
        .unwrap();
    first.cancel();
    open.send(()).unwrap();
    let seen: Vec<usize> = seen.iter().take(4).collect();
    assert_eq!(seen, [0, 1, 2, 3]);
    // Cancelled before its first step.
    assert!(first.wait().unwrap()[0].tokens.is_empty());
}

#[test]
fn a_handle_whose_thread_has_ended_is_not_running() {
    let engine = EngineHandle::spawn(Engine::new(tiny(64), config(|_| {})).unwrap()).unwrap();
    assert!(engine.is_running());
    engine.run(|_| panic!("on purpose")).unwrap();
    while engine.is_running() {
        std::thread::yield_now();
    }
    let refused = engine.submit(Request::new([1], greedy(1)));
    assert!(matches!(refused, Err(Error::EngineStopped)));
    assert!(matches!(engine.finish(), Err(Error::EngineStopped)));
}
