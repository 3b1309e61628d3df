//! A training step of a Llama of 13.8 million parameters with candle. Norms and softmax are the forms that have a
//! backward pass (the fused ones of candle-nn have none), and so is the rotary embedding.

include!("../../common.rs");

use candle_core::{D, DType, Device, Result, Tensor, Var, backprop::GradStore};
use candle_nn::{
    AdamW, Embedding, Linear, Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, embedding,
    linear_no_bias, loss, ops,
};

struct Norm(Tensor);

impl Norm {
    fn new(name: &str, vars: &VarBuilder) -> Result<Norm> {
        Ok(Norm(vars.pp(name).get_with_hints(
            DIM,
            "weight",
            candle_nn::Init::Const(1.0),
        )?))
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm_slow(x, &self.0, 1e-6)
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
    fn new(vars: VarBuilder) -> Result<Block> {
        Ok(Block {
            q: linear_no_bias(DIM, DIM, vars.pp("q"))?,
            k: linear_no_bias(DIM, DIM, vars.pp("k"))?,
            v: linear_no_bias(DIM, DIM, vars.pp("v"))?,
            o: linear_no_bias(DIM, DIM, vars.pp("o"))?,
            gate: linear_no_bias(DIM, HIDDEN, vars.pp("gate"))?,
            up: linear_no_bias(DIM, HIDDEN, vars.pp("up"))?,
            down: linear_no_bias(HIDDEN, DIM, vars.pp("down"))?,
            before_attention: Norm::new("attention_norm", &vars)?,
            before_mlp: Norm::new("mlp_norm", &vars)?,
        })
    }

    fn forward(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let h = self.before_attention.forward(x)?;
        let heads = |y: Tensor| {
            y.reshape((BATCH, CONTEXT, HEADS, DIM / HEADS))?
                .transpose(1, 2)?
                .contiguous()
        };
        let q = candle_nn::rotary_emb::rope_slow(&heads(self.q.forward(&h)?)?, cos, sin)?;
        let k = candle_nn::rotary_emb::rope_slow(&heads(self.k.forward(&h)?)?, cos, sin)?;
        let v = heads(self.v.forward(&h)?)?;
        let scores = (q.matmul(&k.t()?)? / ((DIM / HEADS) as f64).sqrt())?.broadcast_add(mask)?;
        let y = ops::softmax(&scores, D::Minus1)?.matmul(&v)?;
        let y = y.transpose(1, 2)?.reshape((BATCH, CONTEXT, DIM))?;
        let x = (x + self.o.forward(&y)?)?;
        let h = self.before_mlp.forward(&x)?;
        let inner = (self.gate.forward(&h)?.silu()? * self.up.forward(&h)?)?;
        x + self.down.forward(&inner)?
    }
}

struct Model {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: Norm,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
}

impl Model {
    fn new(vars: VarBuilder) -> Result<Model> {
        let device = vars.device();
        let half = DIM / HEADS / 2;
        let angles: Vec<f32> = (0..CONTEXT * half)
            .map(|i| (i / half) as f32 / 10000f32.powf((i % half) as f32 / half as f32))
            .collect();
        let angles = Tensor::from_vec(angles, (CONTEXT, half), device)?;
        let mask: Vec<f32> = (0..CONTEXT * CONTEXT)
            .map(|i| {
                if i % CONTEXT > i / CONTEXT {
                    f32::NEG_INFINITY
                } else {
                    0.0
                }
            })
            .collect();
        Ok(Model {
            embedding: embedding(VOCAB, DIM, vars.pp("embedding"))?,
            blocks: (0..LAYERS)
                .map(|i| Block::new(vars.pp(i)))
                .collect::<Result<_>>()?,
            norm: Norm::new("norm", &vars)?,
            cos: angles.cos()?,
            sin: angles.sin()?,
            mask: Tensor::from_vec(mask, (CONTEXT, CONTEXT), device)?,
        })
    }

    fn logits(&self, ids: &Tensor) -> Result<Tensor> {
        let mut x = self.embedding.forward(ids)?;
        for block in &self.blocks {
            x = block.forward(&x, &self.cos, &self.sin, &self.mask)?;
        }
        let x = self.norm.forward(&x)?.reshape((BATCH * CONTEXT, DIM))?;
        x.matmul(&self.embedding.embeddings().t()?)
    }
}

/// Scales the gradients to a norm of at most 1.
fn clip(gradients: &mut GradStore, variables: &[Var]) -> Result<()> {
    let mut sum = 0.0;
    for variable in variables {
        if let Some(gradient) = gradients.get(variable) {
            sum += gradient.sqr()?.sum_all()?.to_scalar::<f32>()? as f64;
        }
    }
    let scale = 1.0 / (sum.sqrt() + 1e-6);
    if scale < 1.0 {
        for variable in variables {
            if let Some(gradient) = gradients.remove(variable) {
                gradients.insert(variable, (gradient * scale)?);
            }
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let device = Device::Cpu;
    let map = VarMap::new();
    let model = Model::new(VarBuilder::from_varmap(&map, DType::F32, &device))?;
    // Weights of the usual size; candle's own are those of PyTorch's layers.
    for variable in map.all_vars() {
        if variable.rank() == 2 {
            variable.set(&Tensor::randn(0f32, 0.02, variable.shape(), &device)?)?;
        }
    }
    let parameters = ParamsAdamW {
        lr: LEARNING_RATE,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.1,
    };
    let mut optimizer = AdamW::new(map.all_vars(), parameters)?;
    let mut step = |inputs: Vec<i64>, labels: Vec<i64>| -> Result<f64> {
        let ids = Tensor::from_vec(inputs, (BATCH, CONTEXT), &device)?;
        let labels = Tensor::from_vec(labels, BATCH * CONTEXT, &device)?;
        let loss = loss::cross_entropy(&model.logits(&ids)?, &labels)?;
        let mut gradients = loss.backward()?;
        clip(&mut gradients, &map.all_vars())?;
        optimizer.step(&gradients)?;
        Ok(loss.to_scalar::<f32>()? as f64)
    };
    measure(|inputs, labels| step(inputs, labels).expect("a step"));
    Ok(())
}
