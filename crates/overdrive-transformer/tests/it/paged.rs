//! Many sequences of different lengths in one row over a paged cache: each equals its own run without a cache.

use crate::common::{CASES, load, max_difference};
use overdrive_kv_cache::{Error, PagedCache, PagedCacheConfig, SequenceId};
use overdrive_lora::{AddOptions, LoraConfig, TargetModules, add_adapter};
use overdrive_transformer::{CausalLm, ForwardInput, Logits};
use tch::Tensor;

/// Ids that all fixtures know, the same for each `seed`.
fn ids(count: usize, seed: i64) -> Vec<i64> {
    (0..count as i64)
        .map(|at| (at * 37 + at * at * 11 + seed * 53 + 5) % 120)
        .collect()
}

fn cache(model: &CausalLm, blocks: usize) -> PagedCache {
    PagedCache::new(PagedCacheConfig {
        block_size: 4,
        num_blocks: blocks,
        ..PagedCacheConfig::of(&model.cache_shape())
    })
    .unwrap()
}

/// The logits after each of these sequences, `(N, V)`, in one step.
fn step(model: &CausalLm, cache: &mut PagedCache, parts: &[(SequenceId, &[i64])]) -> Tensor {
    let mut batch = cache.batch(parts).unwrap();
    let (ids, positions) = (batch.input_ids().unwrap(), batch.position_ids().unwrap());
    let places = Tensor::from_slice(&batch.last_indices());
    let input = ForwardInput::new(&ids)
        .with_position_ids(&positions)
        .with_logits(Logits::At(&places))
        .with_cache(&mut batch);
    let logits = tch::no_grad(|| model.forward(input)).unwrap();
    batch.commit().unwrap();
    logits.squeeze_dim(0)
}

fn uncached(model: &CausalLm, sequence: &[i64]) -> Tensor {
    let ids = Tensor::from_slice(sequence).unsqueeze(0);
    let input = ForwardInput::new(&ids).with_logits(Logits::Last);
    tch::no_grad(|| model.forward(input)).unwrap().reshape([-1])
}

fn most_likely(logits: &Tensor) -> i64 {
    logits.argmax(-1, false).int64_value(&[])
}

/// Their rotation depends on the length of the longest sequence of a step, so the keys of any cache differ from
/// those of a run without one.
const LENGTH_DEPENDENT: [&str; 2] = ["llama_dynamic_rope", "llama_longrope"];

/// A sequence in progress: `fed` of its tokens are in the cache.
struct Running {
    id: SequenceId,
    tokens: Vec<i64>,
    fed: usize,
}

/// Sequences join one after another, and prompts are fed in chunks while others decode, all in the same row.
#[test]
fn sequences_in_one_row_equal_each_sequence_alone_token_for_token() {
    const NEW: usize = 10;
    let cases = CASES.into_iter();
    for case in cases.filter(|case| !LENGTH_DEPENDENT.contains(case)) {
        let model = load(case);
        let mut cache = cache(&model, 64);
        // The last begins like the first, whose blocks are there by then.
        let mut last = ids(13, 0);
        last.extend(ids(3, 9));
        let prompts = [ids(13, 0), ids(1, 1), ids(22, 2), ids(6, 3), last];
        let mut running: Vec<Running> = Vec::new();
        let mut waiting = prompts.iter();
        let mut chunk = (3..7).cycle();
        loop {
            if let Some(prompt) = waiting.next() {
                let (id, fed) = cache.add(prompt).unwrap();
                running.push(Running {
                    id,
                    tokens: prompt.clone(),
                    fed,
                });
            }
            let mut parts = Vec::new();
            for (index, sequence) in running.iter().enumerate() {
                if sequence.tokens.len() < prompts[index].len() + NEW {
                    let rest = &sequence.tokens[sequence.fed..];
                    let most = chunk.next().unwrap();
                    parts.push((index, rest[..rest.len().min(most)].to_vec()));
                }
            }
            if parts.is_empty() {
                break;
            }
            let named: Vec<(SequenceId, &[i64])> = parts
                .iter()
                .map(|(index, tokens)| (running[*index].id, tokens.as_slice()))
                .collect();
            let logits = step(&model, &mut cache, &named);
            cache.audit().unwrap();
            for (row, (index, tokens)) in (0..).zip(&parts) {
                let sequence = &mut running[*index];
                sequence.fed += tokens.len();
                if sequence.fed == sequence.tokens.len() {
                    let (got, want) = (logits.get(row), uncached(&model, &sequence.tokens));
                    let off = max_difference(&got, &want);
                    assert!(off < 2e-4, "{case}, sequence {index}: logits off by {off}");
                    assert_eq!(
                        most_likely(&got),
                        most_likely(&want),
                        "{case}, sequence {index}"
                    );
                    sequence.tokens.push(most_likely(&got));
                }
            }
        }
        // Three blocks of four; states of recurrent layers are of whole sequences.
        let hits = if cache.config().enable_prefix_caching {
            12
        } else {
            0
        };
        assert_eq!(cache.statistics().hits, hits, "{case}");
        for sequence in running {
            cache.release(sequence.id).unwrap();
        }
        assert_eq!(cache.used_blocks(), 0);
    }
}

