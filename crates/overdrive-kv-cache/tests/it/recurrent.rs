//! The states of recurrent layers, beside keys and values in a dense and in a paged cache: each sequence has the states
//! of its own tokens, whatever is computed beside it, and a truncation returns to them exactly.

use overdrive_kv_cache::{
    AttendOptions, CacheImplementation, CacheShape, DeltaRuleHeads, DeltaRuleStep, DynamicCache,
    Error, HybridCache, KvCache, PagedCache, PagedCacheConfig, load, save,
};
use overdrive_linear_attention::DeltaRuleOptions;
use tch::{Device, Tensor};

const HEADS: DeltaRuleHeads = DeltaRuleHeads {
    keys: 1,
    key_dim: 4,
    values: 2,
    value_dim: 6,
};

/// The inputs of two recurrent layers and of a layer of attention between them, for tokens of a sequence.
struct Inputs {
    recurrent: [DeltaRuleStep; 2],
    attention: Tensor,
}

fn random(generator: &mut impl FnMut() -> f32, shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    let values: Vec<f32> = (0..count).map(|_| generator()).collect();
    Tensor::from_slice(&values).view(shape)
}

/// Inputs of `tokens` tokens, the same for each `seed`.
fn inputs(tokens: i64, seed: u64) -> Inputs {
    let mut generator = overdrive_core::random::Generator::new(seed, 0);
    let mut next = move || generator.normal() as f32;
    let convolution = Tensor::from_slice(&[0.5f32, -0.25, 1.0]).expand([HEADS.width(), 3], true);
    let mut layer = || DeltaRuleStep {
        mixed: random(&mut next, &[1, tokens, HEADS.width()]),
        convolution: convolution.contiguous(),
        decay: -random(&mut next, &[1, tokens, 2]).abs(),
        beta: random(&mut next, &[1, tokens, 2]).sigmoid(),
        heads: HEADS,
        options: DeltaRuleOptions {
            qk_l2norm: true,
            ..DeltaRuleOptions::default()
        },
    };
    let recurrent = [layer(), layer()];
    Inputs {
        recurrent,
        attention: random(&mut next, &[1, 1, tokens, 8]),
    }
}

/// The tokens `from..to` of inputs, several of them side by side.
fn joined(parts: &[(&Inputs, std::ops::Range<i64>)], dim: i64) -> Inputs {
    let cut = |of: &dyn Fn(&Inputs) -> Tensor, tokens: i64| {
        let parts = parts
            .iter()
            .map(|(inputs, range)| of(inputs).narrow(tokens, range.start, range.end - range.start));
        let dim = if dim == 0 { 0 } else { tokens };
        Tensor::cat(&parts.collect::<Vec<_>>(), dim)
    };
    let layer = |number: usize| DeltaRuleStep {
        mixed: cut(&|inputs| inputs.recurrent[number].mixed.shallow_clone(), 1),
        decay: cut(&|inputs| inputs.recurrent[number].decay.shallow_clone(), 1),
        beta: cut(&|inputs| inputs.recurrent[number].beta.shallow_clone(), 1),
        convolution: parts[0].0.recurrent[number].convolution.shallow_clone(),
        heads: HEADS,
        options: parts[0].0.recurrent[number].options,
    };
    Inputs {
        recurrent: [layer(0), layer(1)],
        attention: cut(&|inputs| inputs.attention.shallow_clone(), 2),
    }
}

/// Runs the three layers, and returns the outputs of the recurrent ones.
fn run(cache: &mut dyn KvCache, inputs: &Inputs) -> [Tensor; 2] {
    let first = cache.delta_rule(0, &inputs.recurrent[0]).unwrap();
    let x = &inputs.attention;
    let options = AttendOptions::default();
    let _attended = cache.attend(1, x, x, x, &options).unwrap();
    let second = cache.delta_rule(2, &inputs.recurrent[1]).unwrap();
    [first, second]
}

fn hybrid() -> HybridCache {
    HybridCache::new(Box::new(DynamicCache::new(1)), &[true, false, true]).unwrap()
}

fn paged() -> PagedCache {
    PagedCache::new(PagedCacheConfig {
        layers: 3,
        recurrent: vec![true, false, true],
        head_dim: 8,
        block_size: 4,
        num_blocks: 40,
        enable_prefix_caching: false,
        ..PagedCacheConfig::default()
    })
    .unwrap()
}

