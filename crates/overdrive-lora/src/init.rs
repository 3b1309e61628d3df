//! The initial values of adapters.

use std::sync::{Arc, Mutex};

use overdrive_autograd::NoGradGuard;
use overdrive_core::Error;
use overdrive_core::random::Generator;
use overdrive_nn::LinearWeight;
use overdrive_quantization::{BlockOptions, QuantizedWeight, Scheme};
use tch::{Device, Kind, Tensor};

use crate::config::LayerOptions;
use crate::random::{normal_tensor, uniform_tensor};
use crate::{InitLoraWeights, LoftqConfig, LoraAdapter, LoraConfig, Result, dora};

/// The options of a new adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddOptions {
    /// The seed of A's random values; default 0. The values depend only on the seed and the layer's name, not on
    /// libtorch's generators.
    pub seed: u64,
    /// If `true`, adapters of bf16 and fp16 weights are fp32 (PEFT's `autocast_adapter_dtype`); default
    /// `true`. Adapters of quantized weights are always fp32.
    pub autocast_adapter_dtype: bool,
}

impl Default for AddOptions {
    fn default() -> Self {
        AddOptions {
            seed: 0,
            autocast_adapter_dtype: true,
        }
    }
}

/// Returns the dtype of an adapter of the weight `base`.
pub(crate) fn adapter_kind(base: &LinearWeight, autocast: bool) -> Kind {
    match base.kind() {
        Some(Kind::Double) => Kind::Double,
        Some(kind @ (Kind::BFloat16 | Kind::Half)) if !autocast => kind,
        _ => Kind::Float,
    }
}

/// Creates a new adapter for the layer `name`. PiSSA and OLoRA subtract it from `base`; LoftQ quantizes `base`.
pub(crate) fn adapter(
    base: &mut LinearWeight,
    name: &str,
    config: &Arc<LoraConfig>,
    options: &AddOptions,
) -> Result<LoraAdapter> {
    // The initial values are constants; without this, PiSSA's would be connected to the weight by autograd.
    let _no_grad = NoGradGuard::new();
    let LayerOptions { rank, alpha, scale } = config.layer_options(name)?;
    let place = (
        adapter_kind(base, options.autocast_adapter_dtype),
        base.device(),
    );
    let draw = Draw {
        name,
        seed: options.seed,
        size: base.size(),
        rank,
        place,
    };
    let method = config.init_lora_weights;
    let (a, b) = match method {
        InitLoraWeights::Default => (draw.kaiming_a()?, draw.zero_b()?),
        InitLoraWeights::Random => (draw.kaiming_a()?, draw.linear_b()?),
        InitLoraWeights::Gaussian => (draw.gaussian_a()?, draw.zero_b()?),
        InitLoraWeights::Orthogonal => draw.orthogonal()?,
        InitLoraWeights::Olora => from_weight(base, &draw, method, |weight| {
            olora(weight, &draw)?.leaving(weight, scale)
        })?,
        InitLoraWeights::Pissa => from_weight(base, &draw, method, |weight| {
            pissa(weight, &draw, scale)?.leaving(weight, scale)
        })?,
        InitLoraWeights::PissaFast(rounds) => from_weight(base, &draw, method, |weight| {
            pissa_fast(weight, &draw, scale, rounds)?.leaving(weight, scale)
        })?,
        InitLoraWeights::Loftq(config) => {
            from_weight(base, &draw, method, |weight| loftq(weight, &draw, config))?
        }
        InitLoraWeights::Eva | InitLoraWeights::Corda => {
            let expected = "another method for a new adapter, since this one needs the inputs of the layers; adapters \
                            that PEFT initialized with it can be loaded";
            let found = format!("\"{method}\" for `{name}`");
            return Err(Error::option("init_lora_weights", found, expected).into());
        }
    };
    let bias = match (config.lora_bias, config.init_lora_weights) {
        (false, _) => None,
        (true, InitLoraWeights::Random) => Some(draw.linear_bias()?),
        (true, _) => Some(Tensor::f_zeros([draw.size[0]], place)?),
    };
    let mut adapter = LoraAdapter {
        config: Arc::clone(config),
        alpha,
        scale,
        a,
        b,
        bias,
        magnitude: None,
        row_norms: Mutex::default(),
    };
    if config.use_dora {
        // The magnitudes start as the current norms, so every factor is 1 at first.
        adapter.magnitude = Some(dora::row_norms(base, &adapter)?);
    }
    for (_, _, tensor) in adapter.tensors() {
        let _same = tensor.f_set_requires_grad(true)?;
    }
    Ok(adapter)
}

/// The shape, seed and dtype of the tensors of a new adapter.
struct Draw<'n> {
    name: &'n str,
    seed: u64,
    size: [i64; 2],
    rank: i64,
    place: (Kind, Device),
}

