use std::fmt;
use std::sync::{Arc, Mutex};

use overdrive_quantization::QuantizedWeight;
use tch::Tensor;

use crate::merge::Merged;
use crate::{Adapter, AddOptions, BaseWeight, BiasMode, Error, LoraConfig, Result, init};

/// A linear map of the last dimension, with any number of adapters beside its weight.
///
/// `y = x·Wᵀ + b + Σ scale·dropout(x)·Aᵀ·Bᵀ` over the active adapters; with DoRA each row of what
/// precedes is scaled to its learned length. Without an active adapter it is the base alone, at the
/// base's cost.
///
/// ```
/// use overdrive_lora::{AdaptedLinear, AddOptions, LoraConfig};
/// use tch::{Device, Kind, Tensor};
///
/// let f32 = (Kind::Float, Device::Cpu);
/// let mut map = AdaptedLinear::dense(Tensor::randn([5, 8], f32), None);
/// map.add_adapter("proj", "mine", &LoraConfig { r: 2, ..Default::default() }.into(), &AddOptions::default())?;
/// map.set_active(&["mine"]);
///
/// let x = Tensor::randn([3, 8], f32);
/// let y = map.forward(&x, true)?;
/// y.sum(Kind::Float).f_backward()?;
/// assert!(map.adapter("mine").is_some_and(|adapter| adapter.b().grad().defined()));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct AdaptedLinear {
    pub(crate) base: BaseWeight,
    /// `(O,)`.
    pub(crate) bias: Option<Tensor>,
    pub(crate) adapters: Vec<(String, Adapter)>,
    /// Full copies of weight and bias that take their place (`modules_to_save`).
    pub(crate) copies: Vec<(String, BaseWeight, Option<Tensor>)>,
    /// Places in `adapters`, in the order in which they are added.
    pub(crate) active: Vec<usize>,
    pub(crate) active_copy: Option<usize>,
    pub(crate) enabled: bool,
    pub(crate) training: bool,
    pub(crate) merged: Vec<Merged>,
}

impl AdaptedLinear {
    /// Of `weight (O, I)` and `bias (O,)`. The tensors are shared, not copied.
    pub fn dense(weight: Tensor, bias: Option<Tensor>) -> AdaptedLinear {
        AdaptedLinear::new(
            BaseWeight::Dense {
                weight,
                transposed: false,
            },
            bias,
        )
    }

    /// Of a packed weight and `bias (O,)`.
    pub fn quantized(weight: QuantizedWeight, bias: Option<Tensor>) -> AdaptedLinear {
        AdaptedLinear::new(BaseWeight::Quantized(weight), bias)
    }

    /// Of any weight and `bias (O,)`.
    pub fn new(base: BaseWeight, bias: Option<Tensor>) -> AdaptedLinear {
        AdaptedLinear {
            base,
            bias,
            adapters: Vec::new(),
            copies: Vec::new(),
            active: Vec::new(),
            active_copy: None,
            enabled: true,
            training: false,
            merged: Vec::new(),
        }
    }

    /// The weight without its adapters.
    pub fn base(&self) -> &BaseWeight {
        &self.base
    }

    /// The weight `(O, I)`, where it is dense and the map is nothing else: no adapter is active beside
    /// it.
    pub fn dense_weight(&self) -> Option<&Tensor> {
        let (base, bias) = self.in_use();
        match base {
            BaseWeight::Dense {
                weight,
                transposed: false,
            } if bias.is_none() && self.working().is_empty() => Some(weight),
            _ => None,
        }
    }

    /// Exchanges the weight for another of the same map, and returns the old one. What was merged into
    /// the old one is taken for a part of it.
    pub fn replace_base(&mut self, base: BaseWeight) -> BaseWeight {
        self.merged.clear();
        self.exchange_base(base)
    }

