use std::collections::HashMap;
use std::path::Path;

use overdrive_autograd::NoGradGuard;
use overdrive_nn::{AdapterHost, LinearWeight};
use overdrive_safetensors::{MappedFile, StoredTensor};
use tch::{Device, Tensor};

use super::experts::Places;
use super::keys::{Entry, PREFIX, expected, visit};
use super::modules::{keep_text, without_experts};
use super::tokens::{Rows, take_rows, visit_tokens};
use super::{CONFIG, WEIGHTS};
use crate::adapters::add;
use crate::host::{visit_linears, visit_parameters};
use crate::layer_adapters::adapters_mut;
use crate::selection::{modules_to_save, refuse_halves, refuse_tokens, resolve};
use crate::{
    AdapterProblems, AddOptions, BiasMode, Error, InitLoraWeights, LoraConfig, Result,
    delete_adapter, set_requires_grad,
};

/// Options for loading an adapter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadAdapterOptions {
    /// If `true`, the adapter is trainable (PEFT's `is_trainable`). Default: `false`.
    pub trainable: bool,
    /// If `true`, 16-bit tensors of the file become fp32 if the weights have 16 bits. Default: `true`. See
    /// [`AddOptions::autocast_adapter_dtype`].
    pub autocast_adapter_dtype: bool,
    /// If `true`, the model already has the residual weights that the adapter's initialization produced (and that
    /// were saved with it), and they are not changed again. Default: `false`: the model has its original weights,
    /// and PiSSA, OLoRA and LoftQ change them as they did at initialization.
    pub residual_base: bool,
}

impl Default for LoadAdapterOptions {
    fn default() -> Self {
        LoadAdapterOptions {
            trainable: false,
            autocast_adapter_dtype: true,
            residual_base: false,
        }
    }
}

/// The result of loading an adapter.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LoadedAdapter {
    /// The configuration with its targets filled in.
    pub config: LoraConfig,
    /// The names of the linear layers that have the adapter.
    pub layers: Vec<String>,
}

/// Reads `adapter_config.json` of the folder `dir`.
///
/// # Errors
/// [`Error::NoAdapter`], [`Error::Common`] if the file cannot be read, and as [`LoraConfig::from_json`].
pub fn read_config(dir: impl AsRef<Path>) -> Result<LoraConfig> {
    let path = dir.as_ref().join(CONFIG);
    let Some(text) = overdrive_core::text::read_optional(&path)? else {
        return Err(no_adapter(dir.as_ref(), CONFIG));
    };
    let keys = serde_json::from_str(&text).map_err(overdrive_core::Error::parse("JSON", &path))?;
    LoraConfig::from_value(keys)
}

