//! Tests of requests that choose an adapter, several of which share a batch.

use std::collections::BTreeMap;

use overdrive_generation::{Engine, EngineConfig, Error, GenerationConfig, Request, generate};
use overdrive_lora::{
    AddOptions, InitLoraWeights, LoraConfig, TargetModules, add_adapter, set_adapter,
};
use overdrive_transformer::{CausalLm, ForwardInput, InitOptions, LlamaConfig, QuantizeOptions};
use tch::{Kind, Tensor};

/// The adapters of the tests, and the configuration of each.
const ADAPTERS: [&str; 4] = ["all", "queries", "dora", "head"];

fn lora(name: &str) -> LoraConfig {
    let names = |names: &[&str]| {
        let names = names.iter().map(|name| (*name).to_owned());
        Some(TargetModules::Names(names.collect()))
    };
    LoraConfig {
        r: 4,
        lora_alpha: 16.0,
        // The usual one changes nothing before it has been trained.
        init_lora_weights: InitLoraWeights::Random,
        use_dora: name == "dora",
        target_modules: match name {
            "all" => Some(TargetModules::AllLinear),
            "queries" => names(&["q_proj", "o_proj"]),
            "dora" => names(&["v_proj", "down_proj"]),
            _ => names(&["gate_proj", "lm_head"]),
        },
        ..LoraConfig::default()
    }
}

/// Returns a model with the adapters, none of which is active.
fn model(scheme: Option<&str>) -> CausalLm {
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
    let mut model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    if let Some(scheme) = scheme {
        model
            .quantize(&QuantizeOptions::new(scheme.parse().unwrap()))
            .unwrap();
    }
    for (seed, name) in ADAPTERS.iter().enumerate() {
        let options = AddOptions {
            seed: seed as u64,
            ..AddOptions::default()
        };
        add_adapter(&mut model, name, &lora(name), &options).unwrap();
    }
    set_adapter(&mut model, &[]).unwrap();
    model
}

fn greedy(new: usize) -> GenerationConfig {
    GenerationConfig {
        max_new_tokens: Some(new),
        ..GenerationConfig::default()
    }
}

/// Returns the adapter of each request, and its prompt: each prompt with each adapter and with none.
fn requests() -> Vec<(Option<&'static str>, Vec<i64>)> {
    let prompts = [3, 17, 30, 9].map(|length| (0..length).map(|i| (i * i + length) % 96).collect());
    let names = || [None].into_iter().chain(ADAPTERS.iter().copied().map(Some));
    let each = |prompt: &Vec<i64>| {
        names()
            .map(|name| (name, prompt.clone()))
            .collect::<Vec<_>>()
    };
    prompts.iter().flat_map(each).collect()
}

fn submit(engine: &mut Engine<&CausalLm>, name: Option<&str>, prompt: &[i64], new: usize) {
    let request = Request::new(prompt, greedy(new));
    let request = match name {
        Some(name) => request.with_adapter(name),
        None => request,
    };
    engine.submit(request).unwrap();
}

#[test]
fn a_batch_of_several_adapters_gives_the_tokens_of_each_alone() {
    for scheme in [None, Some("int8-weight")] {
        let mut model = model(scheme);
        let mut alone = BTreeMap::new();
        for (name, prompt) in requests() {
            set_adapter(&mut model, name.as_slice()).unwrap();
            let tokens = generate(&model, std::slice::from_ref(&prompt), &greedy(12)).unwrap();
            alone.insert((name, prompt), tokens.sequences[0].clone());
        }
        set_adapter(&mut model, &[]).unwrap();
        for prompt in requests().into_iter().map(|(_, prompt)| prompt) {
            let base = &alone[&(None, prompt.clone())];
            for name in ADAPTERS {
                let own = &alone[&(Some(name), prompt.clone())];
                assert_ne!(
                    own, base,
                    "{name} changes nothing, so the test shows nothing"
                );
            }
        }
        // At once; with chunks of prompts; with so few blocks that sequences are preempted.
        for (tokens, blocks) in [(64, 256), (16, 256), (64, 24)] {
            let config = EngineConfig {
                block_size: 4,
                num_blocks: Some(blocks),
                max_num_seqs: 10,
                max_num_batched_tokens: Some(tokens),
                ..EngineConfig::default()
            };
            let mut engine = Engine::new(&model, config).unwrap();
            // Twice: the second time finds blocks of the first.
            for round in 0..2 {
                for (name, prompt) in requests() {
                    submit(&mut engine, name, &prompt, 12);
                }
                let outcomes = engine.run_to_end().unwrap();
                assert_eq!(outcomes.len(), alone.len());
                for ((name, prompt), (_, outcome)) in requests().into_iter().zip(outcomes) {
                    let tokens = &outcome.unwrap()[0].tokens;
                    let whole = [prompt.clone(), tokens.clone()].concat();
                    let what = format!("{scheme:?}, round {round}: {name:?}");
                    assert_eq!(whole, alone[&(name, prompt)], "{what}");
                }
            }
            let statistics = engine.statistics();
            // With few blocks, those of the first round have been evicted.
            assert_eq!(statistics.reused_tokens > 0, blocks > 24, "{statistics:?}");
            assert_eq!(statistics.blocks_used, 0);
        }
    }
}

