//! The folders of sentence-transformers: `modules.json` and the settings of its modules.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use overdrive_core::{Error as Common, text};
use serde_json::Value;

use super::pool::{Pooling, PoolingMode};
use crate::{Error, Result};

/// The modes of sentence-transformers that are not implemented.
const UNSUPPORTED: [&str; 6] = [
    "max_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "weightedmean",
    "max",
    "mean_sqrt_len",
];

/// The steps of an embedding model: a transformer, pooling, dense layers, normalization.
#[derive(Debug, Default)]
pub(super) struct Modules {
    /// The folder of the transformer.
    pub(super) transformer: PathBuf,
    pub(super) pooling: Pooling,
    /// The folders of the dense layers, in order.
    pub(super) dense: Vec<PathBuf>,
    /// The number of elements of an embedding that are kept; `None` keeps all.
    pub(super) truncate_dim: Option<i64>,
}

impl Modules {
    /// Reads `modules.json` and the settings of pooling; `None` without the file.
    pub(super) fn from_dir(dir: &Path) -> Result<Option<Modules>> {
        let Some(steps) = steps(dir)? else {
            return Ok(None);
        };
        let mut modules = Modules {
            truncate_dim: truncate_dim(dir)?,
            ..Modules::default()
        };
        let mut last = "";
        for (kind, folder) in &steps {
            // Each step reads the result of the one before, so another order would be another model.
            let follows = match kind.as_str() {
                "Transformer" => last.is_empty(),
                "Pooling" => last == "Transformer",
                "Dense" | "Normalize" => matches!(last, "Pooling" | "Dense"),
                _ => false,
            };
            if !follows {
                return Err(Error::unsupported(
                    "modules.json: type",
                    match last {
                        "" => format!("{kind:?} at the beginning"),
                        _ => format!("{kind:?} after {last:?}"),
                    },
                    "Transformer, Pooling, any number of Dense, Normalize",
                ));
            }
            match kind.as_str() {
                "Transformer" => modules.transformer = folder.clone(),
                "Pooling" => modules.pooling.mode = read_mode(folder)?,
                "Dense" => modules.dense.push(folder.clone()),
                _ => modules.pooling.normalize = true,
            }
            last = kind;
        }
        Ok(Some(modules))
    }
}

/// Returns the types and the folders of the modules of `modules.json`; `None` without the file.
pub(super) fn steps(dir: &Path) -> Result<Option<Vec<(String, PathBuf)>>> {
    let Some(modules) = read_json(&dir.join("modules.json"))? else {
        return Ok(None);
    };
    let mut steps = Vec::new();
    for module in modules.as_array().into_iter().flatten() {
        let text = |key: &str| module.get(key).and_then(Value::as_str).unwrap_or_default();
        // `sentence_transformers.models.Pooling`; version 5 has the modules elsewhere under the same names.
        let kind = text("type").rsplit('.').next().unwrap_or_default();
        let path = text("path");
        // The path comes from a file of the folder: it must stay inside.
        let inside = Path::new(path)
            .components()
            .all(|part| matches!(part, std::path::Component::Normal(_)));
        if !inside {
            let expected = "the name of a folder beside modules.json";
            return Err(Common::option("modules.json: path", path, expected).into());
        }
        steps.push((kind.to_owned(), dir.join(path)));
    }
    Ok(Some(steps))
}

/// Reads `truncate_dim` of `config_sentence_transformers.json`.
fn truncate_dim(dir: &Path) -> Result<Option<i64>> {
    let settings = read_json(&dir.join("config_sentence_transformers.json"))?;
    let value = settings.as_ref().and_then(|own| own.get("truncate_dim"));
    let Some(value) = value.filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    match value.as_i64().filter(|count| *count > 0) {
        Some(count) => Ok(Some(count)),
        None => {
            let expected = "a positive number of elements, or null for all";
            Err(Common::option("truncate_dim", value.to_string(), expected).into())
        }
    }
}

/// Reads a JSON file that may be missing.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>> {
    match text::read_optional(path)? {
        Some(text) => Ok(Some(
            serde_json::from_str(&text).map_err(Common::parse("JSON", path))?,
        )),
        None => Ok(None),
    }
}

/// Reads the `config.json` of a module.
pub(super) fn read_config(folder: &Path) -> Result<Value> {
    let path = folder.join("config.json");
    let missing = || Common::io("read", &path)(std::io::Error::from(ErrorKind::NotFound));
    Ok(read_json(&path)?.ok_or_else(missing)?)
}

/// Reads the mode of the pooling module in `folder`.
fn read_mode(folder: &Path) -> Result<PoolingMode> {
    let config = read_config(folder)?;
    let on = |name: &str| {
        config
            .get(format!("pooling_mode_{name}"))
            .and_then(Value::as_bool)
            == Some(true)
            || config.get("pooling_mode").and_then(Value::as_str) == Some(name)
    };
    if config.get("include_prompt").and_then(Value::as_bool) == Some(false) {
        return Err(Error::unsupported(
            "include_prompt",
            "false",
            "true: the tokens of a prompt are pooled",
        ));
    }
    let unsupported = UNSUPPORTED.into_iter().find(|name| on(name));
    let modes = [
        (on("cls_token") || on("cls"), PoolingMode::Cls),
        (on("mean_tokens") || on("mean"), PoolingMode::Mean),
        (on("lasttoken"), PoolingMode::LastToken),
    ];
    let mut chosen = modes.into_iter().filter(|(on, _)| *on);
    match (chosen.next(), chosen.next(), unsupported) {
        (Some((_, mode)), None, None) => Ok(mode),
        (_, _, name) => Err(Error::unsupported(
            "pooling_mode",
            name.unwrap_or("none or several"),
            "one of cls_token, mean_tokens, lasttoken",
        )),
    }
}
