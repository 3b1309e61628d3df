use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use overdrive_lora::{AddOptions, LoraConfig, TargetModules, add_adapter, lora_adapter};
use overdrive_nn::{AdapterHost, AdapterState, Linear, LinearWeight, Result};
use overdrive_safetensors::MappedFile;
use tch::{Device, Kind, Tensor};

pub(crate) const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
pub(crate) const F64: (Kind, Device) = (Kind::Double, Device::Cpu);

/// Takes libtorch's generator, which belongs to the process: tests that draw from it or compare its state
/// run one at a time. `gradcheck` and dropout draw from it.
pub(crate) fn generator() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn fixture(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name);
    assert!(
        path.exists(),
        "{} is missing: run `python3 gen_peft.py` in its folder",
        path.display()
    );
    path
}

pub(crate) fn read(file: &MappedFile, name: &str) -> Tensor {
    file.tensor(name)
        .unwrap()
        .copy_to_tensor(None, Device::Cpu)
        .unwrap()
}

/// Deterministic values, independent of libtorch's generator, which the tests of a process share.
pub(crate) fn numbers(shape: &[i64], salt: f64, options: (Kind, Device)) -> Tensor {
    let count: i64 = shape.iter().product();
    let line = Tensor::arange(count, F64) * 12.9898 + salt;
    let wild = line.sin() * 43758.5453;
    ((&wild - wild.floor()) * 2.0 - 1.0)
        .reshape(shape)
        .to_kind(options.0)
}

/// The largest difference, relative to the largest expected element.
pub(crate) fn distance(got: &Tensor, expected: &Tensor) -> f64 {
    assert_eq!(got.size(), expected.size());
    let (got, expected) = (got.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let scale = expected.abs().max().double_value(&[]).max(1e-30);
    (got - expected).abs().max().double_value(&[]) / scale
}

/// A model of named linear layers, an embedding and a norm.
#[derive(Default)]
pub(crate) struct Host {
    pub(crate) layers: Vec<(String, Linear)>,
    pub(crate) parameters: Vec<(String, Tensor)>,
    pub(crate) state: AdapterState,
    pub(crate) head: Option<String>,
    /// If `true`, the model is the text of a multimodal one.
    pub(crate) is_text: bool,
}

impl Host {
    pub(crate) fn new(names: &[&str], outputs: i64, inputs: i64) -> Host {
        let layers = names.iter().enumerate().map(|(index, name)| {
            let weight = numbers(&[outputs, inputs], index as f64, F32);
            let bias = numbers(&[outputs], 0.5 + index as f64, F32);
            (
                (*name).to_owned(),
                Linear::dense(weight, Some(bias)).unwrap(),
            )
        });
        Host {
            layers: layers.collect(),
            ..Host::default()
        }
    }

    /// A model of one layer, `layer`, with the active adapter `a`.
    pub(crate) fn adapted(linear: Linear, config: &LoraConfig) -> Host {
        let mut host = Host {
            layers: vec![("layer".to_owned(), linear)],
            ..Host::default()
        };
        let config = LoraConfig {
            target_modules: Some(TargetModules::AllLinear),
            ..config.clone()
        };
        add_adapter(&mut host, "a", &config, &AddOptions::default()).unwrap();
        host
    }

    pub(crate) fn layer(&mut self, name: &str) -> &mut Linear {
        let found = self.layers.iter_mut().find(|(own, _)| own == name);
        &mut found.unwrap().1
    }

    /// Gives every B and bias of the adapter values other than zero.
    pub(crate) fn randomise(&mut self, adapter: &str) {
        let _no_grad = tch::no_grad_guard();
        for (index, (_, layer)) in self.layers.iter().enumerate() {
            if let Some(adapter) = lora_adapter(layer, adapter) {
                let (b, salt) = (adapter.b(), 3.0 + index as f64);
                b.shallow_clone()
                    .copy_(&(numbers(&b.size(), salt, F32) * 0.3));
                if let Some(bias) = adapter.bias() {
                    bias.shallow_clone()
                        .copy_(&(numbers(&bias.size(), salt, F32) * 0.3));
                }
                if let Some(magnitude) = adapter.magnitude() {
                    let factor = numbers(&magnitude.size(), salt, F32) * 0.2 + 1.0;
                    magnitude.shallow_clone().copy_(&(magnitude * factor));
                }
            }
        }
    }
}

impl AdapterHost for Host {
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Linear) -> Result<()>,
    ) -> Result<()> {
        self.layers
            .iter_mut()
            .try_for_each(|(name, layer)| visit(name, layer))
    }

    fn visit_parameters(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        self.parameters
            .iter_mut()
            .try_for_each(|(name, tensor)| visit(name, tensor))
    }

    fn adapter_state(&mut self) -> Option<&mut AdapterState> {
        Some(&mut self.state)
    }

    fn head(&self) -> Option<&str> {
        self.head.as_deref()
    }

    fn name_in_original(&self, name: &str) -> String {
        match name.strip_prefix("model.") {
            Some(text) if self.is_text => format!("model.language_model.{text}"),
            _ => name.to_owned(),
        }
    }
}

pub(crate) fn transposed(weight: Tensor) -> LinearWeight {
    LinearWeight::Dense {
        weight,
        transposed: true,
    }
}