/// The outputs of a sequence alone, in one step.
fn alone(inputs: &Inputs, tokens: i64) -> [Tensor; 2] {
    run(&mut hybrid(), &joined(&[(inputs, 0..tokens)], 1))
}

fn assert_same(found: &[Tensor; 2], wanted: &[Tensor; 2], what: &str) {
    for (found, wanted) in found.iter().zip(wanted) {
        assert_eq!(found, wanted, "{what}");
    }
}

fn last(outputs: &[Tensor; 2], tokens: i64) -> [Tensor; 2] {
    let cut = |output: &Tensor| output.narrow(1, output.size()[1] - tokens, tokens);
    [cut(&outputs[0]), cut(&outputs[1])]
}

#[test]
fn a_sequence_has_the_same_bits_however_its_tokens_are_divided_and_truncated() {
    let inputs = inputs(12, 1);
    let whole = alone(&inputs, 12);
    for chunks in [vec![12], vec![1; 12], vec![5, 3, 1, 3]] {
        let mut cache = hybrid();
        let mut position = 0;
        for tokens in chunks {
            // Tokens that are not accepted, of which none, some or all are dropped again.
            let most = (12 - position).min(tokens + 4);
            let _outputs = run(
                &mut cache,
                &joined(&[(&inputs, position..position + most)], 1),
            );
            cache.truncate(position + tokens).unwrap();
            assert_eq!(cache.len(), position + tokens);
            position += tokens;
        }
        cache.truncate(11).unwrap();
        let outputs = run(&mut cache, &joined(&[(&inputs, 11..12)], 1));
        assert_same(&outputs, &last(&whole, 1), "the last token");
    }
}

#[test]
fn a_truncation_beyond_the_last_step_is_refused_with_the_way_out() {
    let inputs = inputs(80, 2);
    let mut cache = hybrid();
    for range in [0..3, 3..5] {
        let _outputs = run(&mut cache, &joined(&[(&inputs, range)], 1));
    }
    let error = cache.truncate(2).unwrap_err().to_string();
    assert!(
        error.contains("have their state after 3 tokens and now"),
        "{error}"
    );
    assert!(error.contains("fork the cache"), "{error}");
    assert_eq!(cache.len(), 5);
    // Its inputs are not kept, because there are too many.
    let _outputs = run(&mut cache, &joined(&[(&inputs, 5..80)], 1));
    assert!(cache.truncate(79).is_err());
    cache.truncate(5).unwrap();
    let outputs = run(&mut cache, &joined(&[(&inputs, 5..6)], 1));
    assert_same(
        &outputs,
        &last(&alone(&inputs, 6), 1),
        "after the long step",
    );
    cache.truncate(0).unwrap();
    assert!(cache.is_empty());
    let outputs = run(&mut cache, &joined(&[(&inputs, 0..1)], 1));
    assert_same(&outputs, &alone(&inputs, 1), "from the beginning");
}

/// As a draft model does it: token by token, then back by several.
#[test]
fn slack_lets_a_truncation_reach_over_several_steps() {
    let inputs = inputs(400, 8);
    let whole = alone(&inputs, 400);
    let mut cache = hybrid().with_slack(12);
    let mut pages = PagedCache::new(PagedCacheConfig {
        slack: 12,
        num_blocks: 120,
        ..paged().config().clone()
    })
    .unwrap();
    let tokens: Vec<i64> = (0..400).collect();
    let (id, _) = pages.add(&tokens).unwrap();
    let step = |cache: &mut HybridCache, pages: &mut PagedCache, range: std::ops::Range<i64>| {
        let part = joined(&[(&inputs, range.clone())], 1);
        let outputs = run(cache, &part);
        let new = &tokens[range.start as usize..range.end as usize];
        let mut batch = pages.batch(&[(id, new)]).unwrap();
        assert_same(&run(&mut batch, &part), &outputs, "a page");
        batch.commit().unwrap();
        let cut = |layer: usize| whole[layer].narrow(1, range.start, range.end - range.start);
        assert_same(&outputs, &[cut(0), cut(1)], &format!("{range:?}"));
    };
    // More than the longest step whose inputs are kept.
    let mut position = 70;
    step(&mut cache, &mut pages, 0..position);
    for (round, back) in [0, 12, 3, 9, 12, 1, 12, 5, 11, 12, 0, 12]
        .into_iter()
        .cycle()
        .take(40)
        .enumerate()
    {
        for _ in 0..18.min(399 - position) {
            step(&mut cache, &mut pages, position..position + 1);
            position += 1;
        }
        if round % 3 == 0 && position + 5 <= 400 {
            step(&mut cache, &mut pages, position..position + 5);
            position += 5;
        }
        position -= back;
        cache.truncate(position).unwrap();
        pages.truncate(id, position as usize).unwrap();
        assert_eq!(cache.len(), position);
    }
    pages.audit().unwrap();
    assert!(position > 200, "{position}");
    assert!(cache.truncate(60).is_err());
}

