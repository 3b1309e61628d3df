//! A training step of a Llama of 13.8 million parameters with rusttorch. RMS norm, attention and the rotary embedding are
//! operators of its tensors (those of `tch`), for which it has no layers.

include!("../../common.rs");

use rusttorch::nn::{
    Embedding, EmbeddingConfig, Linear, LinearConfig, Module, ParameterPath, VarStore, functional,
};
use rusttorch::optim::AdamW;
use rusttorch::{Device, Kind, Result, Tensor, no_grad};

const HEAD: i64 = (DIM / HEADS) as i64;

struct Norm(Tensor);

impl Norm {
    fn new(path: &ParameterPath<'_>) -> Result<Norm> {
        Ok(Norm(path.f_ones("weight", &[DIM as i64])?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.f_rms_norm([DIM as i64], Some(&self.0), 1e-6)?)
    }
}

struct Rope {
    cos: Tensor,
    sin: Tensor,
}

impl Rope {
    fn new() -> Result<Rope> {
        let options = (Kind::Float, Device::Cpu);
        let powers = Tensor::f_arange(HEAD / 2, options)?.f_mul_scalar(-2.0 / HEAD as f64)?;
        let frequencies = Tensor::f_full([HEAD / 2], 10000.0, options)?.f_pow(&powers)?;
        let angles = Tensor::f_arange(CONTEXT as i64, options)?.f_outer(&frequencies)?;
        let angles = Tensor::f_cat(&[&angles, &angles], -1)?;
        Ok(Rope {
            cos: angles.f_cos()?,
            sin: angles.f_sin()?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let halves = x.f_chunk(2, -1)?;
        let rotated = Tensor::f_cat(&[&halves[1].f_neg()?, &halves[0]], -1)?;
        Ok(x.f_mul(&self.cos)?.f_add(&rotated.f_mul(&self.sin)?)?)
    }
}

struct Block {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    before_attention: Norm,
    before_mlp: Norm,
}

impl Block {
    fn new(path: &ParameterPath<'_>) -> Result<Block> {
        let linear = |name, inputs: usize, outputs: usize| {
            LinearConfig::new(inputs as i64, outputs as i64)
                .bias(false)
                .build(&(path / name))
        };
        Ok(Block {
            q: linear("q", DIM, DIM)?,
            k: linear("k", DIM, DIM)?,
            v: linear("v", DIM, DIM)?,
            o: linear("o", DIM, DIM)?,
            gate: linear("gate", DIM, HIDDEN)?,
            up: linear("up", DIM, HIDDEN)?,
            down: linear("down", HIDDEN, DIM)?,
            before_attention: Norm::new(&(path / "attention_norm"))?,
            before_mlp: Norm::new(&(path / "mlp_norm"))?,
        })
    }

    fn forward(&self, x: &Tensor, rope: &Rope) -> Result<Tensor> {
        let h = self.before_attention.forward(x)?;
        let heads = |y: Tensor| -> Result<Tensor> {
            Ok(
                y.f_view([BATCH as i64, CONTEXT as i64, HEADS as i64, HEAD])?
                    .f_transpose(1, 2)?,
            )
        };
        let q = rope.forward(&heads(self.q.forward(&h)?)?)?;
        let k = rope.forward(&heads(self.k.forward(&h)?)?)?;
        let v = heads(self.v.forward(&h)?)?;
        let y = Tensor::f_scaled_dot_product_attention(
            &q,
            &k,
            &v,
            None::<Tensor>,
            0.0,
            true,
            None,
            false,
        )?;
        let y = y
            .f_transpose(1, 2)?
            .f_reshape([BATCH as i64, CONTEXT as i64, DIM as i64])?;
        let x = x.f_add(&self.o.forward(&y)?)?;
        let h = self.before_mlp.forward(&x)?;
        let inner = self
            .gate
            .forward(&h)?
            .f_silu()?
            .f_mul(&self.up.forward(&h)?)?;
        Ok(x.f_add(&self.down.forward(&inner)?)?)
    }
}

struct Model {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    rope: Rope,
}

impl Model {
    fn new(path: &ParameterPath<'_>) -> Result<Model> {
        Ok(Model {
            embedding: EmbeddingConfig::new(VOCAB as i64, DIM as i64)
                .build(&(path / "embedding"))?,
            blocks: (0..LAYERS)
                .map(|i| Block::new(&(path / i)))
                .collect::<Result<_>>()?,
            norm: Norm::new(&(path / "norm"))?,
            rope: Rope::new()?,
        })
    }
}

impl Module for Model {
    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?;
        for block in &self.blocks {
            x = block.forward(&x, &self.rope)?;
        }
        let x = self
            .norm
            .forward(&x)?
            .f_view([(BATCH * CONTEXT) as i64, DIM as i64])?;
        functional::linear(&x, self.embedding.weight(), None)
    }
}

fn main() -> Result<()> {
    let variables = VarStore::new(Device::Cpu);
    let model = Model::new(&variables.root())?;
    // Weights of the usual size; rusttorch's own are those of PyTorch's layers.
    for mut variable in variables.trainable_variables() {
        if variable.dim() == 2 {
            let _normal = no_grad(|| variable.f_normal_(0.0, 0.02))?;
        }
    }
    let mut optimizer = AdamW::builder()
        .learning_rate(LEARNING_RATE)
        .betas(0.9, 0.95)
        .weight_decay(0.1)
        .build(&variables)?;
    let mut step = |inputs: Vec<i64>, labels: Vec<i64>| -> Result<f64> {
        let ids = Tensor::from_slice(&inputs).f_view([BATCH as i64, CONTEXT as i64])?;
        let loss = functional::cross_entropy(&model.forward(&ids)?, &Tensor::from_slice(&labels))?;
        optimizer.try_zero_grad()?;
        loss.f_backward()?;
        optimizer.clip_grad_norm(1.0)?;
        optimizer.try_step()?;
        Ok(loss.f_double_value(&[])?)
    };
    measure(|inputs, labels| step(inputs, labels).expect("a step"));
    Ok(())
}