impl Draw<'_> {
    /// Returns the random numbers of one tensor of the layer.
    fn generator(&self, tensor: &str) -> Generator {
        Generator::named(self.seed, &format!("{}.{tensor}", self.name))
    }

    fn uniform(&self, tensor: &str, shape: [i64; 2], bound: f64) -> Result<Tensor> {
        uniform_tensor(&mut self.generator(tensor), shape, bound, self.place)
    }

    fn normal(
        &self,
        tensor: &str,
        shape: [i64; 2],
        std: f64,
        place: (Kind, Device),
    ) -> Result<Tensor> {
        normal_tensor(&mut self.generator(tensor), shape, std, place)
    }

    fn kaiming_a(&self) -> Result<Tensor> {
        // kaiming_uniform with a = √5: gain² = 1/3, and a uniform's bound is √3 deviations.
        let bound = 1.0 / (self.size[1] as f64).sqrt();
        let shape = [self.rank, self.size[1]];
        self.uniform("lora_A", shape, bound)
    }

    fn gaussian_a(&self) -> Result<Tensor> {
        let shape = [self.rank, self.size[1]];
        let std = 1.0 / self.rank as f64;
        self.normal("lora_A", shape, std, self.place)
    }

    fn zero_b(&self) -> Result<Tensor> {
        Ok(Tensor::f_zeros([self.size[0], self.rank], self.place)?)
    }

    fn linear_b(&self) -> Result<Tensor> {
        let shape = [self.size[0], self.rank];
        let bound = 1.0 / (self.rank as f64).sqrt();
        self.uniform("lora_B", shape, bound)
    }

    fn linear_bias(&self) -> Result<Tensor> {
        let bound = 1.0 / (self.rank as f64).sqrt();
        let row = self.uniform("lora_B.bias", [1, self.size[0]], bound)?;
        Ok(row.f_flatten(0, -1)?)
    }

    /// Creates A and B from the odd and the even rows of one orthogonal matrix, so that `A·B` is zero and the
    /// two learn in different directions.
    fn orthogonal(&self) -> Result<(Tensor, Tensor)> {
        if self.rank % 2 != 0 {
            let expected = "even if `init_lora_weights` is \"orthogonal\"";
            return Err(Error::option("r", self.rank, expected).into());
        }
        let (kind, device) = self.place;
        let half = self.rank / 2;
        // Computed on the CPU, so that the factors are the same on every device: the QR on GPUs differs.
        let cpu = (Kind::Float, Device::Cpu);
        let square = self.normal("q", [self.rank, self.rank], 1.0, cpu)?;
        let (q, _) = Tensor::f_linalg_qr(&square, "reduced")?;
        let odd = q.f_slice(0, 0, self.rank, 2)?;
        let even = q.f_slice(0, 1, self.rank, 2)?;
        // The standard deviation 0.1 corresponds to PEFT's division by 10.
        let left = self.normal("lora_A", [self.size[1], half], 0.1, cpu)?;
        let right = self.normal("lora_B", [self.size[0], half], 0.1, cpu)?;
        let place = |tensor: Tensor| -> Result<Tensor> {
            Ok(tensor
                .f_contiguous()?
                .f_to_kind(kind)?
                .f_to_device(device)?)
        };
        Ok((place(left.f_mm(&odd)?.f_tr()?)?, place(right.f_mm(&even)?)?))
    }
}

/// A and B.
struct Factors(Tensor, Tensor);

/// A, B and the weight that they are added to.
struct Split {
    a: Tensor,
    b: Tensor,
    rest: Tensor,
}

impl Factors {
    /// Subtracts the adapter from the weight: `W − scale · B · A`.
    fn leaving(self, weight: &Tensor, scale: f64) -> Result<Split> {
        let Factors(a, b) = self;
        let rest = weight.f_sub(&b.f_mm(&a)?.f_mul_scalar(scale)?)?;
        Ok(Split { a, b, rest })
    }
}

