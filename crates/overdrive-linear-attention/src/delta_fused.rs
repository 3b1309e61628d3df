//! The gated delta rule by the kernel for CPUs.

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_kernels::tensors::{Fresh, Strided, elements, elements_mut, has_element};
use overdrive_kernels::{Element, InstructionSet, with_element};
use tch::{Device, Kind, Tensor};

use crate::delta_rule::Sizes;
use crate::kernel::{
    InputGradients, Problem, ResultGradients, Rows, Sequence, backward, block_columns, chunks_of,
    forward,
};
use crate::sequences::size;
use crate::{DeltaRuleInputs, Result};

/// The sequences of a call, and the scale of its queries.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) sizes: Sizes,
    pub(crate) scale: f64,
    pub(crate) qk_l2norm: bool,
}

impl Plan {
    fn chunks(&self) -> usize {
        self.sequences.iter().map(|s| chunks_of(s.tokens)).sum()
    }
}

/// Returns the dtype in which the kernel takes queries, keys and values, if it takes them.
pub(crate) fn kernel_kind(inputs: &DeltaRuleInputs<'_>) -> Option<Kind> {
    if inputs.state_kind() != Kind::Float {
        return None;
    }
    let kinds = [inputs.query, inputs.key, inputs.value].map(Tensor::kind);
    let kind = match kinds.iter().all(|kind| *kind == kinds[0]) {
        true => kinds[0],
        false => Kind::Float,
    };
    (inputs.value.device() == Device::Cpu && has_element(kind)).then_some(kind)
}

/// The inputs in the dtypes of the kernel.
pub(crate) struct Converted([Tensor; 5]);

impl Converted {
    pub(crate) fn new(inputs: &DeltaRuleInputs<'_>, kind: Kind) -> Result<Converted> {
        Ok(Converted([
            inputs.query.f_to_kind(kind)?,
            inputs.key.f_to_kind(kind)?,
            inputs.value.f_to_kind(kind)?,
            inputs.decay.f_to_kind(Kind::Float)?,
            inputs.beta.f_to_kind(Kind::Float)?,
        ]))
    }

    /// Adds the dimension of the batch to packed sequences.
    pub(crate) fn unsqueezed(self) -> Result<Converted> {
        let [query, key, value, decay, beta] = self.0.map(|x| x.f_unsqueeze(0));
        Ok(Converted([query?, key?, value?, decay?, beta?]))
    }
}

/// The strides and elements of the inputs (B, T, heads, …).
struct Views {
    rows: [Strided; 5],
    kind: Kind,
    key_heads: usize,
}

impl Views {
    fn new(inputs: [&Tensor; 5]) -> Result<Views> {
        let [query, key, value, decay, beta] = inputs;
        Ok(Views {
            rows: [
                Strided::rows(query)?,
                Strided::rows(key)?,
                Strided::rows(value)?,
                Strided::rows(&decay.f_unsqueeze(-1)?)?,
                Strided::rows(&beta.f_unsqueeze(-1)?)?,
            ],
            kind: query.kind(),
            key_heads: size(key.size()[2]),
        })
    }

    fn problem<'a, T: Element>(&'a self, plan: &'a Plan) -> Result<Problem<'a, T>> {
        let [query, key, value, decay, beta] = &self.rows;
        Ok(Problem {
            query: Rows::of(query)?,
            key: Rows::of(key)?,
            value: Rows::of(value)?,
            decay: Rows::of(decay)?,
            beta: Rows::of(beta)?,
            sequences: &plan.sequences,
            key_heads: self.key_heads,
            heads: size(plan.sizes.heads),
            key_dim: size(plan.sizes.key_dim),
            value_dim: size(plan.sizes.value_dim),
            scale: plan.scale as f32,
            qk_l2norm: plan.qk_l2norm,
            set: InstructionSet::best(),
        })
    }
}

/// Advances the states of a pool in place, and returns the output in the shape of the values.
pub(crate) fn update(inputs: &Converted, plan: &Plan, states: &mut Tensor) -> Result<Tensor> {
    let views = Views::new(inputs.0.each_ref())?;
    with_element!(views.kind, T => {
        let mut output = Fresh::<T>::new(&inputs.0[2].size())?;
        let states = elements_mut(states)?;
        forward(&views.problem::<T>(plan)?, output.elements_mut()?, states, None);
        Ok(output.into_tensor())
    })
}

