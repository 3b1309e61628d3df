//! How adapters start.

use std::sync::{Arc, Mutex};

use overdrive_autograd::NoGradGuard;
use overdrive_quantization::QuantizedWeight;
use tch::{Device, Kind, Tensor};

use crate::config::MapOptions;
use crate::random::Stream;
use crate::{Adapter, BaseWeight, Error, InitLoraWeights, LoraConfig, Result, dora};

/// How adapters are made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddOptions {
    /// The seed of A's random numbers; default 0. They depend on it and on the map's name alone, and
    /// libtorch's generators are left as they are.
    pub seed: u64,
    /// Whether adapters beside bf16 and fp16 weights are fp32 (PEFT's `autocast_adapter_dtype`); default
    /// true. Beside quantized weights they are fp32 in any case.
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

/// The kind of an adapter's numbers beside `base`.
pub(crate) fn adapter_kind(base: &BaseWeight, autocast: bool) -> Kind {
    match base.kind() {
        Some(Kind::Double) => Kind::Double,
        Some(kind @ (Kind::BFloat16 | Kind::Half)) if !autocast => kind,
        _ => Kind::Float,
    }
}

/// A new adapter of the map `name`. Changes `base` where the initialisation takes its part from it.
pub(crate) fn adapter(
    base: &mut BaseWeight,
    name: &str,
    config: &Arc<LoraConfig>,
    options: &AddOptions,
) -> Result<Adapter> {
    let _no_grad = NoGradGuard::new();
    let MapOptions { rank, alpha, scale } = config.map_options(name)?;
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
    let (a, b) = match config.init_lora_weights {
        InitLoraWeights::Default => (draw.kaiming_a()?, draw.zero_b()?),
        InitLoraWeights::Random => (draw.kaiming_a()?, draw.linear_b()?),
        InitLoraWeights::Gaussian => (draw.gaussian_a()?, draw.zero_b()?),
        InitLoraWeights::Orthogonal => draw.orthogonal()?,
        InitLoraWeights::Olora => from_weight(base, &draw, scale, true, olora)?,
        InitLoraWeights::Pissa => from_weight(base, &draw, scale, false, pissa)?,
        InitLoraWeights::PissaFast(rounds) => {
            let fast =
                |weight: &Tensor, draw: &Draw<'_>, scale| pissa_fast(weight, draw, scale, rounds);
            from_weight(base, &draw, scale, false, fast)?
        }
    };
    let bias = match (config.lora_bias, config.init_lora_weights) {
        (false, _) => None,
        (true, InitLoraWeights::Random) => Some(draw.linear_bias()?),
        (true, _) => Some(Tensor::f_zeros([draw.size[0]], place)?),
    };
    let mut adapter = Adapter {
        config: Arc::clone(config),
        alpha,
        scale,
        a,
        b,
        bias,
        magnitude: None,
        lengths: Mutex::default(),
    };
    if config.use_dora {
        adapter.magnitude = Some(dora::row_lengths(base, &adapter)?);
    }
    for (_, _, tensor) in adapter.tensors() {
        let _same = tensor.f_set_requires_grad(true)?;
    }
    Ok(adapter)
}

struct Draw<'n> {
    name: &'n str,
    seed: u64,
    size: [i64; 2],
    rank: i64,
    place: (Kind, Device),
}

impl Draw<'_> {
    fn stream(&self, tensor: &str) -> Stream {
        Stream::new(self.seed, &format!("{}.{tensor}", self.name))
    }

    fn kaiming_a(&self) -> Result<Tensor> {
        // kaiming_uniform with a = √5: gain² = 1/3, and a uniform's bound is √3 deviations.
        let bound = 1.0 / (self.size[1] as f64).sqrt();
        let shape = [self.rank, self.size[1]];
        self.stream("lora_A")
            .uniform_tensor(shape, bound, self.place)
    }

    fn gaussian_a(&self) -> Result<Tensor> {
        let shape = [self.rank, self.size[1]];
        let std = 1.0 / self.rank as f64;
        self.stream("lora_A").normal_tensor(shape, std, self.place)
    }

    fn zero_b(&self) -> Result<Tensor> {
        Ok(Tensor::f_zeros([self.size[0], self.rank], self.place)?)
    }

    fn linear_b(&self) -> Result<Tensor> {
        let shape = [self.size[0], self.rank];
        let bound = 1.0 / (self.rank as f64).sqrt();
        self.stream("lora_B")
            .uniform_tensor(shape, bound, self.place)
    }

    fn linear_bias(&self) -> Result<Tensor> {
        let bound = 1.0 / (self.rank as f64).sqrt();
        let mut stream = self.stream("lora_B.bias");
        let row = stream.uniform_tensor([1, self.size[0]], bound, self.place)?;
        Ok(row.f_flatten(0, -1)?)
    }

    /// Of the odd and the even rows of one orthogonal matrix, so that `A·B` starts at zero on average
    /// and the two learn in different directions.
    fn orthogonal(&self) -> Result<(Tensor, Tensor)> {
        if self.rank % 2 != 0 {
            return Err(Error::BadConfig {
                key: "r".to_owned(),
                found: self.rank.to_string(),
                expected: "an even rank: `init_lora_weights` is \"orthogonal\"".to_owned(),
            });
        }
        let (kind, device) = self.place;
        let half = self.rank / 2;
        let cpu = (Kind::Float, Device::Cpu);
        let square = self
            .stream("q")
            .normal_tensor([self.rank, self.rank], 1.0, cpu)?;
        let (q, _) = Tensor::f_linalg_qr(&square, "reduced")?;
        let odd = q.f_slice(0, 0, self.rank, 2)?;
        let even = q.f_slice(0, 1, self.rank, 2)?;
        let left = self
            .stream("lora_A")
            .normal_tensor([self.size[1], half], 0.1, cpu)?;
        let right = self
            .stream("lora_B")
            .normal_tensor([self.size[0], half], 0.1, cpu)?;
        let place = |tensor: Tensor| -> Result<Tensor> {
            Ok(tensor
                .f_contiguous()?
                .f_to_kind(kind)?
                .f_to_device(device)?)
        };
        Ok((place(left.f_mm(&odd)?.f_tr()?)?, place(right.f_mm(&even)?)?))
    }
}