#[test]
fn log_probabilities_of_prompts_are_those_of_each_adapter_alone() {
    let mut model = model(None);
    // One that is read at once, by a model with the adapter alone.
    let mut alone = Vec::new();
    for (name, prompt) in requests() {
        set_adapter(&mut model, name.as_slice()).unwrap();
        let ids = Tensor::from_slice(&prompt).unsqueeze(0);
        let logits = tch::no_grad(|| model.forward(ForwardInput::new(&ids)).unwrap());
        alone.push(logits.squeeze_dim(0).log_softmax(-1, Kind::Float));
    }
    set_adapter(&mut model, &[]).unwrap();
    for (tokens, blocks) in [(64, 256), (16, 256), (64, 24)] {
        let config = EngineConfig {
            block_size: 4,
            num_blocks: Some(blocks),
            max_num_seqs: 10,
            max_num_batched_tokens: Some(tokens),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(&model, config).unwrap();
        for (name, prompt) in requests() {
            let mut request = Request::new(prompt, greedy(6)).with_prompt_logprobs(0);
            request.adapter = name.map(Into::into);
            engine.submit(request).unwrap();
        }
        let outcomes = engine.run_to_end().unwrap();
        for (((name, prompt), (_, outcome)), want) in requests().iter().zip(outcomes).zip(&alone) {
            let got = outcome.unwrap().remove(0).prompt_logprobs.unwrap();
            assert_eq!(got.len(), prompt.len());
            for (at, one) in got.iter().enumerate().skip(1) {
                let want = want.double_value(&[at as i64 - 1, prompt[at]]);
                let got = f64::from(one.as_ref().unwrap().logprob);
                assert!(
                    (got - want).abs() < 1e-4,
                    "{name:?}, {at}: {got} and {want}"
                );
            }
        }
    }
}

#[test]
fn samples_of_a_request_share_its_adapter() {
    let mut model = model(None);
    let prompt = vec![5, 6, 7, 8, 9];
    let config = GenerationConfig {
        do_sample: true,
        seed: Some(11),
        num_return_sequences: 3,
        ..greedy(10)
    };
    set_adapter(&mut model, &["all"]).unwrap();
    let alone = generate(&model, std::slice::from_ref(&prompt), &config).unwrap();
    set_adapter(&mut model, &[]).unwrap();
    let mut engine = Engine::new(&model, EngineConfig::default()).unwrap();
    submit(&mut engine, Some("queries"), &prompt, 10);
    engine
        .submit(Request::new(prompt.clone(), config).with_adapter("all"))
        .unwrap();
    let (_, outcome) = engine.run_to_end().unwrap().remove(1);
    let got: Vec<Vec<i64>> = outcome
        .unwrap()
        .into_iter()
        .map(|one| [prompt.clone(), one.tokens].concat())
        .collect();
    assert_eq!(got, alone.sequences);
}

#[test]
fn an_unknown_adapter_is_refused() {
    let model = model(None);
    let mut engine = Engine::new(&model, EngineConfig::default()).unwrap();
    let request = Request::new([1, 2], greedy(1)).with_adapter("french");
    let error = engine.submit(request).unwrap_err();
    assert!(
        matches!(&error, Error::UnknownAdapter { name, available } if name == "french" && available.len() == 4)
    );
    let message = error.to_string();
    assert!(
        message.contains("`french`") && message.contains("all, queries, dora, head"),
        "{message}"
    );
}