/// Loads a folder that PEFT or [`save_adapter`](crate::save_adapter) wrote as the adapter `name`. It is active
/// immediately if no other adapter is active.
///
/// Saved biases and full copies are loaded with it. Weights of the embedding and the head that PEFT saved with the
/// adapter replace the model's, for all of its adapters; if they differ, a warning names them. Names in
/// `modules_to_save` that match no module are ignored, since PEFT adds the classifiers of all architectures
/// (`classifier`, `score`) to the configuration of a classifier.
///
/// An adapter over a multimodal model (`model.language_model.layers`) is loaded into its text model. Its tensors of images
/// or audio are not read, and a warning names them.
///
/// As in PEFT, an adapter that was initialized from the weight (PiSSA, OLoRA) is subtracted from the model's weight
/// again, and LoftQ quantizes the weight again. CorDA cannot repeat its initialization without the data that it used:
/// such an adapter needs the residual weights and [`LoadAdapterOptions::residual_base`].
///
/// # Errors
/// [`Error::Common`] for a CorDA adapter without [`LoadAdapterOptions::residual_base`];
/// [`Error::NoAdapter`]; [`Error::Checkpoint`] with every tensor that is missing, unexpected or has the wrong shape;
/// [`Error::NoTarget`] and others as for [`add_adapter`](crate::add_adapter). The model is then unchanged.
pub fn load_adapter<H: AdapterHost + ?Sized>(
    host: &mut H,
    dir: impl AsRef<Path>,
    name: &str,
    options: &LoadAdapterOptions,
) -> Result<LoadedAdapter> {
    let dir = dir.as_ref();
    let config = read_config(dir)?;
    let file = open(dir)?;
    let mut problems = AdapterProblems::default();
    let mut stored = tensors_of(&file, &mut problems);
    let config = keep_text(host, &mut stored, config)?;
    let (mut config, mut layers) = resolve(host, &config)?;
    if let Some(own) = without_experts(&stored, &config, &layers) {
        (config, layers) = resolve(host, &own)?;
    }
    let saved = modules_to_save(host, &config)?;
    // The file is compared with the model before the model is changed.
    let places = Places::of(host, &config)?;
    if options.trainable {
        refuse_halves(host, &config)?;
        refuse_tokens(&config)?;
        overdrive_core::check_option(
            config.init_lora_weights != InitLoraWeights::Mica,
            "init_lora_weights",
            "\"mica\"",
            "another method for an adapter that is trained, because PEFT trains only A of this one; it can be loaded frozen",
        )?;
    }
    let wanted = expected(host, &config, &layers, &saved, &places)?;
    let stored = fit(&file, stored, problems, &wanted, host, &config)?;
    let making = LoraConfig {
        // The file's values overwrite the random ones; the default method draws the fewest.
        init_lora_weights: match config.init_lora_weights {
            _ if options.residual_base => InitLoraWeights::Default,
            method @ (InitLoraWeights::Corda | InitLoraWeights::LoraGa) => {
                let expected = "another method, unless the model has the residual weights: load these with \
                                `residual_base`, or with `init_lora_weights` true in adapter_config.json; or \
                                convert the adapter with PEFT (`path_initial_model_for_weight_conversion`)";
                let option = "init_lora_weights";
                let found = format!("\"{method}\"");
                return Err(overdrive_core::Error::option(option, found, expected).into());
            }
            own if own.changes_base() => own,
            _ => InitLoraWeights::Default,
        },
        modules_to_save: config.modules_to_save.as_ref().map(|names| {
            let is_matched = |name: &&String| !saved.unmatched.contains(name);
            names.iter().filter(is_matched).cloned().collect()
        }),
        ..config.clone()
    };
    let adding = AddOptions {
        autocast_adapter_dtype: options.autocast_adapter_dtype,
        ..AddOptions::default()
    };
    let layers = add(host, name, &making, &adding)?;
    let filled = fill(host, name, &config, &stored, &places);
    if filled.is_err() {
        let _ = delete_adapter(host, name);
    }
    filled?;
    if !options.trainable {
        set_requires_grad(host, &[name], false)?;
    }
    Ok(LoadedAdapter { config, layers })
}

fn open(dir: &Path) -> Result<MappedFile> {
    let path = dir.join(WEIGHTS);
    let old = dir.join("adapter_model.bin");
    match (path.exists(), old.exists()) {
        (true, _) => Ok(MappedFile::open(path)?),
        (false, true) => Err(Error::Pickle { path: old }),
        (false, false) => Err(no_adapter(dir, WEIGHTS)),
    }
}

fn no_adapter(dir: &Path, missing: &'static str) -> Error {
    Error::NoAdapter {
        folder: dir.to_path_buf(),
        missing,
    }
}

/// The adapter's tensors in a file by key, and the model's weights that the file also holds by name.
struct Fitted<'f> {
    tensors: HashMap<String, StoredTensor<'f>>,
    bases: HashMap<String, StoredTensor<'f>>,
    /// The rows of single tokens, by the name of their weight.
    rows: HashMap<String, Rows<'f>>,
}

/// The last components of the names of embeddings.
pub(super) const EMBEDDINGS: [&str; 5] = [
    "embed_tokens.weight",
    "wte.weight",
    "shared.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
];

