use std::path::Path;

use overdrive_attention::PackedLengths;
use tch::{Device, Kind, Tensor};

use super::modules::Modules;
use crate::{Error, Result};

/// The token states that are pooled into the embedding of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PoolingMode {
    /// The first token (`pooling_mode_cls_token`).
    Cls,
    /// The mean over the tokens that are not padding (`pooling_mode_mean_tokens`).
    #[default]
    Mean,
    /// The last token (`pooling_mode_lasttoken`), whose state a causal model computes from all others.
    LastToken,
}

impl PoolingMode {
    /// Pools the hidden states `(B, T, C)` of sequences without padding: `(B, C)`, in their dtype.
    ///
    /// # Errors
    /// An error of libtorch, such as for another shape.
    pub fn pool(self, hidden: &Tensor) -> Result<Tensor> {
        Ok(match self {
            PoolingMode::Cls => hidden.f_select(1, 0)?,
            PoolingMode::LastToken => hidden.f_select(1, -1)?,
            PoolingMode::Mean => {
                let mean = hidden.f_mean_dim(1i64, false, wide(hidden.kind()))?;
                mean.f_to_kind(hidden.kind())?
            }
        })
    }
}

impl std::str::FromStr for PoolingMode {
    type Err = overdrive_core::Error;

    fn from_str(name: &str) -> std::result::Result<PoolingMode, overdrive_core::Error> {
        match name {
            "cls" => Ok(PoolingMode::Cls),
            "mean" => Ok(PoolingMode::Mean),
            "last" => Ok(PoolingMode::LastToken),
            _ => Err(overdrive_core::Error::option(
                "pooling",
                format!("{name:?}"),
                "cls, last or mean",
            )),
        }
    }
}

/// The steps from hidden states to the embedding of a sequence, as in sentence-transformers. Default: the mean,
/// not normalized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Pooling {
    /// The states that are pooled.
    pub mode: PoolingMode,
    /// If `true`, embeddings are divided by their L2 norm.
    pub normalize: bool,
}

impl Pooling {
    /// Sets [`Pooling::mode`].
    pub fn with_mode(mut self, mode: PoolingMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets [`Pooling::normalize`].
    pub fn with_normalize(mut self, normalize: bool) -> Self {
        self.normalize = normalize;
        self
    }

    /// Reads the pooling of a folder of sentence-transformers: `modules.json` and the `config.json` of its pooling
    /// module, `1_Pooling/config.json` in most folders. Returns `None` if the folder has no `modules.json`.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a file that cannot be read or parsed,
    /// [`Error::Unsupported`] for another module or another mode, and for dense layers, which
    /// [`EmbeddingModel`](crate::EmbeddingModel) computes.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Option<Pooling>> {
        match Modules::from_dir(dir.as_ref())? {
            Some(modules) if !modules.dense.is_empty() => Err(Error::unsupported(
                "modules.json: type",
                "\"Dense\"",
                "Transformer, Pooling, Normalize; `EmbeddingModel` has dense layers, too",
            )),
            modules => Ok(modules.map(|modules| modules.pooling)),
        }
    }

    /// Divides each row of `vectors (N, C)` by its L2 norm, at least 1e-12.
    pub(crate) fn normalized(self, vectors: &Tensor) -> Result<Tensor> {
        let wide = vectors.f_to_kind(wide(vectors.kind()))?;
        let norm = wide
            .f_norm_scalaropt_dim(2.0, [-1i64], true)?
            .f_clamp_min(1e-12)?;
        Ok(wide.f_div(&norm)?.f_to_kind(vectors.kind())?)
    }
}

/// Pools the hidden states `(B, T, C)`, or `(1, N, C)` of packed `sequences`: `(B, C)`.
pub(crate) fn pooled(
    hidden: &Tensor,
    sequences: Option<&PackedLengths>,
    mode: PoolingMode,
) -> Result<Tensor> {
    let Some(sequences) = sequences else {
        return mode.pool(hidden);
    };
    let hidden = hidden.f_squeeze_dim(0)?;
    match mode {
        PoolingMode::Cls | PoolingMode::LastToken => {
            let indices = ends(sequences, mode, hidden.device())?;
            Ok(hidden.f_index_select(0, &indices)?)
        }
        PoolingMode::Mean => means(&hidden, sequences),
    }
}

/// Returns the index of the first or the last token of each of the packed `sequences`.
pub(super) fn ends(sequences: &PackedLengths, mode: PoolingMode, device: Device) -> Result<Tensor> {
    let mut end = 0;
    let indices = sequences.query_lengths().map(|length| {
        end += length;
        match mode {
            PoolingMode::LastToken => end - 1,
            _ => end - length,
        }
    });
    let indices = Tensor::f_from_slice(&indices.collect::<Vec<i64>>())?;
    Ok(indices.f_to_device(device)?)
}

/// Returns the mean of `hidden (N, C)` over each of the packed `sequences`.
fn means(hidden: &Tensor, sequences: &PackedLengths) -> Result<Tensor> {
    let device = hidden.device();
    let lengths: Vec<i64> = sequences.query_lengths().collect();
    let owners = (0i64..).zip(&lengths);
    let owners = owners.flat_map(|(row, &length)| (0..length).map(move |_| row));
    let owners = Tensor::f_from_slice(&owners.collect::<Vec<i64>>())?.f_to_device(device)?;
    let kind = wide(hidden.kind());
    let sums = Tensor::f_zeros([lengths.len() as i64, hidden.size()[1]], (kind, device))?
        .f_index_add(0, &owners, &hidden.f_to_kind(kind)?)?;
    let lengths = Tensor::f_from_slice(&lengths)?.f_to_device(device)?;
    let lengths = lengths
        .f_to_kind(Kind::Double)?
        .f_to_kind(kind)?
        .f_unsqueeze(1)?;
    Ok(sums.f_div(&lengths)?.f_to_kind(hidden.kind())?)
}

/// Returns the dtype in which sums over tokens are computed.
fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}
