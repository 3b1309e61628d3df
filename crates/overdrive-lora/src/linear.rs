use std::sync::Arc;

use overdrive_nn::Linear;

use crate::layer_adapters::{adapters_mut, adapters_of, split_or_insert};
use crate::merge::{MergeOptions, MergedLayer};
use crate::{AddOptions, Error, LoraAdapter, LoraConfig, Result, init};

/// The LoRA adapters of one [`Linear`] layer: `y = x·Wᵀ + b + Σ scale·dropout(x)·Aᵀ·Bᵀ` over the active adapters;
/// DoRA also scales each row of the weight updated so far to its learned norm.
///
/// Without an active adapter the layer computes its weight alone, at the cost of a plain layer. For whole
/// models, use [`add_adapter`](crate::add_adapter) and the other functions of this crate.
///
/// ```
/// use overdrive_lora::{AddOptions, LoraConfig, LoraLinear};
/// use overdrive_nn::Linear;
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let f32 = (Kind::Float, Device::Cpu);
/// let mut linear = Linear::dense(Tensor::randn([5, 8], f32), None)?;
/// let config = LoraConfig { r: 2, ..Default::default() };
/// linear.add_adapter("proj", "mine", &config.into(), &AddOptions::default())?;
/// linear.set_active_adapters(&["mine"]);
///
/// let x = Tensor::randn([3, 8], f32);
/// let y = linear.forward(&x)?;
/// y.sum(Kind::Float).f_backward()?;
/// assert!(linear.lora_adapter("mine").is_some_and(|adapter| adapter.b().grad().defined()));
/// # Ok(())
/// # }
/// ```
pub trait LoraLinear {
    /// Creates an adapter for this layer. The layer's name `layer` determines its rank, alpha and random values.
    /// It is inactive at first.
    ///
    /// Its tensors require gradients, are on the weight's device, and are fp32 (fp64 for fp64 weights) unless
    /// [`AddOptions::autocast_adapter_dtype`] is off.
    ///
    /// # Errors
    /// [`Error::Common`] for an invalid configuration, [`Error::BadName`] for a name that is in use or empty or
    /// contains a dot, [`Error::Merged`], [`Error::OtherAdapter`].
    fn add_adapter(
        &mut self,
        layer: &str,
        name: &str,
        config: &Arc<LoraConfig>,
        options: &AddOptions,
    ) -> Result<()>;

    /// Adds an adapter with existing tensors. It is inactive at first.
    ///
    /// # Errors
    /// [`Error::Common`] if its shape is not that of the weight, and as [`LoraLinear::add_adapter`].
    fn insert_adapter(&mut self, name: &str, adapter: LoraAdapter) -> Result<()>;

    /// Returns the adapter `name`.
    fn lora_adapter(&self, name: &str) -> Option<&LoraAdapter>;

    /// Returns all adapters with their names, in the order in which they were added.
    fn lora_adapters(&self) -> Vec<(&str, &LoraAdapter)>;

    /// Returns the names of the active adapters.
    fn active_adapters(&self) -> Vec<&str>;

    /// Activates those of `names` that this layer has, and no others. It does not change which tensors require
    /// gradients; [`set_adapter`](crate::set_adapter) does.
    fn set_active_adapters(&mut self, names: &[&str]);

    /// Removes the adapter `name`; returns `true` if there was one.
    ///
    /// # Errors
    /// [`Error::Merged`] if it is merged into the weight.
    fn delete_adapter(&mut self, name: &str) -> Result<bool>;

    /// Multiplies the adapter's own scale by `factor`: 0 switches the adapter off, 1 restores its original scale.
    ///
    /// # Errors
    /// [`Error::UnknownAdapter`].
    fn set_adapter_scale(&mut self, name: &str, factor: f64) -> Result<()>;

    /// Returns the names of the adapters that are merged into the weight.
    fn merged_adapters(&self) -> Vec<&str>;