/// Parallel samples: forks share the prompt and then continue differently.
#[test]
fn forked_and_truncated_sequences_equal_unshared_ones() {
    let model = load("llama_gqa");
    let mut cache = cache(&model, 64);
    let prompt = ids(10, 4);
    let (first, _) = cache.add(&prompt).unwrap();
    let _ = step(&model, &mut cache, &[(first, &prompt)]);
    let forks = [
        first,
        cache.fork(first).unwrap(),
        cache.fork(first).unwrap(),
    ];
    assert_eq!(cache.used_blocks(), 3);
    let tails = [ids(5, 5), ids(5, 6), ids(5, 7)];
    let parts: Vec<(SequenceId, &[i64])> = forks
        .into_iter()
        .zip(&tails)
        .map(|(id, tail)| (id, tail.as_slice()))
        .collect();
    let logits = step(&model, &mut cache, &parts);
    let expect = |got: Tensor, sequence: &[&[i64]]| {
        let off = max_difference(&got, &uncached(&model, &sequence.concat()));
        assert!(off < 2e-4, "off by {off}");
    };
    for (row, tail) in (0..).zip(&tails) {
        expect(logits.get(row), &[&prompt, tail]);
    }
    // Speculation: the last three tokens were wrong.
    cache.truncate(forks[1], 12).unwrap();
    let logits = step(&model, &mut cache, &[(forks[1], &[1, 2]), (forks[0], &[3])]);
    expect(logits.get(0), &[&prompt, &tails[1][..2], &[1, 2]]);
    expect(logits.get(1), &[&prompt, &tails[0], &[3]]);
    cache.audit().unwrap();
}

#[test]
fn a_failed_step_leaves_the_cache_unchanged() {
    let model = load("llama_gqa");
    let mut cache = cache(&model, 8);
    let prompt = ids(9, 1);
    let (id, _) = cache.add(&prompt).unwrap();
    let _ = step(&model, &mut cache, &[(id, &prompt)]);

    // A token that the model does not know.
    let mut batch = cache.batch(&[(id, &[1_000_000])]).unwrap();
    let (ids, positions) = (batch.input_ids().unwrap(), batch.position_ids().unwrap());
    let input = ForwardInput::new(&ids)
        .with_position_ids(&positions)
        .with_cache(&mut batch);
    assert!(tch::no_grad(|| model.forward(input)).is_err());
    let refused = batch.commit().unwrap_err();
    assert!(matches!(refused, Error::StepNotRun { layer: 0 }));

    cache.audit().unwrap();
    assert_eq!((cache.len(id).unwrap(), cache.used_blocks()), (9, 3));
    let logits = step(&model, &mut cache, &[(id, &[7])]);
    let sequence = [prompt, vec![7]].concat();
    assert!(max_difference(&logits.get(0), &uncached(&model, &sequence)) < 2e-4);
}

#[test]
fn an_adapter_that_a_paged_cache_cannot_expand_is_refused_with_the_way_out() {
    let mut model = load("deepseek_v3");
    let lora = LoraConfig {
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    };
    add_adapter(&mut model, "a", &lora, &AddOptions::default()).unwrap();
    let mut cache = cache(&model, 8);
    let prompt = ids(5, 1);
    let (sequence, _) = cache.add(&prompt).unwrap();
    let mut batch = cache.batch(&[(sequence, &prompt[..])]).unwrap();
    let (ids, positions) = (batch.input_ids().unwrap(), batch.position_ids().unwrap());
    let input = ForwardInput::new(&ids)
        .with_position_ids(&positions)
        .with_cache(&mut batch);
    let message = tch::no_grad(|| model.forward(input))
        .unwrap_err()
        .to_string();
    assert!(message.contains("`kv_b_proj`"), "{message}");
    assert!(message.contains("merge the adapter"), "{message}");
}
