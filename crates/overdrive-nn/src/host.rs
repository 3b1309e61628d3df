use std::any::Any;
use std::fmt;

use tch::Tensor;

use crate::{Linear, Result};

/// A model that gives adapters, quantization and exporters access to its layers.
///
/// Names are those of the checkpoint, such as `model.layers.0.self_attn.q_proj`: patterns are matched against
/// them, and files are written with them. Only [`visit_linears`](AdapterHost::visit_linears) must be
/// implemented; the other methods give access to more of the model.
///
/// ```
/// use overdrive_nn::{AdapterHost, Linear, Result};
/// use tch::{Device, Kind, Tensor};
///
/// struct Mlp {
///     up: Linear,
///     down: Linear,
/// }
///
/// impl AdapterHost for Mlp {
///     fn visit_linears(
///         &mut self,
///         visit: &mut dyn FnMut(&str, &mut Linear) -> Result<()>,
///     ) -> Result<()> {
///         visit("mlp.up", &mut self.up)?;
///         visit("mlp.down", &mut self.down)
///     }
/// }
///
/// # fn main() -> Result<()> {
/// let linear = |o: i64, i: i64| Linear::dense(Tensor::ones([o, i], (Kind::Float, Device::Cpu)), None);
/// let mut mlp = Mlp { up: linear(32, 8)?, down: linear(8, 32)? };
/// let mut elements = 0;
/// mlp.visit_linears(&mut |_, linear| {
///     elements += linear.parameters();
///     Ok(())
/// })?;
/// assert_eq!(elements, 2 * 8 * 32);
/// # Ok(())
/// # }
/// ```
pub trait AdapterHost {
    /// Calls `visit` with each linear layer and its full name (as in the checkpoint, without `.weight`),
    /// in the order of the model; stops at the first error.
    ///
    /// # Errors
    /// The first error of `visit`; [`Error::InUse`](crate::Error::InUse) if the layers cannot be changed
    /// now.
    fn visit_linears(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Linear) -> Result<()>,
    ) -> Result<()>;

    /// Calls `visit` with each parameter outside the linear layers (embeddings, norms) and its full name, such
    /// as `model.embed_tokens.weight`. `visit` may replace it by another tensor of the same shape, which the
    /// model uses from then on: LoRA's `modules_to_save` does so.
    ///
    /// The default visits none: `modules_to_save` and parameter counts then cover linear layers only.
    ///
    /// # Errors
    /// As [`visit_linears`](AdapterHost::visit_linears).
    fn visit_parameters(
        &mut self,
        visit: &mut dyn FnMut(&str, &mut Tensor) -> Result<()>,
    ) -> Result<()> {
        let _ = visit;
        Ok(())
    }

    /// Returns the state that adapters keep for the model as a whole. The default returns none: adapters then
    /// cannot replace parameters outside the linear layers.
    fn adapter_state(&mut self) -> Option<&mut AdapterState> {
        None
    }

    /// Returns `true` if PEFT with transformers 5 gives the layer `name` no adapter by `target_modules`: it is a parameter
    /// there, or its name stands for a parameter of the experts. `all-linear` leaves it out. The default is `false`.
    fn is_unknown_to_peft(&self, name: &str) -> bool {
        let _ = name;
        false
    }

    /// Returns the name that the layer or parameter `name` has in the model as transformers loads it from the same files, for
    /// what Python reads over that model: the text model of a multimodal one is a part of it. The default is `name`.
    fn name_in_original(&self, name: &str) -> String {
        name.to_owned()
    }

    /// Returns the name of the output layer, which `all-linear` leaves out. The default is `lm_head`.
    fn head(&self) -> Option<&str> {
        Some("lm_head")
    }
}

/// State that adapter crates keep for a whole model, beside the [`Adapter`](crate::Adapter) of each layer.
///
/// A model owns one and returns it from [`AdapterHost::adapter_state`]; its contents are opaque to the model.
///
/// ```
/// use overdrive_nn::AdapterState;
///
/// let mut state = AdapterState::default();
/// state.get_or_default::<Vec<String>>().push("model.norm.weight".to_owned());
/// assert_eq!(state.get_or_default::<Vec<String>>().len(), 1);
/// ```
#[derive(Default)]
pub struct AdapterState(Vec<Box<dyn Any + Send>>);

impl AdapterState {
    /// Returns the value of type `T`, which the first call creates.
    pub fn get_or_default<T: Any + Send + Default>(&mut self) -> &mut T {
        // One value for each type. A program has one or two, so a linear search is as fast as a map.
        let index = match self.0.iter().position(|value| value.is::<T>()) {
            Some(index) => index,
            None => {
                self.0.push(Box::new(T::default()));
                self.0.len() - 1
            }
        };
        let value = self.0[index].downcast_mut();
        value.expect("`index` is that of a value of type `T`")
    }
}

impl fmt::Debug for AdapterState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdapterState").finish_non_exhaustive()
    }
}
