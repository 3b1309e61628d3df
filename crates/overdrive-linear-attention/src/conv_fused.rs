//! The short causal convolution by the kernel for CPUs.

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_kernels::tensors::{Fresh, Strided, elements, elements_mut, has_kernel};
use overdrive_kernels::{Element, InstructionSet, with_element};
use tch::{Kind, Tensor};

use crate::kernel::{Conv, ConvGradients, Rows, Sequence, conv_backward, conv_forward};
use crate::{ConvActivation, Result};

/// Returns the dtype in which the kernel takes the inputs, if it takes them.
pub(crate) fn kernel_kind(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Option<Kind> {
    let double = [Some(x), Some(weight), bias]
        .into_iter()
        .flatten()
        .any(|tensor| tensor.kind() == Kind::Double);
    (!double && has_kernel(x)).then_some(x.kind())
}

/// The weights in f32, and the options.
pub(crate) struct Filter {
    weight: Tensor,
    bias: Option<Tensor>,
    activation: ConvActivation,
}

impl Filter {
    pub(crate) fn new(
        weight: &Tensor,
        bias: Option<&Tensor>,
        activation: ConvActivation,
    ) -> Result<Filter> {
        Ok(Filter {
            weight: weight.f_to_kind(Kind::Float)?.f_contiguous()?,
            bias: bias
                .map(|bias| bias.f_to_kind(Kind::Float)?.f_contiguous())
                .transpose()?,
            activation,
        })
    }
}

/// Returns the inputs and options of the kernel for `x` (B, T, C) as rows.
fn conv<'a, T: Element>(
    x: &'a Strided,
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
    activation: ConvActivation,
    sequences: &'a [Sequence],
) -> Result<Conv<'a, T>> {
    let width = weight.size()[1];
    Ok(Conv {
        x: Rows::of(x)?,
        weight: elements(weight)?,
        bias: bias.map(elements).transpose()?,
        sequences,
        width: usize::try_from(width).unwrap_or(1),
        silu: activation == ConvActivation::Silu,
        set: InstructionSet::best(),
    })
}

/// Returns `x` (B, T, C) as rows (B, T, 1, C).
fn rows(x: &Tensor) -> Result<Strided> {
    Ok(Strided::rows(&x.f_unsqueeze(2)?)?)
}

/// Returns `y` in the shape of `x` (1, N, C), and updates a pool of states in place.
pub(crate) fn update(
    x: &Tensor,
    filter: &Filter,
    sequences: &[Sequence],
    states: &mut Tensor,
) -> Result<Tensor> {
    let input = rows(x)?;
    let bias = filter.bias.as_ref();
    with_element!(x.kind(), T => {
        let mut y = Fresh::<T>::new(&x.size())?;
        let conv = conv::<T>(&input, &filter.weight, bias, filter.activation, sequences)?;
        conv_forward(&conv, y.elements_mut()?, elements_mut(states)?);
        Ok(y.into_tensor())
    })
}

/// Returns `y` in the shape of `x` (B, T, C), and the last states (sequences with a slot, C, K - 1), from the first ones or from
/// zeros.
pub(crate) fn apply_filter(
    x: &Tensor,
    filter: &Filter,
    state: Option<&Tensor>,
    sequences: Vec<Sequence>,
) -> Result<(Tensor, Tensor)> {
    let mut all = vec![x, &filter.weight];
    all.extend(filter.bias.as_ref());
    all.extend(state);
    let function = CausalConv1d {
        sequences,
        activation: filter.activation,
        bias: filter.bias.is_some(),
        state: state.is_some(),
    };
    let mut results = apply(function, &all)?;
    let state = results.remove(1);
    Ok((results.remove(0), state))
}

/// The autograd function: x, weight, perhaps a bias and perhaps a state; y and the last states.
struct CausalConv1d {
    sequences: Vec<Sequence>,
    activation: ConvActivation,
    bias: bool,
    state: bool,
}

impl CausalConv1d {
    /// Returns the bias and the state.
    fn optional<'a>(&self, rest: &[&'a Tensor]) -> (Option<&'a Tensor>, Option<&'a Tensor>) {
        let bias = rest.first().copied().filter(|_| self.bias);
        let state = rest.get(usize::from(self.bias)).copied();
        (bias, state.filter(|_| self.state))
    }

    fn state_shape(&self, weight: &Tensor) -> [i64; 3] {
        let with_slot = self.sequences.iter().filter(|s| s.slot.is_some()).count();
        [with_slot as i64, weight.size()[0], weight.size()[1] - 1]
    }
}

impl Function for CausalConv1d {
    const NAME: &'static str = "causal_conv1d";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let &[x, weight, ref rest @ ..] = inputs else {
            unreachable!("the callers pass two tensors or more")
        };
        let (bias, state) = self.optional(rest);
        let input = rows(x)?;
        let results = with_element!(x.kind(), T => {
            let mut states = Fresh::<T>::copy_or_zeros(state, &self.state_shape(weight))?;
            let mut y = Fresh::<T>::new(&x.size())?;
            let conv = conv::<T>(&input, weight, bias, self.activation, &self.sequences)?;
            conv_forward(&conv, y.elements_mut()?, states.elements_mut()?);
            vec![y.into_tensor(), states.into_tensor()]
        });
        context.save_for_backward(inputs);
        context.set_materialize_grads(false);
        Ok(results)
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let [x, weight, rest @ ..] = context.saved() else {
            unreachable!("forward saves two tensors or more")
        };
        let rest: Vec<&Tensor> = rest.iter().collect();
        let (bias, state) = self.optional(&rest);
        let input = rows(x)?;
        let dy = gradients[0]
            .as_ref()
            .map(Tensor::f_contiguous)
            .transpose()?;
        let mut of_weight = Fresh::<f32>::new(&weight.size())?;
        let mut of_bias = Fresh::<f32>::new(&weight.size()[..1])?;
        let shape = self.state_shape(weight);
        let (of_x, of_states) = with_element!(x.kind(), T => {
            let first = Fresh::<T>::copy_or_zeros(state, &shape)?.into_tensor();
            let mut of_states = Fresh::<T>::copy_or_zeros(gradients[1].as_ref(), &shape)?;
            let mut of_x = Fresh::<T>::new(&x.size())?;
            let conv = conv::<T>(&input, weight, bias, self.activation, &self.sequences)?;
            let to = ConvGradients {
                x: of_x.elements_mut()?,
                weight: of_weight.elements_mut()?,
                bias: of_bias.elements_mut()?,
                states: of_states.elements_mut()?,
            };
            let dy = dy.as_ref().map(elements::<T>).transpose()?;
            conv_backward(&conv, dy, elements(&first)?, to);
            (of_x.into_tensor(), of_states.into_tensor())
        });
        let mut found = vec![Some(of_x), Some(of_weight.into_tensor())];
        if self.bias {
            found.push(Some(of_bias.into_tensor()));
        }
        if self.state {
            found.push(Some(of_states));
        }
        Ok(found)
    }
}
