//! A training step of a Llama of 13.8 million parameters with flodl, over the same libtorch as Overdrive
//! (`LIBTORCH_PATH`).

include!("../../common.rs");

use flodl::Variable;
use flodl::autograd::{embedding, linear, scaled_dot_product_attention};
use flodl::nn::{
    AdamW, Linear, Module, Optimizer, Parameter, RMSNorm, RotaryEmbedding, clip_grad_norm,
    cross_entropy_loss,
};
use flodl::tensor::{DType, Device, Result, Tensor, TensorOptions};

const HEAD: i64 = (DIM / HEADS) as i64;

struct Block {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
    before_attention: RMSNorm,
    before_mlp: RMSNorm,
}

impl Block {
    fn new() -> Result<Block> {
        let (dim, hidden) = (DIM as i64, HIDDEN as i64);
        Ok(Block {
            q: Linear::no_bias(dim, dim)?,
            k: Linear::no_bias(dim, dim)?,
            v: Linear::no_bias(dim, dim)?,
            o: Linear::no_bias(dim, dim)?,
            gate: Linear::no_bias(dim, hidden)?,
            up: Linear::no_bias(dim, hidden)?,
            down: Linear::no_bias(hidden, dim)?,
            before_attention: RMSNorm::new(dim)?,
            before_mlp: RMSNorm::new(dim)?,
        })
    }

    fn forward(&self, x: &Variable, rope: &RotaryEmbedding) -> Result<Variable> {
        let (batch, context, dim) = (BATCH as i64, CONTEXT as i64, DIM as i64);
        let h = self.before_attention.forward(x)?;
        let heads = |y: Variable| {
            y.reshape(&[batch, context, HEADS as i64, HEAD])?
                .transpose(1, 2)
        };
        let q = heads(self.q.forward(&h)?)?;
        let k = heads(self.k.forward(&h)?)?;
        let v = heads(self.v.forward(&h)?)?;
        let (q, k) = rope.apply(&q, &k)?;
        let y = scaled_dot_product_attention(&q, &k, &v, None, 0.0, true, None)?;
        let x = x.add(
            &self
                .o
                .forward(&y.transpose(1, 2)?.reshape(&[batch, context, dim])?)?,
        )?;
        let h = self.before_mlp.forward(&x)?;
        let inner = self.gate.forward(&h)?.silu()?.mul(&self.up.forward(&h)?)?;
        x.add(&self.down.forward(&inner)?)
    }

    fn parameters(&self) -> Vec<Parameter> {
        let linears = [
            &self.q, &self.k, &self.v, &self.o, &self.gate, &self.up, &self.down,
        ];
        let mut all: Vec<Parameter> = linears
            .iter()
            .flat_map(|layer| layer.parameters())
            .collect();
        all.extend(self.before_attention.parameters());
        all.extend(self.before_mlp.parameters());
        all
    }
}

fn main() -> Result<()> {
    let table = Tensor::randn(
        &[VOCAB as i64, DIM as i64],
        TensorOptions {
            dtype: DType::Float32,
            device: Device::CPU,
        },
    )?;
    let table = Parameter::new(table.mul_scalar(0.02)?, "embedding");
    let blocks = (0..LAYERS)
        .map(|_| Block::new())
        .collect::<Result<Vec<_>>>()?;
    let norm = RMSNorm::new(DIM as i64)?;
    let rope = RotaryEmbedding::new(HEAD, CONTEXT as i64)?;
    let mut parameters: Vec<Parameter> = blocks.iter().flat_map(Block::parameters).collect();
    parameters.extend(norm.parameters());
    parameters.push(table.clone());
    let mut optimizer = AdamW::new(&parameters, LEARNING_RATE, 0.1);
    let mut step = |inputs: Vec<i64>, labels: Vec<i64>| -> Result<f64> {
        let ids = Tensor::from_i64(&inputs, &[BATCH as i64, CONTEXT as i64], Device::CPU)?;
        let labels = Variable::new(
            Tensor::from_i64(&labels, &[(BATCH * CONTEXT) as i64], Device::CPU)?,
            false,
        );
        let mut x = embedding(&table.variable, &ids, -1)?;
        for block in &blocks {
            x = block.forward(&x, &rope)?;
        }
        let x = norm
            .forward(&x)?
            .reshape(&[(BATCH * CONTEXT) as i64, DIM as i64])?;
        let logits = linear(&x, &table.variable, None)?;
        let loss = cross_entropy_loss(&logits, &labels)?;
        optimizer.zero_grad();
        loss.backward()?;
        clip_grad_norm(&parameters, 1.0)?;
        optimizer.step()?;
        loss.item()
    };
    measure(|inputs, labels| step(inputs, labels).expect("a step"));
    Ok(())
}