/// Creates A and B from the weight, and replaces it by the rest that `split` returns.
fn from_weight(
    base: &mut LinearWeight,
    draw: &Draw<'_>,
    method: InitLoraWeights,
    split: impl Fn(&Tensor) -> Result<Split>,
) -> Result<(Tensor, Tensor)> {
    let largest = draw.size[0].min(draw.size[1]);
    if draw.rank > largest {
        let found = format!("{} for `{}`", draw.rank, draw.name);
        let expected =
            format!("at most {largest}, since `init_lora_weights` decomposes the weight");
        return Err(Error::option("r", found, expected).into());
    }
    // As in PEFT, OLoRA quantizes the rest by the same scheme.
    if matches!(base, LinearWeight::Quantized(_)) && method != InitLoraWeights::Olora {
        let found = format!("\"{method}\" for the quantized `{}`", draw.name);
        let expected = "another method for a quantized weight; or add the adapter before quantizing the \
                        weight";
        return Err(Error::option("init_lora_weights", found, expected).into());
    }
    // libtorch has no decompositions in half precision, which would not be precise enough either.
    let wide = match draw.place.0 {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    };
    let weight = base.to_dense(wide)?;
    let Split { a, b, rest } = split(&weight)?;
    match base {
        LinearWeight::Dense { weight, transposed } => {
            let rest = if *transposed { rest.f_tr()? } else { rest };
            // Copied in place, so that tied layers and handles of the parameter see the new weight.
            weight.f_detach()?.f_copy_(&rest)?;
        }
        LinearWeight::Quantized(weight) => {
            *weight = QuantizedWeight::quantize(&rest, weight.scheme())?
                .with_activations(weight.activations())?;
        }
    }
    let own =
        |tensor: Tensor| -> Result<Tensor> { Ok(tensor.f_contiguous()?.f_to_kind(draw.place.0)?) };
    Ok((own(a)?, own(b)?))
}

fn olora(weight: &Tensor, draw: &Draw<'_>) -> Result<Factors> {
    // As in PEFT, the scale is not divided out: `leaving` subtracts `scale · B · A`.
    let (q, r) = Tensor::f_linalg_qr(weight, "reduced")?;
    Ok(Factors(
        r.f_narrow(0, 0, draw.rank)?,
        q.f_narrow(1, 0, draw.rank)?,
    ))
}

fn pissa(weight: &Tensor, draw: &Draw<'_>, scale: f64) -> Result<Factors> {
    let (u, s, vh) = svd(weight)?;
    // The forward pass multiplies by the scale, so the singular values are divided by it.
    let roots = s.f_narrow(0, 0, draw.rank)?.f_div_scalar(scale)?.f_sqrt()?;
    let a = vh
        .f_narrow(0, 0, draw.rank)?
        .f_mul(&roots.f_unsqueeze(1)?)?;
    Ok(Factors(a, u.f_narrow(1, 0, draw.rank)?.f_mul(&roots)?))
}

/// Computes LoftQ: quantizes, decomposes the rounding error, and quantizes the rest.
fn loftq(weight: &Tensor, draw: &Draw<'_>, config: LoftqConfig) -> Result<Split> {
    let scheme = match config.loftq_bits {
        8 => Scheme::LlmInt8 { threshold: 6.0 },
        _ => Scheme::Nf4(BlockOptions {
            double_quant: false,
            ..BlockOptions::default()
        }),
    };
    let mut left = weight.shallow_clone();
    let mut round = 0;
    loop {
        // bitsandbytes rounds a weight to fp16 before it quantizes it to 8 bits.
        let rounded = match config.loftq_bits {
            8 => left.f_to_kind(Kind::Half)?,
            _ => left,
        };
        let rest = QuantizedWeight::quantize(&rounded, scheme)?.dequantize(weight.kind())?;
        // As in PEFT, the scale is not divided out: a forward pass multiplies A and B by it.
        let Factors(a, b) = pissa(&weight.f_sub(&rest)?, draw, 1.0)?;
        round += 1;
        if round >= config.loftq_iter {
            return Ok(Split { a, b, rest });
        }
        left = weight.f_sub(&b.f_mm(&a)?)?;
    }
}

/// Computes PiSSA with a randomized decomposition (Halko et al. 2009, arXiv:0909.4061, algorithm 5.1) over a
/// basis from `rounds` power iterations, as `torch.svd_lowrank` does.
fn pissa_fast(weight: &Tensor, draw: &Draw<'_>, scale: f64, rounds: u32) -> Result<Factors> {
    let place = (weight.kind(), weight.device());
    let probe = draw.normal("svd", [draw.size[1], draw.rank], 1.0, place)?;
    let (mut q, _) = Tensor::f_linalg_qr(&weight.f_mm(&probe)?, "reduced")?;
    for _ in 0..rounds {
        // Orthogonalizes after every multiplication: powers alone would collapse onto the first singular vector.
        (q, _) = Tensor::f_linalg_qr(&weight.f_tr()?.f_mm(&q)?, "reduced")?;
        (q, _) = Tensor::f_linalg_qr(&weight.f_mm(&q)?, "reduced")?;
    }
    let (u, s, vh) = svd(&q.f_tr()?.f_mm(weight)?)?;
    let roots = s.f_div_scalar(scale)?.f_sqrt()?;
    Ok(Factors(
        vh.f_mul(&roots.f_unsqueeze(1)?)?,
        q.f_mm(&u)?.f_mul(&roots)?,
    ))
}

/// Computes the reduced singular value decomposition: U, S and Vᵀ.
pub(crate) fn svd(matrix: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (u, s, v) = matrix.f_svd(true, true)?;
    Ok((u, s, v.f_tr()?))
}