/// Takes the model's weights out of `stored`. PEFT saves the weight of a head or an embedding that has an adapter,
/// and both if the vocabulary was resized or with `save_embedding_layers`.
fn bases<'f, H: AdapterHost + ?Sized>(
    host: &mut H,
    stored: &mut HashMap<String, StoredTensor<'f>>,
    problems: &mut AdapterProblems,
) -> Result<HashMap<String, StoredTensor<'f>>> {
    let mut bases: HashMap<String, StoredTensor<'f>> = HashMap::new();
    let mut take = |key: &str, name: &str, shape: &[i64]| {
        let Some(own) = stored.remove(key) else {
            return;
        };
        if own.shape() == shape {
            bases.insert(name.to_owned(), own);
            return;
        }
        problems.others.push(format!(
            "`{}` is {:?} where the model has {shape:?}: load the adapter into a model with the vocabulary that it was \
             trained with",
            own.name(),
            own.shape()
        ));
    };
    let head = host.head().map(str::to_owned);
    let mut shared = None;
    visit_linears(host, |name, linear| {
        if let LinearWeight::Dense { weight, .. } = linear.weight() {
            let weight_name = format!("{name}.weight");
            take(
                &format!("{name}.base_layer.weight"),
                &weight_name,
                &weight.size(),
            );
            if head.as_deref() == Some(name) {
                take(&weight_name, &weight_name, &weight.size());
                shared = Some((weight_name, weight.data_ptr()));
            }
        }
        Ok(())
    })?;
    let mut tied = None;
    visit_parameters(host, |name, tensor| {
        if EMBEDDINGS.iter().any(|end| name.ends_with(end)) {
            take(name, name, &tensor.size());
            if shared
                .as_ref()
                .is_some_and(|(_, head)| *head == tensor.data_ptr())
            {
                tied = Some(name.to_owned());
            }
        }
        Ok(())
    })?;
    if let (Some((head, _)), Some(embedding)) = (shared, tied)
        && let (Some(one), Some(other)) = (bases.get(&head), bases.get(&embedding))
        && !one.has_same_values(other)?
    {
        problems.others.push(format!(
            "`{}` differs from `{}`, but the model ties the two; set `tie_word_embeddings` to false in its \
             config.json, and save a head in its checkpoint",
            one.name(),
            other.name()
        ));
    }
    Ok(bases)
}

/// Copies a stored weight over that of the model, and returns `true` if the two differ.
fn replace(stored: &StoredTensor<'_>, weight: &Tensor) -> Result<bool> {
    let own = stored.copy_to_tensor(Some(weight.kind()), weight.device())?;
    if own.f_equal(weight)? {
        return Ok(false);
    }
    weight.f_detach()?.f_copy_(&own)?;
    Ok(true)
}

/// Returns the tensors of a file by their keys.
fn tensors_of<'f>(
    file: &'f MappedFile,
    problems: &mut AdapterProblems,
) -> HashMap<String, StoredTensor<'f>> {
    let mut stored: HashMap<String, StoredTensor<'f>> = HashMap::new();
    for tensor in file.tensors() {
        let key = tensor.name();
        // Files without PEFT's prefix are accepted as well.
        let key = key.strip_prefix(PREFIX).unwrap_or(key).to_owned();
        if let Some(other) = stored.insert(key, tensor) {
            problems.others.push(format!(
                "`{}` occurs twice, with and without `{PREFIX}`",
                other.name()
            ));
        }
    }
    stored
}

