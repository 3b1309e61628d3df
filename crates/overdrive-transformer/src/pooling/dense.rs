use std::path::Path;

use overdrive_fused::Activation;
use overdrive_nn::Linear;
use overdrive_quantization::GgufFile;
use overdrive_safetensors::MappedFile;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::modules::read_config;
use crate::activation_names::DenseActivation;
use crate::{Error, Result};

/// The activations of a dense layer, by the name of the class in PyTorch.
const ACTIVATIONS: [(&str, Option<DenseActivation>); 3] = [
    ("Identity", None),
    ("Tanh", Some(DenseActivation::Tanh)),
    ("ReLU", Some(DenseActivation::Named(Activation::Relu))),
];

/// A dense layer over embeddings, `sentence_transformers.models.Dense`.
#[derive(Debug)]
pub(super) struct Dense {
    linear: Linear,
    /// The numbers of inputs and outputs.
    size: [i64; 2],
    activation: Option<DenseActivation>,
}

impl Dense {
    /// Reads `config.json` and `model.safetensors` of the layer.
    pub(super) fn from_dir(folder: &Path, device: Device, kind: Kind) -> Result<Dense> {
        let config = read_config(folder)?;
        let refused = |key: &str, found: String, supported: &str| {
            Error::unsupported(
                format!("{}: {key}", folder.join("config.json").display()),
                found,
                supported,
            )
        };
        let name = config.get("activation_function").and_then(Value::as_str);
        // `torch.nn.modules.activation.Tanh`.
        let name = name.unwrap_or("Tanh");
        let class = name.rsplit('.').next().unwrap_or_default();
        let activation = ACTIVATIONS.into_iter().find(|(own, _)| *own == class);
        let Some((_, activation)) = activation else {
            let found = format!("{name:?}");
            return Err(refused(
                "activation_function",
                found,
                "Identity, Tanh, ReLU",
            ));
        };
        if config.get("use_residual").and_then(Value::as_bool) == Some(true) {
            return Err(refused("use_residual", "true".to_owned(), "false"));
        }
        let input = config.get("module_input_name").and_then(Value::as_str);
        if let Some(input) = input.filter(|input| *input != "sentence_embedding") {
            let found = format!("{input:?}");
            return Err(refused("module_input_name", found, "sentence_embedding"));
        }
        let has_bias = config.get("bias").and_then(Value::as_bool).unwrap_or(true);
        let file = MappedFile::open(folder.join("model.safetensors"))?;
        let read = |name: &str| -> Result<Tensor> {
            Ok(file.tensor(name)?.copy_to_tensor(Some(kind), device)?)
        };
        let bias = has_bias.then(|| read("linear.bias")).transpose()?;
        let weight = read("linear.weight")?;
        let (outputs, inputs) = weight.size2()?;
        Ok(Dense {
            linear: Linear::dense(weight, bias)?,
            size: [inputs, outputs],
            activation,
        })
    }

    /// Reads a layer without bias and activation from a GGUF file, if it has one.
    pub(super) fn from_gguf(
        file: &GgufFile,
        name: &str,
        device: Device,
        kind: Kind,
    ) -> Result<Option<Dense>> {
        let Some(tensor) = file.tensor(name) else {
            return Ok(None);
        };
        let weight = tensor.dequantize(None, kind, device)?;
        let (outputs, inputs) = weight.size2()?;
        Ok(Some(Dense {
            linear: Linear::dense(weight, None)?,
            size: [inputs, outputs],
            activation: None,
        }))
    }

    /// Returns the numbers of inputs and outputs.
    pub(super) fn size(&self) -> [i64; 2] {
        self.size
    }

    /// Computes the layer of `x (N, C)`.
    pub(super) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.linear.forward(x)?;
        match self.activation {
            None => Ok(x),
            Some(activation) => activation.apply(&x),
        }
    }
}