    /// Exchanges the weight, and drops what adapters computed from it.
    pub(crate) fn exchange_base(&mut self, base: BaseWeight) -> BaseWeight {
        for (_, adapter) in &mut self.adapters {
            adapter.lengths = Mutex::default();
        }
        std::mem::replace(&mut self.base, base)
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Makes an adapter for this map, whose `map_name` tells its rank, alpha and random numbers. It is
    /// not active yet.
    ///
    /// Its tensors are fp32 (fp64 beside fp64) unless
    /// [`AddOptions::autocast_adapter_dtype`] is off, require gradients, and are on the weight's device.
    ///
    /// # Errors
    /// [`Error::BadConfig`], [`Error::BadName`] for a name that is taken or empty or holds a dot,
    /// [`Error::Merged`], and an initialisation from the weight that its kind does not allow.
    pub fn add_adapter(
        &mut self,
        map_name: &str,
        adapter: &str,
        config: &Arc<LoraConfig>,
        options: &AddOptions,
    ) -> Result<()> {
        self.check_new(adapter)?;
        let made = init::adapter(&mut self.base, map_name, config, options)?;
        if config.init_lora_weights.changes_base() {
            for (_, other) in &mut self.adapters {
                other.lengths = Mutex::default();
            }
        }
        self.adapters.push((adapter.to_owned(), made));
        Ok(())
    }

    /// Puts an adapter of tensors from anywhere beside the weight. It is not active yet.
    ///
    /// # Errors
    /// [`Error::BadInput`] if it is of another width, and as [`AdaptedLinear::add_adapter`].
    pub fn insert_adapter(&mut self, name: &str, adapter: Adapter) -> Result<()> {
        self.check_new(name)?;
        let (found, expected) = ([adapter.b.size()[0], adapter.a.size()[1]], self.base.size());
        if found != expected {
            return Err(Error::BadInput {
                name: format!("the adapter `{name}`"),
                found: format!("of [outputs, inputs] {found:?}"),
                expected: format!("{expected:?}, as the weight"),
            });
        }
        self.adapters.push((name.to_owned(), adapter));
        Ok(())
    }

    fn check_new(&self, name: &str) -> Result<()> {
        check_name(name)?;
        if self.adapter(name).is_some() {
            return Err(Error::BadName {
                name: name.to_owned(),
                reason: "it is taken",
            });
        }
        self.refuse_merged("adding an adapter")
    }

    /// The adapter `name`.
    pub fn adapter(&self, name: &str) -> Option<&Adapter> {
        let found = self.adapters.iter().find(|(own, _)| own == name);
        found.map(|(_, adapter)| adapter)
    }

    /// All adapters with their names, in the order in which they were added.
    pub fn adapters(&self) -> impl Iterator<Item = (&str, &Adapter)> {
        self.adapters
            .iter()
            .map(|(name, adapter)| (name.as_str(), adapter))
    }

    /// Names of the active adapters.
    pub fn active(&self) -> Vec<&str> {
        let name = |index: &usize| self.adapters[*index].0.as_str();
        self.active.iter().map(name).collect()
    }

    /// The adapter whose full copy takes the map's place.
    pub(crate) fn active_copy(&self) -> Option<&str> {
        self.active_copy.map(|index| self.copies[index].0.as_str())
    }

    /// Makes exactly these adapters active, those of them that this map has. It says nothing about
    /// gradients: [`set_adapter`](crate::set_adapter) does.
    pub fn set_active(&mut self, names: &[&str]) {
        let place = |name: &&str| self.adapters.iter().position(|(own, _)| own == name);
        self.active = names.iter().filter_map(place).collect();
        let copy = |name: &&str| self.copies.iter().position(|(own, ..)| own == name);
        self.active_copy = names.iter().find_map(copy);
    }

    /// Removes the adapter `name`, and returns whether there was one.
    ///
    /// # Errors
    /// [`Error::Merged`] if it is merged into the weight.
    pub fn delete_adapter(&mut self, name: &str) -> Result<bool> {
        if self.merged.iter().any(|merged| merged.adapter == name) {
            self.refuse_merged("deleting an adapter")?;
        }
        let left: Vec<String> = self
            .active()
            .into_iter()
            .filter(|own| *own != name)
            .map(str::to_owned)
            .collect();
        let copy = self.active_copy.map(|index| self.copies[index].0.clone());
        let before = self.adapters.len() + self.copies.len();
        self.adapters.retain(|(own, _)| own != name);
        self.copies.retain(|(own, ..)| own != name);
        let names: Vec<&str> = left.iter().chain(&copy).map(String::as_str).collect();
        self.set_active(&names);
        Ok(self.adapters.len() + self.copies.len() < before)
    }

    /// Multiplies the adapter's own scale by `factor`: 0 switches it off, 1 is as it was made.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`].
    pub fn set_scale(&mut self, name: &str, factor: f64) -> Result<()> {
        let available = self.adapters.iter().map(|(own, _)| own.clone()).collect();
        let Some((_, adapter)) = self.adapters.iter_mut().find(|(own, _)| own == name) else {
            return Err(Error::UnknownAdapter {
                name: name.to_owned(),
                available,
            });
        };
        adapter.scale = factor * adapter.config.scale_of(adapter.rank(), adapter.alpha);
        Ok(())
    }

    /// Whether adapters and full copies count at all; true at first.
    pub fn set_enabled(&mut self, enabled: bool) {
        self.enabled = enabled;
    }

    /// Whether dropout applies; false at first.
    pub fn set_training(&mut self, training: bool) {
        self.training = training;
    }

    /// Names of the adapters that are merged into the weight.
    pub fn merged(&self) -> Vec<&str> {
        self.merged
            .iter()
            .map(|merged| merged.adapter.as_str())
            .collect()
    }

    /// The bias modes of the active adapters.
    pub(crate) fn active_modes(&self) -> impl Iterator<Item = BiasMode> {
        self.active
            .iter()
            .map(|index| self.adapters[*index].1.config.bias)
    }

    pub(crate) fn refuse_merged(&self, operation: &'static str) -> Result<()> {
        if self.merged.is_empty() {
            return Ok(());
        }
        Err(Error::Merged {
            operation,
            merged: self.merged().into_iter().map(str::to_owned).collect(),
        })
    }
}

impl fmt::Debug for AdaptedLinear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdaptedLinear")
            .field("base", &self.base)
            .field("bias", &self.bias)
            .field("adapters", &self.adapters)
            .field("active", &self.active())
            .field("enabled", &self.enabled)
            .field("merged", &self.merged())
            .finish_non_exhaustive()
    }
}

/// A name that can stand in a parameter's name.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let reason = if name.is_empty() {
        "it is empty"
    } else if name.contains('.') {
        "it holds a dot, which separates the parts of parameter names"
    } else {
        return Ok(());
    };
    Err(Error::BadName {
        name: name.to_owned(),
        reason,
    })
}
