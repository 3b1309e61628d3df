//! Steps as they would be captured, on CPU tensors, beside plain ones.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use overdrive_lora::{
    AddOptions, InitLoraWeights, LoraConfig, TargetModules, add_adapter, set_adapter,
};
use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};

use super::{Adapters, Key, MOST_OF_ONE_ADAPTER, key_of, rows_for};
use crate::device_sampling::Misled;
use crate::engine::EngineStatistics;
use crate::{Engine, EngineConfig, GenerationConfig, ImagePatches, Request, RequestId, generate};

thread_local! {
    static FORCED: Cell<bool> = const { Cell::new(false) };
}

/// Returns `true` if this thread treats the CPU as a device whose steps are captured.
pub(crate) fn is_forced() -> bool {
    FORCED.get()
}

/// Makes this thread treat the CPU as such a device, until the value is dropped.
struct Forced;

impl Forced {
    fn new() -> Forced {
        FORCED.set(true);
        Forced
    }
}

impl Drop for Forced {
    fn drop(&mut self) {
        FORCED.set(false);
    }
}

fn model() -> CausalLm {
    // Tests run in parallel, and their models are too small for threads of their own.
    tch::set_num_threads(1);
    let config = LlamaConfig {
        vocab_size: 96,
        hidden_size: 32,
        intermediate_size: 64,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 256,
        initializer_range: 0.2,
        ..LlamaConfig::default()
    };
    CausalLm::new(&config.into(), &InitOptions::default()).unwrap()
}

fn config(new: usize, seed: Option<u64>) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(new),
        do_sample: seed.is_some(),
        seed,
        ..GenerationConfig::default()
    }
}

fn prompt(seed: i64, length: i64) -> Vec<i64> {
    (0..length)
        .map(|at| (at * at + 7 * seed + at) % 96)
        .collect()
}

type Tokens = BTreeMap<(RequestId, usize), Vec<i64>>;

/// Runs requests that join at different steps, one of which is cancelled after some.
fn served(
    model: &CausalLm,
    settings: EngineConfig,
    requests: &dyn Fn() -> Vec<Request>,
    cancelled: Option<usize>,
) -> (Tokens, EngineStatistics) {
    let mut engine = Engine::new(model, settings).unwrap();
    let mut found = Tokens::new();
    let mut ids = Vec::new();
    let mut left = requests().into_iter();
    let mut steps = 0;
    loop {
        if steps % 3 == 0
            && let Some(request) = left.next()
        {
            ids.push(engine.submit(request).unwrap());
        }
        if steps == 20
            && let Some(index) = cancelled
        {
            engine.cancel(ids[index]).unwrap();
        }
        for event in engine.step().unwrap() {
            if let crate::Event::Token {
                request,
                sample,
                id,
                ..
            } = event
            {
                found.entry((request, sample)).or_default().push(id);
            }
        }
        engine.cache().audit().unwrap();
        steps += 1;
        if engine.is_idle() && left.len() == 0 {
            return (found, engine.statistics());
        }
    }
}

/// Checks that requests got the same tokens. A cancelled request may have a different number of them: if a step has
/// been launched ahead, a request joins one step later.
fn assert_same(mut found: Tokens, mut expected: Tokens, cancelled: usize) {
    let requests: BTreeSet<RequestId> = expected.keys().map(|(request, _)| *request).collect();
    let cancelled = requests.into_iter().nth(cancelled);
    for (key, tokens) in &mut expected {
        if let Some(found) = found.get_mut(key).filter(|_| Some(key.0) == cancelled) {
            let both = found.len().min(tokens.len());
            assert!(both > 3, "{both} tokens");
            tokens.truncate(both);
            found.truncate(both);
        }
    }
    assert_eq!(found, expected);
}

fn small(change: impl FnOnce(&mut EngineConfig)) -> EngineConfig {
    let mut settings = EngineConfig {
        block_size: 4,
        max_num_seqs: 12,
        num_blocks: Some(200),
        ..EngineConfig::default()
    };
    change(&mut settings);
    settings
}

