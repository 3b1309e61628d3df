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

/// A new adapter, and what its initialization does to the weight.
pub(crate) struct NewAdapter {
    adapter: LoraAdapter,
    change: Option<Change>,
}

/// The change that an initialization makes to the weight.
enum Change {
    /// Subtracts `scale · B · A`. A and B have the precision in which they were computed.
    Subtract(Factors),
    /// Replaces the weight by its quantized values.
    Replace(QuantizedWeight),
}

impl NewAdapter {
    /// Returns `true` if [`NewAdapter::place`] changes the weight.
    pub(crate) fn changes_base(&self) -> bool {
        self.change.is_some()
    }

    /// Changes the weight as the initialization does, and returns the adapter.
    pub(crate) fn place(self, base: &mut LinearWeight) -> Result<LoraAdapter> {
        let _no_grad = NoGradGuard::new();
        let mut adapter = self.adapter;
        let wide = wide(adapter.a.kind());
        match (self.change, &mut *base) {
            (None, _) => {}
            (Some(Change::Replace(own)), LinearWeight::Quantized(weight)) => *weight = own,
            (Some(Change::Replace(own)), _) => replace(base, own.dequantize(wide)?)?,
            (Some(Change::Subtract(factors)), _) => {
                replace(base, factors.leave(&base.to_dense(wide)?, adapter.scale)?)?;
            }
        }
        if adapter.config.use_dora {
            // The magnitudes start as the current norms, so every factor is 1 at first.
            let magnitude = dora::row_norms(base, &adapter)?;
            adapter.magnitude = Some(magnitude.f_set_requires_grad(true)?);
        }
        Ok(adapter)
    }
}

/// Copies `(O, I)` into a dense weight, in place, so that tied layers and handles of the parameter see it.
fn replace(base: &LinearWeight, rest: Tensor) -> Result<()> {
    if let LinearWeight::Dense { weight, transposed } = base {
        let rest = if *transposed { rest.f_tr()? } else { rest };
        weight.f_detach()?.f_copy_(&rest)?;
    }
    Ok(())
}

/// Returns the dtype of decompositions: libtorch has none in half precision, which would not be precise enough either.
fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

/// Creates a new adapter for the layer `name` of the weight `base`, which [`NewAdapter::place`] changes.
pub(crate) fn adapter(
    base: &LinearWeight,
    name: &str,
    config: &Arc<LoraConfig>,
    options: &AddOptions,
) -> Result<NewAdapter> {
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
    let from_weight =
        |split: &dyn Fn(&Tensor) -> Result<Split>| from_weight(base, &draw, method, scale, split);
    let (Factors(a, b), change) = match method {
        InitLoraWeights::Default => (Factors(draw.kaiming_a()?, draw.zero_b()?), None),
        InitLoraWeights::Random => (Factors(draw.kaiming_a()?, draw.linear_b()?), None),
        InitLoraWeights::Gaussian => (Factors(draw.gaussian_a()?, draw.zero_b()?), None),
        InitLoraWeights::Orthogonal => (draw.orthogonal()?, None),
        InitLoraWeights::Olora => from_weight(&|weight| Ok((olora(weight, &draw)?, None)))?,
        InitLoraWeights::Pissa => from_weight(&|weight| Ok((pissa(weight, &draw, scale)?, None)))?,
        InitLoraWeights::PissaFast(rounds) => {
            from_weight(&|weight| Ok((pissa_fast(weight, &draw, scale, rounds)?, None)))?
        }
        InitLoraWeights::Loftq(config) => from_weight(&|weight| loftq(weight, &draw, config))?,
        InitLoraWeights::Eva
        | InitLoraWeights::Corda
        | InitLoraWeights::Mica
        | InitLoraWeights::LoraGa => {
            let expected = "another method for a new adapter; adapters that PEFT initialized with this one can be loaded";
            let found = format!("\"{method}\" for `{name}`");
            return Err(Error::option("init_lora_weights", found, expected).into());
        }
    };
    let bias = match (config.lora_bias, config.init_lora_weights) {
        (false, _) => None,
        (true, InitLoraWeights::Random) => Some(draw.linear_bias()?),
        (true, _) => Some(Tensor::f_zeros([draw.size[0]], place)?),
    };
    let adapter = LoraAdapter {
        config: Arc::clone(config),
        alpha,
        scale,
        a,
        b,
        bias,
        magnitude: None,
        row_norms: Mutex::default(),
    };
    for (_, _, tensor) in adapter.tensors() {
        let _same = tensor.f_set_requires_grad(true)?;
    }
    Ok(NewAdapter { adapter, change })
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
    fn orthogonal(&self) -> Result<Factors> {
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
        Ok(Factors(
            place(left.f_mm(&odd)?.f_tr()?)?,
            place(right.f_mm(&even)?)?,
        ))
    }
}

/// A and B.
struct Factors(Tensor, Tensor);

/// A and B, and what they are added to where it is not the weight without them.
type Split = (Factors, Option<QuantizedWeight>);

impl Factors {
    /// Returns the weight without the adapter, `W − scale · B · A`.
    fn leave(&self, weight: &Tensor, scale: f64) -> Result<Tensor> {
        let Factors(a, b) = self;
        Ok(weight.f_sub(&b.f_mm(a)?.f_mul_scalar(scale)?)?)
    }
}

/// Creates A and B from the weight, in the adapter's dtype, and returns what `split` makes of it.
fn from_weight(
    base: &LinearWeight,
    draw: &Draw<'_>,
    method: InitLoraWeights,
    scale: f64,
    split: &dyn Fn(&Tensor) -> Result<Split>,
) -> Result<(Factors, Option<Change>)> {
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
    let weight = base.to_dense(wide(draw.place.0))?;
    let (factors, rest) = split(&weight)?;
    let own =
        |tensor: &Tensor| -> Result<Tensor> { Ok(tensor.f_contiguous()?.f_to_kind(draw.place.0)?) };
    let adapter = Factors(own(&factors.0)?, own(&factors.1)?);
    let change = match (rest, base) {
        (Some(rest), _) => Change::Replace(rest),
        (None, LinearWeight::Dense { .. }) => Change::Subtract(factors),
        (None, LinearWeight::Quantized(own)) => {
            let rest = QuantizedWeight::quantize(&factors.leave(&weight, scale)?, own.scheme())?;
            Change::Replace(rest.with_activations(own.activations())?)
        }
    };
    Ok((adapter, Some(change)))
}

fn olora(weight: &Tensor, draw: &Draw<'_>) -> Result<Factors> {
    // As in PEFT, the scale is not divided out: `leaving` subtracts `scale · B · A`.
    let (q, r) = Tensor::f_linalg_qr(weight, "reduced")?;
    // Copies: a view would keep all of Q or R, which have the size of the weight.
    Ok(Factors(
        r.f_narrow(0, 0, draw.rank)?.f_detach_copy()?,
        q.f_narrow(1, 0, draw.rank)?.f_detach_copy()?,
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
        let rest = QuantizedWeight::quantize(&rounded, scheme)?;
        let error = weight.f_sub(&rest.dequantize(weight.kind())?)?;
        // As in PEFT, the scale is not divided out: a forward pass multiplies A and B by it.
        let factors = pissa(&error, draw, 1.0)?;
        round += 1;
        if round >= config.loftq_iter {
            return Ok((factors, Some(rest)));
        }
        left = factors.leave(weight, 1.0)?;
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