/// A and B from the weight, which is left with the rest: `W − scale · B · A`.
fn from_weight(
    base: &mut BaseWeight,
    draw: &Draw<'_>,
    scale: f64,
    quantized: bool,
    split: impl Fn(&Tensor, &Draw<'_>, f64) -> Result<(Tensor, Tensor)>,
) -> Result<(Tensor, Tensor)> {
    let largest = draw.size[0].min(draw.size[1]);
    if draw.rank > largest {
        return Err(Error::BadConfig {
            key: "r".to_owned(),
            found: format!("{} for `{}`", draw.rank, draw.name),
            expected: format!("at most {largest}: `init_lora_weights` decomposes its weight"),
        });
    }
    if matches!(base, BaseWeight::Quantized(_)) && !quantized {
        return Err(Error::BadConfig {
            key: "init_lora_weights".to_owned(),
            found: format!("\"pissa\" over the quantized `{}`", draw.name),
            expected: "a dense weight: initialise first and quantize what is left".to_owned(),
        });
    }
    // A decomposition in half precision would be worth nothing.
    let wide = match draw.place.0 {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    };
    let weight = base.to_dense(wide)?;
    let (a, b) = split(&weight, draw, scale)?;
    let rest = weight.f_sub(&b.f_mm(&a)?.f_mul_scalar(scale)?)?;
    match base {
        BaseWeight::Dense { weight, transposed } => {
            let rest = if *transposed { rest.f_tr()? } else { rest };
            weight.f_detach()?.f_copy_(&rest)?;
        }
        BaseWeight::Quantized(weight) => {
            *weight = QuantizedWeight::quantize(&rest, weight.scheme())?;
        }
    }
    let own =
        |tensor: Tensor| -> Result<Tensor> { Ok(tensor.f_contiguous()?.f_to_kind(draw.place.0)?) };
    Ok((own(a)?, own(b)?))
}

fn olora(weight: &Tensor, draw: &Draw<'_>, _scale: f64) -> Result<(Tensor, Tensor)> {
    let (q, r) = Tensor::f_linalg_qr(weight, "reduced")?;
    Ok((r.f_narrow(0, 0, draw.rank)?, q.f_narrow(1, 0, draw.rank)?))
}

fn pissa(weight: &Tensor, draw: &Draw<'_>, scale: f64) -> Result<(Tensor, Tensor)> {
    let (u, s, vh) = svd(weight)?;
    let roots = s.f_narrow(0, 0, draw.rank)?.f_div_scalar(scale)?.f_sqrt()?;
    let a = vh
        .f_narrow(0, 0, draw.rank)?
        .f_mul(&roots.f_unsqueeze(1)?)?;
    Ok((a, u.f_narrow(1, 0, draw.rank)?.f_mul(&roots)?))
}

/// Halko et al. 2009, arXiv:0909.4061, algorithm 5.1 over a basis from `rounds` power iterations, as
/// `torch.svd_lowrank`.
fn pissa_fast(
    weight: &Tensor,
    draw: &Draw<'_>,
    scale: f64,
    rounds: u32,
) -> Result<(Tensor, Tensor)> {
    let place = (weight.kind(), weight.device());
    let probe = draw
        .stream("svd")
        .normal_tensor([draw.size[1], draw.rank], 1.0, place)?;
    let (mut q, _) = Tensor::f_linalg_qr(&weight.f_mm(&probe)?, "reduced")?;
    for _ in 0..rounds {
        (q, _) = Tensor::f_linalg_qr(&weight.f_tr()?.f_mm(&q)?, "reduced")?;
        (q, _) = Tensor::f_linalg_qr(&weight.f_mm(&q)?, "reduced")?;
    }
    let (u, s, vh) = svd(&q.f_tr()?.f_mm(weight)?)?;
    let roots = s.f_div_scalar(scale)?.f_sqrt()?;
    Ok((
        vh.f_mul(&roots.f_unsqueeze(1)?)?,
        q.f_mm(&u)?.f_mul(&roots)?,
    ))
}

/// The reduced decomposition.
pub(crate) fn svd(matrix: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
    let (u, s, v) = matrix.f_svd(true, true)?;
    Ok((u, s, v.f_tr()?))
}