#[test]
fn a_graph_has_up_to_seven_rows_more() {
    let rows: Vec<usize> = [0, 1, 2, 3, 4, 5, 8, 9, 64, 65].map(rows_for).to_vec();
    assert_eq!(rows, [1, 1, 2, 4, 4, 8, 8, 16, 64, 72]);
}

#[test]
fn many_adapters_share_the_graphs_of_several() {
    use Adapters::{All, Mixed};
    let mut graphs: BTreeMap<Key, ()> = BTreeMap::new();
    assert_eq!(key_of(&[None, None, None], &graphs), (4, All(None)));
    assert_eq!(key_of(&[None, Some(1)], &graphs), (2, Mixed));
    for adapter in 0..MOST_OF_ONE_ADAPTER {
        let key = key_of(&[Some(adapter)], &graphs);
        assert_eq!(key, (1, All(Some(adapter))));
        graphs.insert(key, ());
    }
    // Those that there are stay in use.
    assert_eq!(key_of(&[Some(3)], &graphs), (1, All(Some(3))));
    assert_eq!(key_of(&[Some(3); 2], &graphs), (2, Mixed));
    assert_eq!(key_of(&[Some(900)], &graphs), (1, Mixed));
    assert_eq!(key_of(&[None], &graphs), (1, All(None)));
}

#[test]
fn requests_get_the_same_tokens() {
    let model = model();
    let request = |seed: i64| {
        let sampled = (seed % 2 == 1).then_some(seed.unsigned_abs());
        let mut config = config(24 + seed as usize, sampled);
        config.num_return_sequences = if seed % 4 == 1 { 3 } else { 1 };
        config.repetition_penalty = if seed % 3 == 0 { 1.2 } else { 1.0 };
        // Some prompts have the same beginning, so that blocks are shared.
        let beginning = prompt(seed % 3, 17);
        Request::new([beginning, prompt(seed, seed)].concat(), config)
    };
    let requests = || (0..11).map(request).collect();
    let cases: [fn(&mut EngineConfig); 4] = [
        |_| {},
        // Sequences are preempted.
        |settings| settings.num_blocks = Some(40),
        |settings| settings.enable_prefix_caching = false,
        |settings| settings.max_num_seqs = 3,
    ];
    for (case, change) in cases.into_iter().enumerate() {
        let (plain, counts) = served(&model, small(change), &requests, Some(2));
        assert_eq!((counts.replayed_steps, counts.graph_bytes), (0, 0));
        let forced = Forced::new();
        let (captured, counts) = served(&model, small(change), &requests, Some(2));
        drop(forced);
        assert_same(captured, plain, 2);
        assert!(counts.replayed_steps > counts.steps / 2, "{counts:?}");
        assert!(counts.steps_ahead > 0, "{counts:?}");
        assert_eq!(counts.preemptions > 0, case == 1, "{counts:?}");
        assert!(counts.reused_tokens > 0 || case == 2, "{counts:?}");
    }
}

#[test]
fn sequences_with_images_get_the_same_tokens_from_replayed_steps() {
    tch::set_num_threads(1);
    let crates = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = crates.join("../overdrive-transformer/tests/fixtures/qwen3_vl");
    let model = CausalLm::from_pretrained(folder, &Default::default()).unwrap();
    let request = |seed: i64| {
        // Some have an image of four tokens, which have two positions.
        let values = (0..16 * 96).map(|at| ((at * (seed + 3)) as f32).sin());
        let image = ImagePatches::new(values.collect(), 96, [4, 4], 2).unwrap();
        let config = config(20 + seed as usize, (seed == 2).then_some(7));
        let text = [5, 9, 3 + seed];
        match seed % 3 {
            1 => Request::new(text, config),
            _ => Request::new(
                [&text[..], &[122, 120, 120, 120, 120, 123]].concat(),
                config,
            )
            .with_images(vec![image]),
        }
    };
    let requests = || (0..6).map(request).collect();
    for blocks in [200, 24] {
        let settings = || small(|settings| settings.num_blocks = Some(blocks));
        let (plain, _) = served(&model, settings(), &requests, None);
        let forced = Forced::new();
        let (captured, counts) = served(&model, settings(), &requests, None);
        drop(forced);
        assert_eq!(captured, plain);
        assert!(counts.replayed_steps > 10, "{counts:?}");
        assert_eq!(counts.preemptions > 0, blocks == 24, "{counts:?}");
    }
}

