//! Sequences packed into one row have the losses and gradients of each sequence alone.

use overdrive_attention::PackedLengths;
use overdrive_transformer::{
    AttentionImplementation, CausalLm, Execution, ForwardInput, Gpt2Config, IGNORE_INDEX,
    InitOptions, LabelShift, LlamaConfig, ModelConfig, Schedule,
};
use tch::{Device, Kind, Tensor};

const LENGTHS: [i64; 5] = [7, 1, 12, 3, 9];

fn llama(sliding_window: Option<i64>) -> ModelConfig {
    LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 16,
        sliding_window,
        ..LlamaConfig::default()
    }
    .into()
}

fn gpt2() -> ModelConfig {
    Gpt2Config {
        vocab_size: 64,
        n_embd: 32,
        n_layer: 3,
        n_head: 4,
        n_positions: 16,
        ..Gpt2Config::default()
    }
    .into()
}

fn model(config: &ModelConfig, execution: Execution) -> CausalLm {
    let mut model = CausalLm::new(config, &InitOptions::default()).unwrap();
    model.set_requires_grad(true).unwrap();
    model.set_execution(execution);
    model
}

/// The sequences, `(1, T)` each, and their labels; the middle of the longest has ignored labels.
fn sequences() -> Vec<(Tensor, Tensor)> {
    let sequence = |(index, len): (usize, &i64)| {
        let ids: Vec<i64> = (0..*len)
            .map(|at| (at * 13 + index as i64 * 29) % 64)
            .collect();
        let mut labels = ids.clone();
        // Nothing predicts it.
        labels[0] = IGNORE_INDEX;
        if *len > 10 {
            labels[3..6].fill(IGNORE_INDEX);
        }
        let row = |numbers: &[i64]| Tensor::from_slice(numbers).unsqueeze(0);
        (row(&ids), row(&labels))
    };
    LENGTHS.iter().enumerate().map(sequence).collect()
}

fn gradients(model: &CausalLm) -> Vec<(String, Tensor)> {
    let parameters = model.named_parameters().into_iter();
    parameters
        .map(|(name, mut parameter)| {
            let gradient = parameter.grad().copy();
            parameter.zero_grad();
            (name, gradient)
        })
        .collect()
}

fn executions() -> Vec<Execution> {
    let mut all = Vec::new();
    for attention in AttentionImplementation::ALL {
        let ways = [
            (true, Schedule::Never),
            (false, Schedule::Never),
            (true, Schedule::EveryBlock),
        ];
        for (fused, checkpointing) in ways {
            let mut execution = Execution::default();
            execution.attention = attention;
            execution.fused_kernels = fused;
            execution.checkpointing = checkpointing;
            all.push(execution);
        }
    }
    all
}

/// Sums of at most a few hundred products in another order: 1e-5 of the largest element.
fn assert_near(a: &Tensor, b: &Tensor, what: &str) {
    let difference = (a - b).abs().max().double_value(&[]);
    let scale = b.abs().max().double_value(&[]).max(1.0);
    assert!(
        difference <= 1e-5 * scale,
        "{what}: {difference} of {scale}"
    );
}

#[test]
fn losses_and_gradients_of_packed_sequences_are_those_of_each_sequence_alone() {
    let sequences = sequences();
    let join = |part: fn(&(Tensor, Tensor)) -> &Tensor| {
        Tensor::cat(&sequences.iter().map(part).collect::<Vec<_>>(), 1)
    };
    let (ids, labels) = (join(|sequence| &sequence.0), join(|sequence| &sequence.1));
    let lengths = PackedLengths::from_lengths(&LENGTHS, Device::Cpu).unwrap();
    for config in [llama(None), llama(Some(4)), gpt2()] {
        for execution in executions() {
            let what = format!("{execution:?}");
            let model = model(&config, execution);
            let mut sum = Tensor::zeros([], (Kind::Float, Device::Cpu));
            let mut tokens = 0;
            for (ids, labels) in &sequences {
                let loss = model.loss(ids, labels, LabelShift::HuggingFace).unwrap();
                sum += &loss.sum;
                tokens += loss.tokens().unwrap();
            }
            sum.backward();
            let alone = gradients(&model);

            let input = ForwardInput::new(&ids).with_sequences(&lengths);
            let packed = model
                .loss_of(input, &labels, LabelShift::HuggingFace)
                .unwrap();
            assert_eq!(packed.tokens().unwrap(), tokens);
            assert_near(&packed.sum, &sum, &what);
            packed.sum.backward();
            for ((name, packed), (_, alone)) in gradients(&model).iter().zip(&alone) {
                assert_near(packed, alone, &format!("{name}, {what}"));
            }
        }
    }
}

#[test]
fn no_packed_sequence_attends_to_another() {
    let _no_grad = tch::no_grad_guard();
    let lengths = PackedLengths::from_lengths(&[5, 6], Device::Cpu).unwrap();
    let ids = Tensor::arange(11, (Kind::Int64, Device::Cpu)).unsqueeze(0);
    let changed = ids.copy();
    let _changed = changed.narrow(1, 0, 5).fill_(63);
    for config in [llama(None), gpt2()] {
        let model = model(&config, Execution::default());
        let logits = |ids: &Tensor| {
            let input = ForwardInput::new(ids).with_sequences(&lengths);
            model.forward(input).unwrap().narrow(1, 5, 6)
        };
        assert_eq!(logits(&ids), logits(&changed));
    }
}

#[test]
fn sequences_that_do_not_fit_the_row_are_refused() {
    let model = model(&llama(None), Execution::default());
    let ids = Tensor::zeros([1, 6], (Kind::Int64, Device::Cpu));
    let lengths = |lengths: &[i64]| PackedLengths::from_lengths(lengths, Device::Cpu).unwrap();
    let error = |input: ForwardInput<'_>| model.forward(input).unwrap_err().to_string();
    let short = lengths(&[3, 2]);
    let text = error(ForwardInput::new(&ids).with_sequences(&short));
    assert!(text.contains("5 queries and 5 keys for 6 tokens"), "{text}");
    let fitting = lengths(&[3, 3]);
    let two_rows = Tensor::zeros([2, 3], (Kind::Int64, Device::Cpu));
    let text = error(ForwardInput::new(&two_rows).with_sequences(&fitting));
    assert!(text.contains("2 rows"), "{text}");
    let mask = Tensor::ones([1, 6], (Kind::Int64, Device::Cpu));
    let text = error(
        ForwardInput::new(&ids)
            .with_sequences(&fitting)
            .with_attention_mask(&mask),
    );
    assert!(text.contains("attention_mask"), "{text}");
    // 17 tokens exceed the context; two sequences that have 17 tokens together do not.
    let ids = Tensor::zeros([1, 17], (Kind::Int64, Device::Cpu));
    assert!(model.forward(ForwardInput::new(&ids)).is_err());
    let fitting = lengths(&[9, 8]);
    assert!(
        model
            .forward(ForwardInput::new(&ids).with_sequences(&fitting))
            .is_ok()
    );
}
