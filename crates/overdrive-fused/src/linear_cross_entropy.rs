use std::num::NonZeroUsize;
use std::sync::{Mutex, PoisonError};

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_sys::autocast;
use tch::{Device, Kind, Tensor};

use crate::chunk::{ChunkDevice, Gradients, auto_rows, run_chunks};
use crate::error::{check_device, check_floating, wrong_shape};
use crate::loss_options::Labels;
use crate::{CrossEntropyOptions, CrossEntropyOutput, Error, Reduction, Result};

const NAME: &str = "linear_cross_entropy";

/// The options of [`linear_cross_entropy`]; the default computes the loss of PyTorch's `cross_entropy`.
#[derive(Debug, Clone, Copy, Default)]
pub struct LinearCrossEntropyOptions<'a> {
    /// The options of the loss. `reuse_logits` has no effect, since no logits outlive their chunk.
    pub loss: CrossEntropyOptions,
    /// The head's bias `(V,)` (default: none).
    pub bias: Option<&'a Tensor>,
    /// The number of rows whose logits are stored at a time. Default: on a CPU 32 MiB of logits, at least 256 rows; on
    /// a GPU a quarter of its free memory, from 256 to 4096 rows in steps of 256. The number affects the rounding of
    /// sums over chunks: set it for results that are reproducible bit for bit regardless of free memory.
    pub chunk_rows: Option<NonZeroUsize>,
    /// If `true`, keeps the gradients for further backward passes through the same graph, at the cost of a
    /// copy in each pass. If `false`, the first pass consumes them and a second is refused (default: false).
    pub retain_graph: bool,
}

/// Returns `cross_entropy(hidden · weightᵀ + bias, labels)` without storing all logits: the head and the
/// loss of a language model, whose logits are its largest tensor.
///
/// `hidden (…, C)`, `weight (V, C)`, `labels (…)` (i64). Rows are processed in chunks, one after another. If a
/// gradient is needed, the logits of a chunk are replaced by their gradient in place, and the gradients of
/// `hidden`, `weight` and bias are accumulated immediately, so that backward only scales them. Peak memory is
/// one chunk of logits and those gradients. Rows with the ignored label are left out of the matmuls if there
/// are many. (Method: Liger Kernel, Hsu et al. 2024, arXiv:2410.10989; Cut Cross-Entropy, Wijmans et al. 2024,
/// arXiv:2411.09009.)
///
/// Logits have the dtype that `hidden` and `weight` promote to, or under autocast the dtype of `linear`; the
/// loss and its softmax are f32 (f64 for f64). In low precision, the gradient of `weight` is summed over
/// chunks in f32. On devices other than the CPU, and for f64, chunks run libtorch's operators. On the CPU, the
/// softmax and its sums do not depend on the number of threads; the matmuls
/// may.
///
/// It can be differentiated once.
///
/// # Errors
/// [`Error::Label`] with the row and the value if a label on a CPU is not a class, [`Error::Common`] if the tensors do
/// not match or an option is out of range. Labels on a GPU are not checked, because the host would wait for the device:
/// there, a label that is not a class causes a device error, as in PyTorch, or with the kernels of overdrive-gpu a loss
/// of NaN.
///
/// ```
/// use overdrive_fused::{LinearCrossEntropyOptions, linear_cross_entropy};
/// use tch::{Device, Kind, Tensor};
///
/// let hidden = Tensor::randn([2, 5, 16], (Kind::Float, Device::Cpu));
/// let head = Tensor::randn([100, 16], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let labels = Tensor::randint(100, [2, 5], (Kind::Int64, Device::Cpu));
/// let output = linear_cross_entropy(&hidden, &head, &labels, &LinearCrossEntropyOptions::default())?;
/// output.loss.f_backward()?;
/// assert_eq!((output.tokens()?, head.grad().size()), (10, vec![100, 16]));
/// # Ok::<(), overdrive_fused::Error>(())
/// ```
pub fn linear_cross_entropy(
    hidden: &Tensor,
    weight: &Tensor,
    labels: &Tensor,
    options: &LinearCrossEntropyOptions<'_>,
) -> Result<CrossEntropyOutput> {
    options.loss.validate()?;
    check(hidden, weight, labels, options.bias)?;
    let (classes, width) = (weight.size()[0], weight.size()[1]);
    let size = hidden.size();
    let leading = &size[..size.len() - 1];
    let labels = Labels::new(NAME, labels, leading, classes, &options.loss)?;
    let mut loss_options = options.loss;
    // If the host does not know the number of tokens, the mean is computed from the sum below.
    let counted =
        (labels.known.is_none() && options.loss.reduction == Reduction::Mean).then(|| {
            loss_options.reduction = Reduction::Sum;
            labels.shallow_clone()
        });
    let count = labels.count.shallow_clone();

    let kind = logits_kind(hidden, weight)?;
    let hidden = hidden.f_reshape([-1, width])?.f_to_kind(kind)?;
    let weight = weight.f_to_kind(kind)?;
    let bias = options.bias.map(|bias| bias.f_to_kind(kind)).transpose()?;
    // No chunk needs more rows than are not ignored.
    let rows = labels.known.unwrap_or(hidden.size()[0]) as usize;
    let rows = NonZeroUsize::new(rows).unwrap_or(NonZeroUsize::MIN);
    let chunk_rows = options
        .chunk_rows
        .unwrap_or_else(|| auto_rows(classes as usize, kind, ChunkDevice::of(hidden.device())))
        .min(rows);

    let function = LinearCrossEntropy {
        options: loss_options,
        retain: options.retain_graph,
        labels,
        chunk_rows: chunk_rows.get() as i64,
        inputs: 2 + usize::from(bias.is_some()),
        gradients: Mutex::new(None),
    };
    let mut inputs = vec![&hidden, &weight];
    inputs.extend(&bias);
    let loss = apply(function, &inputs)?.remove(0);
    let loss = match counted {
        Some(labels) => labels.mean_of(&loss)?,
        None => loss,
    };
    Ok(CrossEntropyOutput { loss, count })
}

