use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use overdrive_core::{Error as Common, text};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::backbone::wide;
use super::input::Rows;
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

/// The modes of sentence-transformers that are not implemented.
const UNSUPPORTED: [&str; 5] = [
    "max_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "lasttoken",
    "max",
];

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
    /// [`Error::Common`] for a file that cannot be read or parsed, [`Error::Unsupported`] for another module (such
    /// as a dense layer) or another mode.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Option<Pooling>> {
        let dir = dir.as_ref();
        let Some(modules) = read_json(dir.join("modules.json"))? else {
            return Ok(None);
        };
        let mut pooling = Pooling::default();
        for module in modules.as_array().into_iter().flatten() {
            let text = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or_default();
            // `sentence_transformers.models.Pooling`; version 5 has the modules elsewhere under the same names.
            match text("type").rsplit('.').next().unwrap_or_default() {
                "Transformer" => {}
                "Normalize" => pooling.normalize = true,
                "Pooling" => pooling.mode = read_mode(dir, text("path"))?,
                _ => {
                    return Err(Error::Unsupported {
                        key: "modules.json: type".to_owned(),
                        found: format!("{:?}", text("type")),
                        supported: "Transformer, Pooling, Normalize".to_owned(),
                    });
                }
            }
        }
        Ok(Some(pooling))
    }

    /// Divides each row of `vectors (N, C)` by its L2 norm, at least 1e-12.
    pub(super) fn normalized(self, vectors: &Tensor) -> Result<Tensor> {
        let wide = vectors.f_to_kind(wide(vectors.kind()))?;
        let norm = wide
            .f_norm_scalaropt_dim(2.0, [-1i64], true)?
            .f_clamp_min(1e-12)?;
        Ok(wide.f_div(&norm)?.f_to_kind(vectors.kind())?)
    }
}

fn read_json(path: PathBuf) -> Result<Option<Value>> {
    match text::read_optional(&path)? {
        Some(text) => Ok(Some(
            serde_json::from_str(&text).map_err(Common::parse("JSON", path))?,
        )),
        None => Ok(None),
    }
}

/// Reads the mode of the pooling module in `dir/module`.
fn read_mode(dir: &Path, module: &str) -> Result<PoolingMode> {
    // The path comes from a file of the folder: it must stay inside.
    let inside = Path::new(module)
        .components()
        .all(|part| matches!(part, std::path::Component::Normal(_)));
    if !inside {
        let expected = "the name of a folder beside modules.json";
        return Err(Common::option("modules.json: path", module, expected).into());
    }
    let path = dir.join(module).join("config.json");
    let Some(config) = read_json(path.clone())? else {
        let missing = std::io::Error::from(ErrorKind::NotFound);
        return Err(Common::io("read", path)(missing).into());
    };
    let on = |name: &str| {
        config
            .get(format!("pooling_mode_{name}"))
            .and_then(Value::as_bool)
            == Some(true)
            || config.get("pooling_mode").and_then(Value::as_str) == Some(name)
    };
    let unsupported = UNSUPPORTED.into_iter().find(|name| on(name));
    let modes = (
        on("cls_token") || on("cls"),
        on("mean_tokens") || on("mean"),
    );
    match (modes, unsupported) {
        ((true, false), None) => Ok(PoolingMode::Cls),
        ((false, true), None) => Ok(PoolingMode::Mean),
        (_, name) => Err(Error::Unsupported {
            key: "pooling_mode".to_owned(),
            found: name.unwrap_or("none or several").to_owned(),
            supported: "one of cls_token, mean_tokens".to_owned(),
        }),
    }
}

/// Pools the hidden states `(B, T, C)` or `(1, N, C)` of the sequences of `rows`: `(B, C)`.
pub(super) fn pooled(rows: &Rows, hidden: &Tensor, mode: PoolingMode) -> Result<Tensor> {
    let Some(sequences) = rows.sequences() else {
        return Ok(match mode {
            PoolingMode::Cls => hidden.f_select(1, 0)?,
            PoolingMode::Mean => {
                let mean = hidden.f_mean_dim(1i64, false, wide(hidden.kind()))?;
                mean.f_to_kind(hidden.kind())?
            }
        });
    };
    let device = hidden.device();
    let lengths: Vec<i64> = sequences.query_lengths().collect();
    let hidden = hidden.f_squeeze_dim(0)?;
    if mode == PoolingMode::Cls {
        let mut start = 0;
        let starts = lengths.iter().map(|length| {
            start += length;
            start - length
        });
        let starts = Tensor::f_from_slice(&starts.collect::<Vec<i64>>())?;
        return Ok(hidden.f_index_select(0, &starts.f_to_device(device)?)?);
    }
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
