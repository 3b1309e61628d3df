use overdrive_quantization::{QuantizedWeight, Scheme};
use tch::{Device, Kind, Tensor, nn};

use crate::weight::bytes;
use crate::{LinearWeight, Result};

/// A table of vectors `(V, D)`, dense or quantized, in place of [`tch::nn::Embedding`]. Only the rows that are
/// looked up are dequantized.
///
/// A head that is tied to it shares its memory:
///
/// ```
/// use overdrive_nn::{Embedding, Linear};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let table = Tensor::randn([100, 64], (Kind::Float, Device::Cpu));
/// let embedding = Embedding::quantize(&table, "int8-weight".parse()?, Kind::Float)?;
/// let head = Linear::new(embedding.as_linear_weight(), None)?;
/// let x = embedding.forward(&Tensor::from_slice(&[3_i64, 14]))?;
/// assert_eq!(head.forward(&x)?.argmax(-1, false), Tensor::from_slice(&[3_i64, 14]));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Embedding(Table);

#[derive(Debug)]
enum Table {
    Dense(Tensor),
    /// With the dtype of the vectors.
    Quantized(QuantizedWeight, Kind),
}

impl Embedding {
    /// Creates an embedding from a dense table `(V, D)`, which is shared, not copied.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a table that is not a matrix.
    pub fn dense(table: Tensor) -> Result<Embedding> {
        if table.dim() != 2 {
            return Err(overdrive_core::Error::shape("table", table.size(), "(V, D)").into());
        }
        Ok(Embedding(Table::Dense(table)))
    }

    /// Creates an embedding from a quantized table `(V, D)`. Looked-up vectors have the dtype `kind`.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) if `kind` is not a floating-point dtype.
    pub fn quantized(table: QuantizedWeight, kind: Kind) -> Result<Embedding> {
        let floating = matches!(
            kind,
            Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
        );
        overdrive_core::check_option(
            floating,
            "kind",
            format!("{kind:?}"),
            "Float, Double, Half or BFloat16",
        )?;
        Ok(Embedding(Table::Quantized(table, kind)))
    }

    /// Quantizes a table `(V, D)`.
    ///
    /// # Errors
    /// As [`QuantizedWeight::quantize`] and [`Embedding::quantized`].
    pub fn quantize(table: &Tensor, scheme: Scheme, kind: Kind) -> Result<Embedding> {
        Embedding::quantized(QuantizedWeight::quantize(table, scheme)?, kind)
    }

    /// Quantizes an embedding of tch; the vectors keep its dtype.
    ///
    /// # Errors
    /// As [`QuantizedWeight::quantize`].
    pub fn from_dense(dense: &nn::Embedding, scheme: Scheme) -> Result<Embedding> {
        Embedding::quantize(&dense.ws, scheme, dense.ws.kind())
    }

    /// Looks up the vectors `(…, D)` of i64 ids `(…)`.
    ///
    /// # Errors
    /// An error of libtorch or of overdrive-quantization for ids outside the table.
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match &self.0 {
            Table::Dense(table) => Ok(Tensor::f_embedding(table, ids, -1, false, false)?),
            Table::Quantized(table, kind) => Ok(table.rows(ids, *kind)?),
        }
    }

    /// Returns the table if it is dense.
    pub fn dense_table(&self) -> Option<&Tensor> {
        match &self.0 {
            Table::Dense(table) => Some(table),
            Table::Quantized(..) => None,
        }
    }

    /// Returns the table if it is dense, so that it can be replaced by another tensor of the same shape.
    pub fn dense_table_mut(&mut self) -> Option<&mut Tensor> {
        match &mut self.0 {
            Table::Dense(table) => Some(table),
            Table::Quantized(..) => None,
        }
    }

    /// Returns the table if it is quantized.
    pub fn quantized_table(&self) -> Option<&QuantizedWeight> {
        match &self.0 {
            Table::Dense(_) => None,
            Table::Quantized(table, _) => Some(table),
        }
    }

    /// Returns another handle to the table, for the weight of a tied head.
    pub fn as_linear_weight(&self) -> LinearWeight {
        match &self.0 {
            Table::Dense(table) => LinearWeight::Dense {
                weight: table.shallow_clone(),
                transposed: false,
            },
            Table::Quantized(table, _) => LinearWeight::Quantized(table.shallow_clone()),
        }
    }

    /// Returns the dtype of the vectors.
    pub fn kind(&self) -> Kind {
        match &self.0 {
            Table::Dense(table) => table.kind(),
            Table::Quantized(_, kind) => *kind,
        }
    }

    /// Returns the device of the table.
    pub fn device(&self) -> Device {
        match &self.0 {
            Table::Dense(table) => table.device(),
            Table::Quantized(table, _) => table.device(),
        }
    }

    /// Returns the number of elements of the table before quantization, V · D.
    pub fn parameters(&self) -> usize {
        match &self.0 {
            Table::Dense(table) => table.numel(),
            Table::Quantized(table, _) => {
                let [rows, columns] = table.size();
                usize::try_from(rows * columns).unwrap_or(0)
            }
        }
    }

    /// Returns the size of the table in bytes.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Table::Dense(table) => bytes(table),
            Table::Quantized(table, _) => table.bytes(),
        }
    }
}

impl nn::Module for Embedding {
    /// Computes [`Embedding::forward`].
    ///
    /// # Panics
    /// Panics if [`Embedding::forward`] returns an error: the trait has no other way to report it, and the
    /// modules of tch do the same.
    fn forward(&self, ids: &Tensor) -> Tensor {
        match Embedding::forward(self, ids) {
            Ok(vectors) => vectors,
            Err(error) => panic!("an embedding: {error}"),
        }
    }
}
