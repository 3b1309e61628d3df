//! Packages whose weights are replaced.

use super::*;

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn other_weights_give_the_other_models_logits_on_python() {
    let fixture = fixture();
    let model = load(&fixture.package(), "logits");
    let constants = model.constants().unwrap();
    let head = constants
        .iter()
        .find(|constant| constant.name == "lm_head.weight");
    let embedding = constants
        .iter()
        .find(|c| c.name == "model.embed_tokens.weight");
    assert!(
        head.is_some() != embedding.is_some(),
        "tied weights are one constant"
    );
    let found = model
        .constant("model.embed_tokens.weight")
        .unwrap()
        .unwrap();
    let expected = fixture.model("a").named_parameters();
    let expected = expected
        .iter()
        .find(|(name, _)| name == "model.embed_tokens.weight");
    assert_eq!(found, expected.unwrap().1);
    assert!(model.constant("no.such").unwrap().is_none());

    model
        .replace_constants_from(fixture.folder_of("b"))
        .unwrap();
    assert!(furthest(&logits(&model, &fixture.ids()), &fixture.logits_of("b")) < TOLERANCE);
    let weights = fixture.model("a").named_parameters();
    model
        .replace_constants(&weights, ReplaceOptions::default())
        .unwrap();
    assert!(furthest(&logits(&model, &fixture.ids()), &fixture.logits_of("a")) < TOLERANCE);

    // A part: the first block of b in a, as our own model has it.
    let part: Vec<(String, Tensor)> = fixture
        .model("b")
        .named_parameters()
        .into_iter()
        .filter(|(name, _)| name.contains("layers.0."))
        .collect();
    let partial = ReplaceOptions {
        partial: true,
        ..ReplaceOptions::default()
    };
    model.replace_constants(&part, partial).unwrap();
    let mixed = fixture.model("a");
    for ((name, to), (_, from)) in mixed
        .named_parameters()
        .iter()
        .zip(fixture.model("b").named_parameters())
    {
        if name.contains("layers.0.") {
            to.detach().copy_(&from);
        }
    }
    let far = furthest(
        &logits(&model, &fixture.ids()),
        &eager(&mixed, &fixture.ids()),
    );
    assert!(far < TOLERANCE, "{far}");
}

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn shared_weights_are_one_memory_until_they_are_replaced_on_python() {
    let fixture = fixture();
    let model = load(&fixture.package(), "logits");
    let ours = fixture.model("b");
    let share = ReplaceOptions {
        share: true,
        ..ReplaceOptions::default()
    };
    model
        .replace_constants(&ours.named_parameters(), share)
        .unwrap();
    assert!(furthest(&logits(&model, &fixture.ids()), &fixture.logits_of("b")) < TOLERANCE);
    for (_, tensor) in ours.named_parameters() {
        let _same = tensor.detach().g_mul_scalar_(0.9);
    }
    let changed = logits(&model, &fixture.ids());
    assert!(furthest(&changed, &fixture.logits_of("b")) > 0.01);
    assert!(furthest(&changed, &eager(&ours, &fixture.ids())) < TOLERANCE);
    // The package keeps the memory alive.
    drop(ours);
    assert_eq!(logits(&model, &fixture.ids()), changed);
    // Half of another model, copied; the shared rest is copied along.
    let weights = fixture.model("a").named_parameters();
    let (half, _) = weights.split_at(weights.len() / 2);
    for share in [false, true] {
        let options = ReplaceOptions {
            partial: true,
            share,
            ..ReplaceOptions::default()
        };
        model.replace_constants(half, options).unwrap();
        assert!(furthest(&logits(&model, &fixture.ids()), &changed) > 0.01);
    }
    model
        .replace_constants(&weights, ReplaceOptions::default())
        .unwrap();
    drop(weights);
    assert!(furthest(&logits(&model, &fixture.ids()), &fixture.logits_of("a")) < TOLERANCE);
}

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn constants_that_do_not_fit_change_nothing_and_are_all_named_on_python() {
    let fixture = fixture();
    let model = load(&fixture.package(), "logits");
    let before = logits(&model, &fixture.ids());
    let mut weights = fixture.model("b").named_parameters();
    weights.retain(|(name, _)| !name.ends_with("layers.1.self_attn.o_proj.weight"));
    weights[1].1 = weights[1].1.to_kind(Kind::Double);
    weights[2].1 = weights[2].1.narrow(0, 0, 1);
    weights.push(("surprise".to_owned(), weights[0].1.shallow_clone()));
    let error = model
        .replace_constants(&weights, ReplaceOptions::default())
        .unwrap_err();
    let text = error.to_string();
    for expected in [
        "nothing was replaced",
        "Double",
        "[1, ",
        "\"surprise\"",
        "o_proj.weight\" is missing",
    ] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert_eq!(logits(&model, &fixture.ids()), before);

    let embedding = fixture.model("b").named_parameters().swap_remove(0);
    assert_eq!(embedding.0, "model.embed_tokens.weight");
    let mut weights = fixture.model("b").named_parameters();
    weights.push(("lm_head.weight".to_owned(), &embedding.1 + 1.0));
    let error = model
        .replace_constants(&weights, ReplaceOptions::default())
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("name the same constant but differ"),
        "{error}"
    );
    weights.pop();
    weights.push(("lm_head.weight".to_owned(), embedding.1.copy()));
    model
        .replace_constants(&weights, ReplaceOptions::default())
        .unwrap();
    assert!(furthest(&logits(&model, &fixture.ids()), &fixture.logits_of("b")) < TOLERANCE);
}

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn many_threads_run_while_weights_change_and_none_sees_a_mixture_on_python() {
    let fixture = fixture();
    let options = LoadOptions {
        runners: 2,
        ..LoadOptions::for_model("logits")
    };
    let model = CompiledModel::load(fixture.package(), &options).unwrap();
    let weights = ["b", "a"].map(|name| fixture.model(name).named_parameters());
    let stop = AtomicBool::new(false);
    let seen = std::thread::scope(|scope| {
        let run = || {
            let ids = fixture.ids();
            let expected = ["a", "b"].map(|name| fixture.logits_of(name));
            let mut seen = [0; 2];
            while !stop.load(Ordering::Relaxed) {
                let found = logits(&model, &ids);
                let far = [0, 1].map(|which: usize| furthest(&found, &expected[which]));
                let which = usize::from(far[1] < far[0]);
                assert!(far[which] < TOLERANCE, "logits of neither model: {far:?}");
                seen[which] += 1;
            }
            seen
        };
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(run)).collect();
        for round in 0..40 {
            let options = ReplaceOptions {
                share: round % 3 == 2,
                ..ReplaceOptions::default()
            };
            let outcome = model.replace_constants(&weights[round % 2], options);
            std::thread::sleep(std::time::Duration::from_millis(5));
            if outcome.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            outcome.unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .fold([0; 2], |sum, seen| [sum[0] + seen[0], sum[1] + seen[1]])
    });
    assert!(seen[0] > 0 && seen[1] > 0, "{seen:?}");
}