#[test]
fn a_step_that_failed_halfway_is_undone() {
    let inputs = inputs(7, 3);
    let mut cache = hybrid();
    let _outputs = run(&mut cache, &joined(&[(&inputs, 0..4)], 1));
    let step = joined(&[(&inputs, 4..7)], 1);
    let _first = cache.delta_rule(0, &step.recurrent[0]).unwrap();
    assert!(matches!(
        cache.delta_rule(0, &step.recurrent[0]),
        Err(Error::LayerTwice { layer: 0 })
    ));
    assert_eq!(cache.len(), 4);
    cache.truncate(4).unwrap();
    let outputs = run(&mut cache, &step);
    assert_same(
        &outputs,
        &last(&alone(&inputs, 7), 3),
        "after the failed step",
    );
    // All layers but one have run.
    let _first = cache.delta_rule(0, &step.recurrent[0]).unwrap();
    let _third = cache.delta_rule(2, &step.recurrent[1]).unwrap();
    assert_eq!(cache.len(), 7);
    cache.truncate(7).unwrap();
    let mut again = hybrid();
    let _outputs = run(&mut again, &joined(&[(&inputs, 0..7)], 1));
    assert_eq!(cache.state().unwrap(), again.state().unwrap());
}

#[test]
fn rows_are_reordered_forked_saved_and_loaded_with_their_states() {
    let [a, b] = [inputs(9, 4), inputs(9, 5)];
    let rows = |range: std::ops::Range<i64>| joined(&[(&a, range.clone()), (&b, range)], 0);
    let mut cache = hybrid();
    let _outputs = run(&mut cache, &rows(0..5));
    let mut fork = cache.fork().unwrap();

    // The rows stay where the attention's cache refuses an index.
    cache.reorder(&Tensor::from_slice(&[1i64, 2])).unwrap_err();
    cache.reorder(&Tensor::from_slice(&[1i64, 0, 1])).unwrap();
    let three = joined(&[(&b, 5..9), (&a, 5..9), (&b, 5..9)], 0);
    let outputs = run(&mut cache, &three);
    let wanted = [last(&alone(&b, 9), 4), last(&alone(&a, 9), 4)];
    for (row, wanted) in [(0, &wanted[0]), (1, &wanted[1]), (2, &wanted[0])] {
        let row = [0, 1].map(|layer: usize| outputs[layer].narrow(0, row, 1));
        assert_same(&row, wanted, "a reordered row");
    }

    // The fork did not move, and a file has its states.
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cache.safetensors");
    save(fork.as_ref(), &path).unwrap();
    let mut loaded = hybrid();
    load(&mut loaded, &path, Device::Cpu).unwrap();
    assert_eq!(loaded.len(), 5);
    let wanted = run(fork.as_mut(), &rows(5..9));
    assert_same(&run(&mut loaded, &rows(5..9)), &wanted, "a loaded cache");
    assert_same(
        &[wanted[0].narrow(0, 0, 1), wanted[1].narrow(0, 0, 1)],
        &last(&alone(&a, 9), 4),
        "a fork",
    );
    let other = HybridCache::new(Box::new(DynamicCache::new(1)), &[false, true, true]);
    let error = load(&mut other.unwrap(), &path, Device::Cpu).unwrap_err();
    assert!(error.to_string().contains("recurrent_layers"), "{error}");
}

