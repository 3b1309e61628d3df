//! Layers for models of tch that are not made of this workspace's transformer.

use tch::{Kind, Tensor, nn};

use crate::{Error, QuantizedWeight, Result, Scheme, linear};

/// A linear map with a quantized weight, in place of [`tch::nn::Linear`].
///
/// ```
/// use overdrive_quantization::{Linear, Scheme};
/// use tch::nn::Module;
/// use tch::{Device, Kind, Tensor, nn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store = nn::VarStore::new(Device::Cpu);
/// let dense = nn::linear(store.root(), 64, 96, nn::LinearConfig::default());
/// let quantized = Linear::from_dense(&dense, Scheme::Int8Dynamic)?;
/// let x = Tensor::randn([3, 64], (Kind::Float, Device::Cpu));
/// let error = (dense.forward(&x) - quantized.forward(&x)?).abs().max();
/// assert!(error.double_value(&[]) < 0.05);
/// assert!(quantized.bytes() * 3 < 64 * 96 * 4);
///
/// // It stands wherever a module does.
/// let model = nn::seq().add(quantized).add_fn(Tensor::relu);
/// assert_eq!(model.forward(&x).size(), [3, 96]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Linear {
    weight: QuantizedWeight,
    bias: Option<Tensor>,
}

impl Linear {
    /// Of a quantized weight `(O, I)` and a bias `(O,)`, which may be trained.
    ///
    /// # Errors
    /// [`Error::Common`] for a bias of another length or device.
    pub fn new(weight: QuantizedWeight, bias: Option<Tensor>) -> Result<Linear> {
        if let Some(bias) = &bias
            && (bias.size() != weight.size()[..1] || bias.device() != weight.device())
        {
            let expected = format!("({},) on {:?}", weight.size()[0], weight.device());
            return Err(Error::shape("bias", bias.size(), expected));
        }
        Ok(Linear { weight, bias })
    }

    /// Quantizes `weight (O, I)`; the bias is kept as it is.
    ///
    /// # Errors
    /// Those of [`QuantizedWeight::quantize`] and of [`Linear::new`].
    pub fn quantize(weight: &Tensor, bias: Option<&Tensor>, scheme: Scheme) -> Result<Linear> {
        let bias = bias.map(Tensor::f_detach).transpose()?;
        Linear::new(QuantizedWeight::quantize(weight, scheme)?, bias)
    }

    /// Quantizes a layer of tch, which stays as it is: drop it, and the store that its variables are in,
    /// to have its memory back.
    ///
    /// # Errors
    /// Those of [`QuantizedWeight::quantize`].
    pub fn from_dense(dense: &nn::Linear, scheme: Scheme) -> Result<Linear> {
        Linear::quantize(&dense.ws, dense.bs.as_ref(), scheme)
    }

    /// `x (…, I)` to `(…, O)`; see [`linear`](crate::linear()).
    ///
    /// # Errors
    /// [`Error::Common`] if shapes or kinds do not fit.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.weight, self.bias.as_ref())
    }

    /// The weight.
    pub fn weight(&self) -> &QuantizedWeight {
        &self.weight
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// How many numbers it stands for: O · I of the weight, O of the bias.
    pub fn parameters(&self) -> usize {
        count(&self.weight) + self.bias.as_ref().map_or(0, Tensor::numel)
    }

    /// The memory that it takes.
    pub fn bytes(&self) -> usize {
        let bias = self.bias.as_ref();
        self.weight.bytes() + bias.map_or(0, |bias| bias.numel() * bias.kind().elt_size_in_bytes())
    }
}

impl nn::Module for Linear {
    /// [`Linear::forward`].
    ///
    /// # Panics
    /// Where that returns an error: the trait has no other way to say so, and the modules of tch do the
    /// same.
    fn forward(&self, x: &Tensor) -> Tensor {
        match Linear::forward(self, x) {
            Ok(y) => y,
            Err(error) => panic!("a quantized linear map: {error}"),
        }
    }
}

/// A table of vectors with a quantized weight, in place of [`tch::nn::Embedding`]; only the rows that are
/// looked up are dequantized.
///
/// A head that is tied to it shares its memory:
///
/// ```
/// use overdrive_quantization::{Embedding, Linear, Scheme};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let table = Tensor::randn([100, 64], (Kind::Float, Device::Cpu));
/// let embedding = Embedding::quantize(&table, Scheme::Int8WeightOnly, Kind::Float)?;
/// let head = Linear::new(embedding.weight().shallow_clone(), None)?;
/// let x = embedding.forward(&Tensor::from_slice(&[3_i64, 14]))?;
/// assert_eq!(head.forward(&x)?.argmax(-1, false), Tensor::from_slice(&[3_i64, 14]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Embedding {
    weight: QuantizedWeight,
    kind: Kind,
}

impl Embedding {
    /// Of a quantized weight `(V, D)`; its vectors are of `kind`.
    ///
    /// # Errors
    /// [`Error::Common`] for a kind that is not a floating one.
    pub fn new(weight: QuantizedWeight, kind: Kind) -> Result<Embedding> {
        if !matches!(
            kind,
            Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
        ) {
            let expected = "Float, Double, Half or BFloat16";
            return Err(Error::option("kind", format!("{kind:?}"), expected));
        }
        Ok(Embedding { weight, kind })
    }

    /// Quantizes `weight (V, D)`.
    ///
    /// # Errors
    /// Those of [`QuantizedWeight::quantize`] and of [`Embedding::new`].
    pub fn quantize(weight: &Tensor, scheme: Scheme, kind: Kind) -> Result<Embedding> {
        Embedding::new(QuantizedWeight::quantize(weight, scheme)?, kind)
    }

    /// Quantizes a table of tch, whose kind vectors keep.
    ///
    /// # Errors
    /// Those of [`QuantizedWeight::quantize`].
    pub fn from_dense(dense: &nn::Embedding, scheme: Scheme) -> Result<Embedding> {
        Embedding::quantize(&dense.ws, scheme, dense.ws.kind())
    }

    /// The vectors `(…, D)` of ids `(…)`, i64.
    ///
    /// # Errors
    /// For ids outside of the table.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        self.weight.rows(ids, self.kind)
    }

    /// The weight, to share with a head.
    pub fn weight(&self) -> &QuantizedWeight {
        &self.weight
    }

    /// How many numbers it stands for, V · D.
    pub fn parameters(&self) -> usize {
        count(&self.weight)
    }

    /// The memory that it takes.
    pub fn bytes(&self) -> usize {
        self.weight.bytes()
    }
}

impl nn::Module for Embedding {
    /// [`Embedding::forward`].
    ///
    /// # Panics
    /// Where that returns an error, as the modules of tch do.
    fn forward(&self, ids: &Tensor) -> Tensor {
        match Embedding::forward(self, ids) {
            Ok(vectors) => vectors,
            Err(error) => panic!("a quantized embedding: {error}"),
        }
    }
}

fn count(weight: &QuantizedWeight) -> usize {
    let [rows, columns] = weight.size();
    usize::try_from(rows * columns).unwrap_or(0)
}