#[test]
fn greedy_sequences_run_ahead_until_one_ends() {
    let model = model();
    let request = |seed: i64| {
        let mut config = config(60 + 3 * seed as usize, None);
        // Some sequences end early: their rows of the step that was launched ahead are discarded.
        config.eos_token_id = vec![5, 17];
        Request::new(prompt(seed, 6 + seed), config)
    };
    let requests = || (0..6).map(request).collect();
    // The smaller number of blocks is just enough, so that the step ahead takes the last block.
    for blocks in [200, 130] {
        let settings = || small(|settings| settings.num_blocks = Some(blocks));
        let (plain, _) = served(&model, settings(), &requests, Some(4));
        let forced = Forced::new();
        let (captured, counts) = served(&model, settings(), &requests, Some(4));
        drop(forced);
        assert_same(captured, plain, 4);
        assert!(counts.steps_ahead > counts.steps / 2, "{counts:?}");
        assert_eq!(counts.blocks_used, 0, "{counts:?}");
    }
}

#[test]
fn sampled_sequences_run_ahead_and_a_step_of_other_tokens_is_discarded() {
    let model = model();
    let request = |seed: i64| {
        let mut config = config(40 + 3 * seed as usize, Some(seed.unsigned_abs()));
        config.eos_token_id = vec![5, 17];
        config.top_k = [50, 0, 20][seed as usize % 3];
        config.top_p = [1.0, 0.9][seed as usize % 2];
        config.repetition_penalty = if seed == 4 { 1.2 } else { 1.0 };
        config.logprobs = (seed == 3).then_some(2);
        Request::new(prompt(seed, 6 + seed), config)
    };
    let requests = || (0..6).map(request).collect();
    for blocks in [200, 90] {
        let settings = || small(|settings| settings.num_blocks = Some(blocks));
        let (plain, _) = served(&model, settings(), &requests, Some(4));
        for misled in [false, true] {
            let _forced = Forced::new();
            let misled = misled.then(Misled::new);
            let (captured, counts) = served(&model, settings(), &requests, Some(4));
            assert_same(captured, plain.clone(), 4);
            assert_eq!(counts.blocks_used, 0, "{counts:?}");
            match misled {
                None => {
                    assert!(counts.steps_ahead > counts.steps / 2, "{counts:?}");
                    assert_eq!(counts.steps_discarded, 0, "{counts:?}");
                }
                // Most of the steps begin with known tokens then.
                Some(_) => {
                    assert!(counts.steps_discarded > 0, "{counts:?}");
                    assert!(counts.steps_ahead < counts.steps / 4, "{counts:?}");
                }
            }
        }
    }
}

#[test]
fn nothing_is_replayed_where_it_is_turned_off_or_there_is_no_room() {
    let model = model();
    let requests = || vec![Request::new(prompt(1, 9), config(8, None))];
    let forced = Forced::new();
    let eager = small(|settings| settings.enforce_eager = true);
    let (_, counts) = served(&model, eager, &requests, None);
    assert_eq!(counts.replayed_steps, 0);
    // Twelve samples refer to the blocks of one long prompt, which gives more table entries than fit.
    let requests = || {
        let mut shared = config(8, Some(1));
        shared.num_return_sequences = 12;
        vec![Request::new(prompt(1, 120), shared)]
    };
    let settings = small(|settings| settings.num_blocks = Some(80));
    let (crowded, counts) = served(&model, settings.clone(), &requests, None);
    assert!(counts.replayed_steps < counts.steps / 2, "{counts:?}");
    drop(forced);
    assert_eq!(crowded, served(&model, settings, &requests, None).0);
}