/// Returns the output in the shape of the values, and the last states of a batch.
pub(crate) fn batch(
    inputs: &Converted,
    state: Option<&Tensor>,
    plan: Plan,
) -> Result<(Tensor, Tensor)> {
    let mut all: Vec<&Tensor> = inputs.0.iter().collect();
    all.extend(state);
    let function = DeltaRule {
        plan,
        states: true,
        initial_state: state.is_some(),
    };
    let mut results = apply(function, &all)?;
    let state = results.remove(1);
    Ok((results.remove(0), state))
}

/// Returns the output of sequences without states.
pub(crate) fn varlen(inputs: &Converted, plan: Plan) -> Result<Tensor> {
    let all: Vec<&Tensor> = inputs.0.iter().collect();
    let function = DeltaRule {
        plan,
        states: false,
        initial_state: false,
    };
    Ok(apply(function, &all)?.remove(0))
}

/// The autograd function: five inputs and perhaps a state, the output and perhaps the last states.
struct DeltaRule {
    plan: Plan,
    states: bool,
    /// If `true`, the sixth input is the first states.
    initial_state: bool,
}

impl DeltaRule {
    fn state_shape(&self) -> [i64; 4] {
        let sizes = self.plan.sizes;
        let rows = match self.states {
            true => self.plan.sequences.len() as i64,
            false => 0,
        };
        [rows, sizes.heads, sizes.key_dim, sizes.value_dim]
    }
}

impl Function for DeltaRule {
    const NAME: &'static str = "gated_delta_rule";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let &[query, key, value, decay, beta, ref state @ ..] = inputs else {
            unreachable!("the callers pass five tensors or more")
        };
        let views = Views::new([query, key, value, decay, beta])?;
        let mut states = Fresh::<f32>::copy_or_zeros(state.first().copied(), &self.state_shape())?;
        let (output, saved) = with_element!(views.kind, T => {
            let problem = views.problem::<T>(&self.plan)?;
            let mut output = Fresh::<T>::new(&value.size())?;
            let mut saved = None;
            if context.needs_any_grad() {
                let columns = block_columns(problem.set);
                let slab = problem.blocks(columns) * columns * problem.key_dim;
                let slabs = self.plan.chunks() * problem.heads;
                saved = Some(Fresh::<f32>::new(&[slabs as i64, slab as i64])?);
            }
            let to = saved.as_mut().map(Fresh::elements_mut).transpose()?;
            forward(&problem, output.elements_mut()?, states.elements_mut()?, to);
            (output.into_tensor(), saved.map(Fresh::into_tensor))
        });
        if let Some(saved) = saved {
            context.save_for_backward(&[query, key, value, decay, beta, &saved]);
        }
        context.set_materialize_grads(false);
        let mut results = vec![output];
        if self.states {
            results.push(states.into_tensor());
        }
        Ok(results)
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let [query, key, value, decay, beta, saved] = context.saved() else {
            unreachable!("forward saves six tensors")
        };
        let views = Views::new([query, key, value, decay, beta])?;
        let of_state = gradients.get(1).and_then(Option::as_ref);
        let mut states = Fresh::<f32>::copy_or_zeros(of_state, &self.state_shape())?;
        let of_output = gradients[0]
            .as_ref()
            .map(Tensor::f_contiguous)
            .transpose()?;
        let mut found = with_element!(views.kind, T => {
            let mut of_query = Fresh::<T>::new(&query.size())?;
            let mut of_key = Fresh::<T>::new(&key.size())?;
            let mut of_value = Fresh::<T>::new(&value.size())?;
            let mut of_decay = Fresh::<f32>::new(&decay.size())?;
            let mut of_beta = Fresh::<f32>::new(&beta.size())?;
            let results = ResultGradients {
                saved: elements(saved)?,
                output: of_output.as_ref().map(elements::<T>).transpose()?,
            };
            let to = InputGradients {
                query: of_query.elements_mut()?,
                key: of_key.elements_mut()?,
                value: of_value.elements_mut()?,
                decay: of_decay.elements_mut()?,
                beta: of_beta.elements_mut()?,
                states: states.elements_mut()?,
            };
            backward(&views.problem::<T>(&self.plan)?, &results, to);
            vec![
                Some(of_query.into_tensor()),
                Some(of_key.into_tensor()),
                Some(of_value.into_tensor()),
                Some(of_decay.into_tensor()),
                Some(of_beta.into_tensor()),
            ]
        });
        if self.initial_state {
            found.push(Some(states.into_tensor()));
        }
        Ok(found)
    }
}
