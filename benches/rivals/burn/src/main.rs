//! A training step of a Llama of 13.8 million parameters with burn on its CPU backend `flex`.

include!("../../common.rs");

use burn::grad_clipping::GradientClippingConfig;
use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Initializer, Linear, LinearConfig, RmsNorm, RmsNormConfig, RotaryEncoding, RotaryEncodingConfig,
};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::module::{attention, embedding};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, Int, Tensor, TensorData, activation::silu};

const NORMAL: Initializer = Initializer::Normal {
    mean: 0.0,
    std: 0.02,
};

#[derive(Module, Debug)]
struct Block {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    before_attention: RmsNorm,
    before_mlp: RmsNorm,
}

impl Block {
    fn new(device: &Device) -> Block {
        let linear = |inputs, outputs| {
            LinearConfig::new(inputs, outputs)
                .with_bias(false)
                .with_initializer(NORMAL)
                .init(device)
        };
        Block {
            q: linear(DIM, DIM),
            k: linear(DIM, DIM),
            v: linear(DIM, DIM),
            o: linear(DIM, DIM),
            gate: linear(DIM, HIDDEN),
            up: linear(DIM, HIDDEN),
            down: linear(HIDDEN, DIM),
            before_attention: RmsNormConfig::new(DIM).init(device),
            before_mlp: RmsNormConfig::new(DIM).init(device),
        }
    }

    fn forward(&self, x: Tensor<3>, rope: &RotaryEncoding) -> Tensor<3> {
        let h = self.before_attention.forward(x.clone());
        let heads = |y: Tensor<3>| {
            y.reshape([BATCH, CONTEXT, HEADS, DIM / HEADS])
                .swap_dims(1, 2)
        };
        let q = rope.forward(heads(self.q.forward(h.clone())));
        let k = rope.forward(heads(self.k.forward(h.clone())));
        let v = heads(self.v.forward(h));
        let options = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        let y = attention(q, k, v, None, None, options);
        let x = x + self
            .o
            .forward(y.swap_dims(1, 2).reshape([BATCH, CONTEXT, DIM]));
        let h = self.before_mlp.forward(x.clone());
        let inner = silu(self.gate.forward(h.clone())) * self.up.forward(h);
        x + self.down.forward(inner)
    }
}

#[derive(Module, Debug)]
struct Model {
    embedding: Param<Tensor<2>>,
    blocks: Vec<Block>,
    norm: RmsNorm,
    rope: RotaryEncoding,
}

impl Model {
    fn new(device: &Device) -> Model {
        Model {
            embedding: NORMAL.init([VOCAB, DIM], device),
            blocks: (0..LAYERS).map(|_| Block::new(device)).collect(),
            norm: RmsNormConfig::new(DIM).init(device),
            rope: RotaryEncodingConfig::new(CONTEXT, DIM / HEADS).init(device),
        }
    }

    fn logits(&self, ids: Tensor<2, Int>) -> Tensor<2> {
        let mut x = embedding(self.embedding.val(), ids);
        for block in &self.blocks {
            x = block.forward(x, &self.rope);
        }
        let x = self.norm.forward(x).reshape([BATCH * CONTEXT, DIM]);
        x.matmul(self.embedding.val().transpose())
    }
}

fn main() {
    let device = Device::flex().autodiff();
    let mut model = Model::new(&device);
    let mut optimizer = AdamWConfig::new()
        .with_beta_2(0.95)
        .with_epsilon(1e-8)
        .with_weight_decay(0.1)
        .with_grad_clipping(Some(GradientClippingConfig::Norm(1.0)))
        .init();
    measure(|inputs, labels| {
        let ids = Tensor::<1, Int>::from_data(TensorData::from(inputs.as_slice()), &device)
            .reshape([BATCH, CONTEXT]);
        let labels = Tensor::<1, Int>::from_data(TensorData::from(labels.as_slice()), &device);
        let loss = CrossEntropyLossConfig::new()
            .init(&device)
            .forward(model.logits(ids), labels);
        let value = loss.clone().into_scalar::<f32>() as f64;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(LEARNING_RATE, model.clone(), gradients);
        value
    });
}