#[test]
fn a_cache_built_by_name_has_the_states_that_its_shape_asks_for() {
    let shape = CacheShape {
        windows: vec![None; 3],
        recurrent: vec![true, false, true],
        head_dim: 8,
        max_len: Some(12),
        ..CacheShape::default()
    };
    let inputs = inputs(12, 6);
    let wanted = alone(&inputs, 12);
    for kind in CacheImplementation::ALL {
        let mut shape = shape.clone();
        shape.window = (kind == CacheImplementation::Sliding).then_some(8);
        shape.group_size = 8;
        let mut cache = kind.build(&shape).unwrap();
        assert_eq!(cache.layers(), 3, "{kind}");
        assert_same(&run(cache.as_mut(), &inputs), &wanted, kind.name());
        assert_eq!(cache.len(), 12, "{kind}");
        assert!(cache.bytes() > 0);
    }
    let short = CacheShape {
        recurrent: vec![true],
        ..shape
    };
    let error = CacheImplementation::Dynamic.build(&short).unwrap_err();
    assert!(error.to_string().contains("one for each layer"), "{error}");
    // A cache of keys and values says what it lacks.
    let step = &inputs.recurrent[0];
    let error = DynamicCache::new(3).delta_rule(0, step).unwrap_err();
    assert!(error.to_string().contains("HybridCache"), "{error}");
}

#[test]
fn layers_of_the_wrong_kind_and_gradients_are_refused() {
    let inputs = inputs(2, 7);
    let mut cache = hybrid();
    let x = &inputs.attention;
    let error = cache.append(0, x, x).unwrap_err().to_string();
    assert!(error.contains("a recurrent layer"), "{error}");
    let error = cache.delta_rule(1, &inputs.recurrent[0]).unwrap_err();
    assert!(
        error.to_string().contains("a layer of attention"),
        "{error}"
    );
    assert!(matches!(
        cache.delta_rule(3, &inputs.recurrent[0]),
        Err(Error::NoSuchLayer {
            layer: 3,
            layers: 3
        })
    ));
    let mut step = joined(&[(&inputs, 0..2)], 1);
    step.recurrent[0].mixed = step.recurrent[0].mixed.set_requires_grad(true);
    assert!(matches!(
        cache.delta_rule(0, &step.recurrent[0]),
        Err(Error::RequiresGrad { layer: 0 })
    ));
    let wrong = HybridCache::new(Box::new(DynamicCache::new(2)), &[true, false]);
    assert!(wrong.unwrap_err().to_string().contains("1 layers"));
    // Another batch than before.
    let _outputs = run(&mut cache, &inputs);
    let two = joined(&[(&inputs, 0..1), (&inputs, 0..1)], 0);
    let error = cache.delta_rule(0, &two.recurrent[0]).unwrap_err();
    assert!(error.to_string().contains("reset the cache"), "{error}");
}

#[test]
fn sequences_of_a_paged_cache_have_the_bits_that_they_have_alone() {
    let all: Vec<Inputs> = (0..3).map(|seed| inputs(14, 10 + seed)).collect();
    let wanted: Vec<_> = all.iter().map(|inputs| alone(inputs, 14)).collect();
    let mut cache = paged();
    let tokens: Vec<i64> = (0..14).collect();
    let ids = [0, 1, 2].map(|_| cache.add(&tokens).unwrap().0);
    // Each line is a step: the numbers of new tokens, and of those that are kept.
    let steps: [[(i64, i64); 3]; 6] = [
        [(5, 5), (0, 0), (0, 0)],
        [(1, 1), (7, 7), (0, 0)],
        [(4, 2), (1, 1), (2, 2)],
        [(1, 1), (3, 0), (5, 1)],
        [(2, 2), (2, 2), (6, 6)],
        [(3, 3), (4, 4), (5, 5)],
    ];
    let mut positions = [0; 3];
    for step in steps {
        let parts = step.iter().zip(positions).enumerate();
        let parts: Vec<_> = parts
            .filter(|(_, ((new, _), _))| *new > 0)
            .map(|(row, ((new, kept), at))| (row, at..at + new, *kept))
            .collect();
        let inputs: Vec<_> = parts
            .iter()
            .map(|(row, range, _)| (&all[*row], range.clone()))
            .collect();
        let inputs = joined(&inputs, 1);
        let named: Vec<(_, &[i64])> = parts
            .iter()
            .map(|(row, range, _)| (ids[*row], &tokens[range.start as usize..range.end as usize]))
            .collect();
        // A step that is dropped changes nothing.
        let mut dropped = cache.batch(&named).unwrap();
        let _outputs = run(&mut dropped, &inputs);
        drop(dropped);
        let mut batch = cache.batch(&named).unwrap();
        let _once = batch.delta_rule(0, &inputs.recurrent[0]).unwrap();
        batch.truncate(0).unwrap();
        let outputs = run(&mut batch, &inputs);
        batch.commit().unwrap();
        let mut start = 0;
        for (row, range, kept) in parts {
            let count = range.end - range.start;
            let own = [0, 1].map(|layer: usize| outputs[layer].narrow(1, start, count));
            let wanted =
                [0, 1].map(|layer: usize| wanted[row][layer].narrow(1, range.start, count));
            assert_same(&own, &wanted, "a sequence in a step");
            start += count;
            positions[row] += kept;
            cache.truncate(ids[row], positions[row] as usize).unwrap();
        }
        cache.audit().unwrap();
    }
    assert_eq!(positions, [14, 14, 14]);
    for id in ids {
        cache.release(id).unwrap();
    }
    // The slots of released sequences are used again.
    let before = cache.bytes();
    let (again, _) = cache.add(&tokens).unwrap();
    let mut batch = cache.batch(&[(again, &tokens)]).unwrap();
    assert_same(&run(&mut batch, &all[0]), &wanted[0], "a new sequence");
    batch.commit().unwrap();
    assert_eq!(cache.bytes(), before);
}