#[test]
fn captures_at_the_start_change_no_sequence() {
    let model = model();
    let tokens = |captures: bool| {
        let _forced = Forced::new();
        let mut engine = Engine::new(&model, small(|_| {})).unwrap();
        let id = engine
            .submit(Request::new(prompt(1, 9), config(12, None)))
            .unwrap();
        let mut found = Vec::new();
        while !engine.is_idle() {
            // Also between the steps of a sequence.
            if captures {
                engine.capture_steps().unwrap();
                engine.cache().audit().unwrap();
            }
            for event in engine.step().unwrap() {
                if let crate::Event::Token {
                    request, id: token, ..
                } = event
                {
                    assert_eq!(request, id);
                    found.push(token);
                }
            }
        }
        (found, engine.statistics().replayed_steps)
    };
    let (expected, replayed) = tokens(false);
    assert_eq!(tokens(true), (expected, replayed));
    assert!(replayed > 0);
}

#[test]
fn sequences_of_any_adapters_are_replayed() {
    let mut model = model();
    for (seed, name) in ["one", "two"].iter().enumerate() {
        let lora = LoraConfig {
            r: 4,
            init_lora_weights: InitLoraWeights::Random,
            target_modules: Some(TargetModules::AllLinear),
            ..LoraConfig::default()
        };
        let options = AddOptions {
            seed: seed as u64,
            ..AddOptions::default()
        };
        add_adapter(&mut model, name, &lora, &options).unwrap();
    }
    set_adapter(&mut model, &[]).unwrap();
    let requests = |names: &[Option<&str>]| -> Vec<Request> {
        (0..)
            .zip(names)
            .map(|(seed, name)| {
                let sampled = (seed % 4 == 3).then_some(7);
                let beginning = prompt(0, 9);
                let config = config(24 + seed as usize, sampled);
                let mut request = Request::new([beginning, prompt(seed, 5)].concat(), config);
                request.adapter = name.map(Arc::from);
                request
            })
            .collect()
    };
    let one = [Some("one"); 3];
    let three = [
        Some("one"),
        None,
        Some("two"),
        Some("one"),
        None,
        Some("two"),
        None,
    ];
    for (names, blocks) in [(&one[..], 200), (&three, 200), (&three, 34)] {
        let requests = || requests(names);
        let settings = || small(|settings| settings.num_blocks = Some(blocks));
        let (plain, _) = served(&model, settings(), &requests, Some(2));
        let forced = Forced::new();
        let (captured, counts) = served(&model, settings(), &requests, Some(2));
        drop(forced);
        assert_same(captured, plain, 2);
        assert!(counts.replayed_steps > counts.steps / 2, "{counts:?}");
        assert!(counts.steps_ahead > 0, "{counts:?}");
        assert_eq!(counts.preemptions > 0, blocks < 200, "{counts:?}");
    }
}

#[test]
fn generate_gives_the_same_tokens() {
    let model = model();
    let even: Vec<Vec<i64>> = (0..5).map(|seed| prompt(seed, 11)).collect();
    let uneven: Vec<Vec<i64>> = (0..5).map(|seed| prompt(seed, 3 + seed)).collect();
    for prompts in [even, uneven] {
        for seed in [None, Some(3)] {
            let mut config = config(40, seed);
            config.num_return_sequences = if seed.is_some() { 2 } else { 1 };
            // Rows end at different steps.
            config.eos_token_id = vec![5, 17, 40];
            let plain = generate(&model, &prompts, &config).unwrap();
            let forced = Forced::new();
            let captured = generate(&model, &prompts, &config).unwrap();
            assert_eq!(captured.sequences, plain.sequences);
            // Steps that begin with other tokens are discarded.
            let misled = Misled::new();
            let captured = generate(&model, &prompts, &config).unwrap();
            drop((misled, forced));
            assert_eq!(captured.sequences, plain.sequences);
        }
    }
}