    /// Merges these adapters into the layer's weight and bias, in this order. Adapters that the layer does not
    /// have or that are already merged are skipped. Returns `None` if there was nothing to merge. `layer` is
    /// the layer's name in the report.
    ///
    /// # Errors
    /// [`Error::NotFinite`] with [`MergeOptions::safe`], [`Error::Common`] for an adapter with a bias on a
    /// layer without one. The layer is then unchanged.
    fn merge_adapters(
        &mut self,
        layer: &str,
        names: &[&str],
        options: &MergeOptions,
    ) -> Result<Option<MergedLayer>>;

    /// Unmerges all merged adapters from the weight.
    ///
    /// # Errors
    /// An error of libtorch if memory runs out.
    fn unmerge_adapters(&mut self) -> Result<()>;
}

impl LoraLinear for Linear {
    fn add_adapter(
        &mut self,
        layer: &str,
        name: &str,
        config: &Arc<LoraConfig>,
        options: &AddOptions,
    ) -> Result<()> {
        let (weight, _, own) = split_or_insert(self)?;
        own.check_new(name)?;
        let adapter = init::adapter(weight, layer, config, options)?;
        if adapter.changes_base() {
            own.forget_row_norms();
        }
        own.adapters.push((name.to_owned(), adapter.place(weight)?));
        Ok(())
    }

    fn insert_adapter(&mut self, name: &str, adapter: LoraAdapter) -> Result<()> {
        let (weight, _, own) = split_or_insert(self)?;
        own.check_new(name)?;
        let (found, expected) = ([adapter.b.size()[0], adapter.a.size()[1]], weight.size());
        if found != expected {
            let expected = format!("{expected:?} (outputs, inputs), as the weight is");
            let tensor = format!("B·A of adapter {name}");
            return Err(overdrive_core::Error::shape(tensor, found, expected).into());
        }
        own.adapters.push((name.to_owned(), adapter));
        Ok(())
    }

    fn lora_adapter(&self, name: &str) -> Option<&LoraAdapter> {
        adapters_of(self)?.get(name)
    }

    fn lora_adapters(&self) -> Vec<(&str, &LoraAdapter)> {
        let own = adapters_of(self).map(|own| own.adapters.as_slice());
        let own = own.unwrap_or_default().iter();
        own.map(|(name, adapter)| (name.as_str(), adapter))
            .collect()
    }

    fn active_adapters(&self) -> Vec<&str> {
        adapters_of(self).map_or(Vec::new(), |own| own.active())
    }

    fn set_active_adapters(&mut self, names: &[&str]) {
        if let Some(own) = adapters_mut(self) {
            own.set_active(names);
        }
    }

    fn delete_adapter(&mut self, name: &str) -> Result<bool> {
        adapters_mut(self).map_or(Ok(false), |own| own.delete(name))
    }

    fn set_adapter_scale(&mut self, name: &str, factor: f64) -> Result<()> {
        let adapters = adapters_mut(self).map(|own| own.adapters.as_mut_slice());
        let adapters = adapters.unwrap_or_default();
        let Some(index) = adapters.iter().position(|(own, _)| own == name) else {
            return Err(Error::UnknownAdapter {
                name: name.to_owned(),
                available: adapters.iter().map(|(own, _)| own.clone()).collect(),
            });
        };
        let adapter = &mut adapters[index].1;
        adapter.scale = factor * adapter.config.scale_of(adapter.rank(), adapter.alpha);
        Ok(())
    }

    fn merged_adapters(&self) -> Vec<&str> {
        adapters_of(self).map_or(Vec::new(), |own| own.merged())
    }

    fn merge_adapters(
        &mut self,
        layer: &str,
        names: &[&str],
        options: &MergeOptions,
    ) -> Result<Option<MergedLayer>> {
        match self.split_mut() {
            (weight, bias, Some(own)) => {
                crate::merge::merge(own, weight, bias, layer, names, options)
            }
            _ => Ok(None),
        }
    }

    fn unmerge_adapters(&mut self) -> Result<()> {
        crate::merge::unmerge(self, usize::MAX)
    }
}