#[test]
fn forks_of_a_paged_cache_go_on_from_their_states() {
    let [a, b] = [inputs(6, 20), inputs(3, 21)];
    let tokens: Vec<i64> = (0..9).collect();
    let mut cache = paged();
    let (first, _) = cache.add(&tokens).unwrap();
    let mut batch = cache.batch(&[(first, &tokens[..6])]).unwrap();
    let _outputs = run(&mut batch, &a);
    batch.commit().unwrap();
    let fork = cache.fork(first).unwrap();
    let both = joined(&[(&b, 0..3), (&b, 0..3)], 1);
    let mut batch = cache
        .batch(&[(first, &tokens[6..]), (fork, &tokens[6..])])
        .unwrap();
    let outputs = run(&mut batch, &both);
    batch.commit().unwrap();
    let half = |start| [0, 1].map(|layer: usize| outputs[layer].narrow(1, start, 3));
    assert_same(&half(0), &half(3), "a fork");
    assert!(cache.truncate(fork, 3).is_err());
    cache.truncate(fork, 6).unwrap();
    let mut batch = cache.batch(&[(fork, &tokens[6..])]).unwrap();
    assert_same(&run(&mut batch, &b), &half(0), "a fork that was truncated");
}

#[test]
fn a_paged_cache_refuses_what_states_cannot_do() {
    let refusal = |change: &dyn Fn(&mut PagedCacheConfig)| {
        let mut config = PagedCacheConfig {
            enable_prefix_caching: false,
            layers: 2,
            recurrent: vec![true, false],
            ..PagedCacheConfig::default()
        };
        change(&mut config);
        PagedCache::new(config).unwrap_err().to_string()
    };
    let message = refusal(&|config| config.enable_prefix_caching = true);
    assert!(message.contains("false with recurrent layers"), "{message}");
    let message = refusal(&|config| config.recurrent = vec![true]);
    assert!(message.contains("one for each layer"), "{message}");
    let message = refusal(&|config| config.recurrent = vec![true; 2]);
    assert!(
        message.contains("false for one layer at least"),
        "{message}"
    );
    let mut cache = paged();
    assert!(cache.decode_inputs(4, 20).is_err());
    let (id, _) = cache.add(&[1, 2]).unwrap();
    let inputs = inputs(2, 30);
    let mut batch = cache.batch(&[(id, &[1, 2])]).unwrap();
    let error = batch.delta_rule(1, &inputs.recurrent[0]).unwrap_err();
    assert!(error.to_string().contains("recurrent layer"), "{error}");
    let x = &inputs.attention;
    let error = batch.attend(0, x, x, x, &AttendOptions::default());
    assert!(error.unwrap_err().to_string().contains("recurrent layer"));
    // A layer has not run.
    let _first = batch.delta_rule(0, &inputs.recurrent[0]).unwrap();
    assert!(matches!(
        batch.commit(),
        Err(Error::StepNotRun { layer: 1 })
    ));
    assert_eq!(cache.len(id).unwrap(), 0);
}