fn check(hidden: &Tensor, weight: &Tensor, labels: &Tensor, bias: Option<&Tensor>) -> Result<()> {
    let mut named = vec![("hidden", hidden), ("weight", weight)];
    named.extend(bias.map(|bias| ("bias", bias)));
    for &(name, tensor) in &named {
        check_floating(NAME, name, tensor)?;
    }
    named.push(("labels", labels));
    for (name, tensor) in named {
        let hidden = ("hidden", hidden.device());
        check_device(NAME, (name, tensor.device()), hidden)?;
    }
    let shape = |name, found, expected| Err(wrong_shape(NAME, name, found, expected));
    let size = weight.size();
    if size.len() != 2 || size[0] == 0 {
        let expected = "(V, C), one row for each class".to_owned();
        return shape("weight", weight, expected);
    }
    if hidden.size().last() != Some(&size[1]) {
        let expected = format!("(…, {}) for a weight of shape {size:?}", size[1]);
        return shape("hidden", hidden, expected);
    }
    match bias {
        Some(bias) if bias.size() != [size[0]] => {
            let expected = format!("[{}], one element for each row of weight", size[0]);
            shape("bias", bias, expected)
        }
        _ => Ok(()),
    }
}

/// Returns the dtype of the logits: that of `linear` with these operands, including under autocast.
fn logits_kind(hidden: &Tensor, weight: &Tensor) -> Result<Kind> {
    let plain = crate::tensors::promoted(hidden.kind(), weight.kind());
    // Autocast does not cast f64.
    if plain == Kind::Double {
        return Ok(plain);
    }
    // Autocast cannot be on for device types without it.
    let state = match hidden.device() {
        Device::Cpu | Device::Cuda(_) => autocast::state(hidden.device())?,
        _ => return Ok(plain),
    };
    Ok(if state.enabled { state.dtype } else { plain })
}

struct LinearCrossEntropy {
    options: CrossEntropyOptions,
    retain: bool,
    labels: Labels,
    chunk_rows: i64,
    /// The number of inputs: two, or three with a bias.
    inputs: usize,
    /// The gradients of the loss, by input, until backward takes them.
    gradients: Mutex<Option<Gradients>>,
}

impl Function for LinearCrossEntropy {
    const NAME: &'static str = NAME;

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let wanted = [0, 1, 2].map(|index| context.needs_input_grad(index));
        let (loss, gradients) =
            run_chunks(inputs, &self.labels, &self.options, self.chunk_rows, wanted)?;
        // Not saved tensors, since backward takes them and scales them in place.
        self.gradients = Mutex::new(Some(gradients));
        Ok(vec![loss])
    }

    fn backward(
        &self,
        _: &BackwardContext,
        upstream: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let mut held = self
            .gradients
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let gradients = if self.retain {
            held.as_ref().map(Gradients::copy).transpose()?
        } else {
            held.take()
        };
        let Some(gradients) = gradients else {
            return Err(Box::new(Error::BackwardAgain {
                function: NAME,
                option: "retain_graph to true",
            }));
        };
        let Some(upstream) = &upstream[0] else {
            unreachable!("absent gradients are made zeros")
        };
        let mut scaled = gradients.scaled(upstream)?;
        // Without a bias, the engine expects two gradients.
        scaled.truncate(self.inputs);
        Ok(scaled)
    }
}