/// Compares the file with the tensors that it should hold.
fn fit<'f, H: AdapterHost + ?Sized>(
    file: &'f MappedFile,
    mut stored: HashMap<String, StoredTensor<'f>>,
    mut problems: AdapterProblems,
    wanted: &[Entry],
    host: &mut H,
    config: &LoraConfig,
) -> Result<Fitted<'f>> {
    let mut tensors = HashMap::new();
    for entry in wanted {
        let older = entry.older.as_ref();
        let found = stored.remove(&entry.key).or_else(|| stored.remove(older?));
        match found {
            None => problems.missing.push(format!("`{PREFIX}{}`", entry.key)),
            Some(found) if found.shape() != entry.shape => problems.misshapen.push(format!(
                "`{}` ({:?}, the model has {:?})",
                found.name(),
                found.shape(),
                entry.shape
            )),
            Some(found) if found.kind().is_none() => problems.others.push(format!(
                "`{}` is stored as {}, which cannot be read",
                found.name(),
                found.format()
            )),
            Some(found) => {
                tensors.insert(entry.key.clone(), found);
            }
        }
    }
    if config.bias == BiasMode::All {
        // PEFT saves BART's buffer with the biases, although nothing trains it.
        stored.remove("final_logits_bias");
        // It saves those of a full copy under the names of its wrapper, too, and those of the module that the copy replaces.
        let parts = [".modules_to_save.", ".original_module."];
        stored.retain(|key, _| {
            let is_again = |part: &&str| {
                let Some((module, rest)) = key.split_once(*part) else {
                    return false;
                };
                // A module with modules inside keeps the name of the adapter in its keys.
                let inside = rest.split_once('.').map_or(rest, |(_, inside)| inside);
                [rest, inside]
                    .iter()
                    .any(|rest| tensors.contains_key(&format!("{module}.{rest}")))
            };
            !parts.iter().any(is_again)
        });
    }
    let bases = bases(host, &mut stored, &mut problems)?;
    let rows = take_rows(host, config, &mut stored, &mut problems)?;
    let mut rest: Vec<&str> = stored.values().map(StoredTensor::name).collect();
    rest.sort_unstable();
    problems
        .unexpected
        .extend(rest.iter().map(|name| format!("`{name}`")));
    if problems.is_empty() {
        return Ok(Fitted {
            tensors,
            bases,
            rows,
        });
    }
    Err(Error::Checkpoint {
        path: file.path().to_path_buf(),
        problems: Box::new(problems),
        base: config.base_model_name_or_path.clone(),
    })
}

fn fill<H: AdapterHost + ?Sized>(
    host: &mut H,
    name: &str,
    config: &LoraConfig,
    stored: &Fitted<'_>,
    places: &Places,
) -> Result<()> {
    let _no_grad = NoGradGuard::new();
    // The tensors of all experts, of which each expert gets its part.
    let mut read: HashMap<String, Tensor> = HashMap::new();
    visit(host, name, config.bias, &mut |key, tensor: &Tensor| {
        if let Some(stored) = stored.tensors.get(&key) {
            stored.copy_into(tensor)?;
        }
        let part = places.part(&key, |whole| {
            if !read.contains_key(&whole)
                && let Some(stored) = stored.tensors.get(&whole)
            {
                read.insert(whole.clone(), stored.copy_to_tensor(None, Device::Cpu)?);
            }
            Ok(read.get(&whole).map(Tensor::shallow_clone))
        })?;
        if let Some(part) = part {
            tensor.f_detach()?.f_copy_(&part)?;
        }
        Ok(())
    })?;
    let mut replaced = Vec::new();
    visit_parameters(host, |name, tensor| {
        if let Some(base) = stored.bases.get(name)
            && replace(base, tensor)?
        {
            replaced.push(name.to_owned());
        }
        Ok(())
    })?;
    visit_linears(host, |layer, linear| {
        let weight_name = format!("{layer}.weight");
        if let (Some(base), LinearWeight::Dense { weight, .. }) =
            (stored.bases.get(&weight_name), linear.weight())
            && replace(base, weight)?
        {
            replaced.push(weight_name);
        }
        let adapters = adapters_mut(linear).into_iter();
        for (own, adapter) in adapters.flat_map(|own| &mut own.adapters) {
            if own == name {
                adapter.keep_config(config);
            }
        }
        Ok(())
    })?;
    visit_tokens(host, config, |_, name, weight, _| {
        if let Some((stored, tokens)) = stored.rows.get(name) {
            let rows = stored.copy_to_tensor(Some(weight.kind()), weight.device())?;
            let tokens = Tensor::f_from_slice(tokens)?.f_to_device(weight.device())?;
            let _ = weight.f_detach()?.f_index_copy_(0, &tokens, &rows)?;
            replaced.push(name.to_owned());
        }
        Ok(())
    })?;
    if !replaced.is_empty() {
        tracing::warn!(
            "loading the adapter `{name}` replaced weights of the model, which affects all of its adapters: {}",
            replaced.join(", ")
        );
    }
    Ok(())
}
