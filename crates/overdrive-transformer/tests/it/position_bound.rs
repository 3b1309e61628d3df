//! Positions whose bound the host knows: the forward pass reads nothing back, and its results are the same.

use overdrive_attention::PackedLengths;
use overdrive_kv_cache::{DynamicCache, KvCache};
use overdrive_profiling::HostReads;
use overdrive_transformer::{
    CausalLm, Execution, ForwardInput, Gpt2Config, InitOptions, LlamaConfig, LlamaFamily,
    ModelConfig,
};
use tch::{Device, Kind, Tensor};

fn llama() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        max_position_embeddings: 32,
        ..LlamaConfig::default()
    }
}

/// Without, with a sliding window, and with learned positions.
fn models() -> [CausalLm; 3] {
    let windowed = LlamaConfig {
        family: LlamaFamily::Mistral,
        sliding_window: Some(3),
        ..llama()
    };
    let gpt2 = Gpt2Config {
        vocab_size: 64,
        n_positions: 32,
        n_embd: 32,
        n_layer: 2,
        n_head: 4,
        ..Gpt2Config::default()
    };
    let configs: [ModelConfig; 3] = [llama().into(), windowed.into(), gpt2.into()];
    configs.map(|config| {
        let mut model = CausalLm::new(&config, &InitOptions::default()).unwrap();
        // By operators, as on a GPU.
        let mut execution = Execution::default();
        execution.fused_decoding = false;
        model.set_execution(execution);
        model
    })
}

fn ids(tokens: i64) -> Tensor {
    let ids = Tensor::arange(tokens, (Kind::Int64, Device::Cpu)) * 37 + 11;
    ids.remainder(64).view([1, tokens])
}

/// Returns the logits of the last of 8 tokens, which a cache gets after the others, and the reads of that step.
fn last_of_eight(model: &CausalLm, bound: Option<i64>) -> (Tensor, Vec<String>) {
    let mut cache = DynamicCache::new(model.cache_layers());
    let text = ids(8);
    let prompt = text.narrow(1, 0, 7);
    let input = ForwardInput::new(&prompt).with_cache(&mut cache);
    let _prompt = model.forward(input).unwrap();
    let (last, position) = (
        text.narrow(1, 7, 1),
        Tensor::from_slice(&[7_i64]).view([1, 1]),
    );
    let mut input = ForwardInput::new(&last).with_position_ids(&position);
    input.position_bound = bound;
    let reads = HostReads::of(Device::Cpu);
    let logits = model.forward(input.with_cache(&mut cache)).unwrap();
    assert_eq!(cache.len(), 8);
    (logits, reads.names())
}

#[test]
fn positions_below_a_known_bound_are_not_read_back() {
    let _no_grad = tch::no_grad_guard();
    for model in models() {
        let (read, names) = last_of_eight(&model, None);
        // The smallest and the largest, once for all parts of the model.
        assert_eq!(names, ["aten::_local_scalar_dense"; 2]);
        // The exact bound, and one of a cache that holds more.
        for bound in [8, 32] {
            let (logits, names) = last_of_eight(&model, Some(bound));
            assert!(names.is_empty(), "{names:?}");
            assert_eq!(logits, read);
        }
    }
}

#[test]
fn packed_sequences_know_their_positions() {
    let _no_grad = tch::no_grad_guard();
    let lengths = PackedLengths::from_lengths(&[3, 5], Device::Cpu).unwrap();
    for model in models() {
        let reads = HostReads::of(Device::Cpu);
        let text = ids(8);
        let _logits = model
            .forward(ForwardInput::new(&text).with_sequences(&lengths))
            .unwrap();
        assert!(reads.names().is_empty(), "{:?}", reads.names());
    }
}

#[test]
fn a_bound_beyond_the_context_is_refused_and_one_of_long_tables_is_not() {
    let _no_grad = tch::no_grad_guard();
    let [model, ..] = models();
    let (text, positions) = (ids(1), Tensor::zeros([1, 1], (Kind::Int64, Device::Cpu)));
    let input = || ForwardInput::new(&text).with_position_ids(&positions);
    let error = model.forward(input().with_position_bound(33)).unwrap_err();
    assert!(error.to_string().contains("33 positions"), "{error}");

    // Longer than the tables that a forward pass makes unasked.
    let config = LlamaConfig {
        max_position_embeddings: 1 << 16,
        ..llama()
    };
    let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
    let short = model.forward(input()).unwrap();
    let long = model.forward(input().with_position_bound(40_000)).unwrap();
    assert_eq!(short, long);
}
