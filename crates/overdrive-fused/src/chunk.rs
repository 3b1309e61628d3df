//! Chunks of rows through the output layer and the loss.

use std::num::NonZeroUsize;

use overdrive_sys::gemm::mm_into;
use overdrive_sys::raw::host_value;
use tch::{Device, Kind, Tensor};

use crate::cross_entropy::{scalar, sum};
use crate::kernel::cross_entropy::{loss, loss_and_gradient};
use crate::loss_options::Labels;
use crate::{CrossEntropyOptions, Result, composed, gpu};
use overdrive_kernels::tensors::{elements, elements_mut, has_kernel};
use overdrive_kernels::with_element;

/// The bytes of logits in a chunk.
//
// The matmuls of each chunk pack the weight again, and each chunk reads and writes the gradient of the weight,
// so small chunks are slow: 16 MiB took 6 % longer than 32 MiB, and 8 MiB 34 % (the benchmark `head_chunks`,
// 2048 rows of 384, 8192 classes).
const CHUNK_BYTES: usize = 32 << 20;

/// The minimum number of rows of a chunk. With large vocabularies, chunks of 128 rows took 10 % longer than of 256.
const MIN_CHUNK_ROWS: usize = 256;

/// The maximum number of rows of a chunk on a GPU. With this many rows, reading and writing the gradient of the weight
/// once for each chunk takes less than a twentieth of the time of the chunk's matmuls.
const MAX_GPU_CHUNK_ROWS: usize = 4096;

/// The fraction of a GPU's free memory that a chunk may use.
const GPU_MEMORY_PART: u64 = 4;

/// The properties of the device that the size of chunks depends on.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkDevice {
    /// A CPU, whose last-level cache should hold a chunk.
    Cpu,
    /// A GPU, which needs large matmuls.
    Gpu {
        /// The number of bytes available for new tensors.
        free_bytes: u64,
    },
}

impl ChunkDevice {
    pub(crate) fn of(device: Device) -> Self {
        match device {
            Device::Cuda(_) => Self::Gpu {
                // Unknown free memory counts as none, which gives the minimum number of rows.
                free_bytes: overdrive_sys::memory::free_bytes(device).unwrap_or(0),
            },
            _ => Self::Cpu,
        }
    }
}

/// The fraction of ignored rows above which the other rows are gathered: copying these is then cheaper than
/// the matmuls of the ignored rows.
const GATHER_FROM: f64 = 1.0 / 16.0;

/// Returns the number of rows of a chunk. On a GPU, a chunk and the memory of its loss take at most a quarter of the
/// free memory, with 256 to 4096 rows in steps of 256.
#[doc(hidden)]
pub fn auto_rows(classes: usize, kind: Kind, device: ChunkDevice) -> NonZeroUsize {
    let classes = classes.max(1);
    let element = kind.elt_size_in_bytes();
    let rows = match device {
        ChunkDevice::Cpu => (CHUNK_BYTES / classes.saturating_mul(element))
            .next_multiple_of(64)
            .max(MIN_CHUNK_ROWS),
        ChunkDevice::Gpu { free_bytes } => {
            let row = classes.saturating_mul(element + composed::BYTES_PER_LOGIT) as u64;
            let most = MAX_GPU_CHUNK_ROWS as u64;
            let rows = (free_bytes / GPU_MEMORY_PART / row).min(most) as usize;
            (rows / MIN_CHUNK_ROWS * MIN_CHUNK_ROWS).max(MIN_CHUNK_ROWS)
        }
    };
    NonZeroUsize::new(rows).unwrap_or(NonZeroUsize::MIN)
}

/// The gradients of hidden states, weight and bias, if needed.
#[derive(Debug)]
pub(crate) struct Gradients([Option<Tensor>; 3]);

impl Gradients {
    pub(crate) fn copy(&self) -> Result<Self> {
        let mut copies = [None, None, None];
        for (copy, gradient) in copies.iter_mut().zip(&self.0) {
            *copy = gradient.as_ref().map(crate::tensors::copy_of).transpose()?;
        }
        Ok(Self(copies))
    }

    /// Returns the gradients times the gradient of the loss.
    pub(crate) fn scaled(self, upstream: &Tensor) -> Result<Vec<Option<Tensor>>> {
        // `loss.backward()` starts from 1, in which case this skips a pass over gradients as large as the weight.
        // On a GPU, reading the value would wait for the device.
        let one = host_value(upstream) == Some(1.0);
        let mut scaled = Vec::from(self.0);
        if !one {
            for gradient in scaled.iter_mut().flatten() {
                let _same = gradient.f_mul_(upstream)?;
            }
        }
        Ok(scaled)
    }
}

/// Returns the loss of `[hidden (N, C), weight (V, C), bias (V,)?]`, and its gradients.
pub(crate) fn run_chunks(
    inputs: &[&Tensor],
    labels: &Labels,
    options: &CrossEntropyOptions,
    chunk_rows: i64,
    wanted: [bool; 3],
) -> Result<(Tensor, Gradients)> {
    let weight = inputs[1].f_contiguous()?;
    let all = inputs[0].f_contiguous()?;
    let rows = all.size()[0];
    let gathered = Gathered::new(&all, labels, options)?;
    let (hidden, labels_of) = match &gathered {
        Some(gathered) => (&gathered.hidden, &gathered.labels),
        None => (&all, &labels.flat),
    };
    // If the host does not know the number of tokens, the caller has requested the sum, whose scale is independent of
    // it.
    let tokens = labels.known.unwrap_or(rows);
    let scale = match tokens {
        // The mean over no rows is NaN; its gradient is zero, as in PyTorch.
        0 => 0.0,
        tokens => options.scale(tokens),
    };
    let mut chunks = Chunks {
        weight: &weight,
        transposed: weight.f_tr()?,
        bias: inputs.get(2).copied(),
        options,
        scale,
        d_hidden: wanted[0].then(|| hidden.f_empty_like()).transpose()?,
        d_weight: None,
        d_bias: None,
        wanted,
        sums: ProductSums::of(&weight, hidden.size()[0] > chunk_rows),
    };
    let total = hidden.size()[0];
    let width = chunk_rows.min(total).max(1);
    // One buffer for all chunks: freeing and allocating it each time would touch new pages.
    let buffer = Tensor::f_empty([width, weight.size()[0]], (weight.kind(), weight.device()))?;
    // Sums on a device are added at the end, so that no chunk waits for the device.
    let mut sums = Vec::new();
    for start in (0..total).step_by(width as usize) {
        let len = width.min(total - start);
        let mut logits = buffer.f_narrow(0, 0, len)?;
        let labels = labels_of.f_narrow(0, start, len)?;
        sums.push(chunks.run(
            &hidden.f_narrow(0, start, len)?,
            &labels,
            &mut logits,
            start,
        )?);
    }
    // Dropped before `finish` allocates, so that the peak does not include the logits.
    drop(buffer);
    let total = total_of(&sums, &weight)?;
    let loss = total.f_mul_scalar(options.scale(tokens))?;
    Ok((loss, chunks.finish(gathered, rows)?))
}

/// The rows that are not ignored, gathered if enough rows are ignored.
struct Gathered {
    index: Tensor,
    hidden: Tensor,
    labels: Tensor,
}

impl Gathered {
    fn new(all: &Tensor, labels: &Labels, options: &CrossEntropyOptions) -> Result<Option<Self>> {
        let rows = all.size()[0];
        // If the number of rows is unknown, it would have to be read from the device.
        let tokens = labels.known.unwrap_or(rows);
        let ignored = rows - tokens;
        if ignored <= 0 || (ignored as f64) < rows as f64 * GATHER_FROM {
            return Ok(None);
        }
        let index = counted_rows(&labels.flat, tokens, options.ignore_index)?;
        Ok(Some(Self {
            hidden: all.f_index_select(0, &index)?,
            labels: labels.flat.f_index_select(0, &index)?,
            index,
        }))
    }
}

/// Returns the indices of the `tokens` labels that are not ignored, in order, without reading from a device.
fn counted_rows(labels: &Tensor, tokens: i64, ignore_index: i64) -> Result<Tensor> {
    if labels.device() == Device::Cpu {
        let values: &[i64] = elements(labels)?;
        let rows = (0_i64..).zip(values);
        let rows = rows.filter(|(_, label)| **label != ignore_index);
        return Ok(Tensor::f_from_slice(
            &rows.map(|(row, _)| row).collect::<Vec<_>>(),
        )?);
    }
    counted_rows_on_device(labels, tokens, ignore_index)
}

fn counted_rows_on_device(labels: &Tensor, tokens: i64, ignore_index: i64) -> Result<Tensor> {
    // A stable sort instead of `nonzero`, since the host would wait for the size of its result.
    let ignored = labels.f_eq(ignore_index)?.f_to_kind(Kind::Uint8)?;
    let (_, order) = ignored.f_sort_stable(true, 0, false)?;
    Ok(order.f_narrow(0, 0, tokens)?)
}

struct Chunks<'a> {
    weight: &'a Tensor,
    transposed: Tensor,
    bias: Option<&'a Tensor>,
    options: &'a CrossEntropyOptions,
    scale: f64,
    d_hidden: Option<Tensor>,
    d_weight: Option<Tensor>,
    d_bias: Option<Tensor>,
    wanted: [bool; 3],
    sums: ProductSums,
}

impl Chunks<'_> {
    /// Returns the sum of the losses of the chunk whose rows begin at `start`.
    fn run(
        &mut self,
        hidden: &Tensor,
        labels: &Tensor,
        logits: &mut Tensor,
        start: i64,
    ) -> Result<ChunkLoss> {
        if let Some(bias) = self.bias {
            // `mm_into` with accumulation adds to the bias, which saves a pass over the logits.
            logits.f_copy_(bias)?;
        }
        mm_into(logits, hidden, &self.transposed, self.bias.is_some())?;
        let any = self.wanted.contains(&true);
        let sum = softmax(logits, labels, self.options, any.then_some(self.scale))?;
        // From here on the logits hold their gradient, with which the loss has overwritten them.
        if let Some(d_hidden) = &self.d_hidden {
            let rows = d_hidden.f_narrow(0, start, labels.size()[0])?;
            mm_into(&rows, logits, self.weight, false)?;
        }
        if self.wanted[1] {
            let sum = self.d_weight.take();
            self.d_weight = Some(self.sums.add(sum, &logits.f_tr()?, hidden)?);
        }
        if self.wanted[2] {
            let gradient = logits.f_sum_dim_intlist([0i64].as_slice(), false, wide(logits))?;
            self.d_bias = Some(match self.d_bias.take() {
                None => gradient,
                Some(sum) => sum.f_add(&gradient)?,
            });
        }
        Ok(sum)
    }

    fn finish(self, gathered: Option<Gathered>, rows: i64) -> Result<Gradients> {
        let kind = self.weight.kind();
        let d_hidden = match (self.d_hidden, gathered) {
            (Some(part), Some(gathered)) => {
                let size = [rows, self.weight.size()[1]];
                let mut all = Tensor::f_zeros(size, (kind, part.device()))?;
                let _same = all.f_index_copy_(0, &gathered.index, &part)?;
                Some(all)
            }
            (part, _) => part,
        };
        let or_zeros = |wanted: bool, gradient: Option<Tensor>, size: &[i64]| -> Result<_> {
            Ok(match gradient {
                Some(gradient) => Some(gradient.f_to_kind(kind)?),
                // All rows are ignored.
                None if wanted => Some(Tensor::f_zeros(size, (kind, self.weight.device()))?),
                None => None,
            })
        };
        let size = self.weight.size();
        Ok(Gradients([
            d_hidden,
            or_zeros(self.wanted[1], self.d_weight, &size)?,
            or_zeros(self.wanted[2], self.d_bias, &size[..1])?,
        ]))
    }
}

/// The sum of a chunk's losses.
#[derive(Debug)]
enum ChunkLoss {
    OnCpu(f64),
    /// A scalar on the device, without synchronization.
    OnDevice(Tensor),
}

fn total_of(sums: &[ChunkLoss], weight: &Tensor) -> Result<Tensor> {
    let (mut on_cpu, mut on_device) = (0.0, None::<Tensor>);
    for sum in sums {
        match sum {
            ChunkLoss::OnCpu(sum) => on_cpu += sum,
            ChunkLoss::OnDevice(sum) => {
                on_device = Some(match on_device {
                    None => sum.shallow_clone(),
                    Some(all) => all.f_add(sum)?,
                });
            }
        }
    }
    match on_device {
        Some(total) => Ok(total),
        None if has_kernel(weight) => scalar(on_cpu),
        None => Ok(Tensor::f_zeros([0i64; 0], (wide(weight), weight.device()))?),
    }
}

/// Returns the dtype of sums.
fn wide(tensor: &Tensor) -> Kind {
    match tensor.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}

/// Returns the sum of the losses of a chunk; with a scale, replaces the logits by the gradient of `scale ·` the sum.
fn softmax(
    logits: &mut Tensor,
    labels: &Tensor,
    options: &CrossEntropyOptions,
    scale: Option<f64>,
) -> Result<ChunkLoss> {
    if let Some(kernels) = gpu::cross_entropy(logits, options)? {
        let losses = match scale {
            None => kernels.losses(logits, labels)?.0,
            Some(scale) => kernels.losses_and_gradient(logits, labels, scale)?,
        };
        return Ok(ChunkLoss::OnDevice(losses.f_sum(Kind::Float)?));
    }
    if !has_kernel(logits) {
        return Ok(ChunkLoss::OnDevice(match scale {
            None => composed::loss(logits, labels, options)?,
            Some(scale) => composed::loss_and_gradient(logits, labels, options, scale)?,
        }));
    }
    let terms = options.terms();
    let mut losses = vec![0.0; labels.numel()];
    let labels = elements(labels)?;
    with_element!(logits.kind(), T => match scale {
        None => {
            // Needed only by a backward pass, which chunks do not have.
            let mut lse = vec![0.0; losses.len()];
            loss::<T>(terms, elements(logits)?, labels, &mut losses, &mut lse);
        }
        Some(scale) => {
            let logits = elements_mut(logits)?;
            loss_and_gradient::<T>(terms, logits, labels, &mut losses, scale as f32);
        }
    });
    Ok(ChunkLoss::OnCpu(sum(&losses)))
}

/// The sum of the matrix products of several chunks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ProductSums {
    /// In the dtype of the operands.
    Narrow,
    /// In f32, because a bf16 sum of many chunks would lose small terms; each product is rounded before it is added.
    Rounded,
    /// In f32 within the matmul (`mm.dtype`, `addmm.dtype`), which libtorch supports on CUDA.
    Wide,
}

impl ProductSums {
    fn of(operand: &Tensor, several: bool) -> Self {
        Self::on(operand.device(), operand.kind(), several)
    }

    fn on(device: Device, kind: Kind, several: bool) -> Self {
        match (kind, device) {
            (Kind::Half | Kind::BFloat16, Device::Cuda(_)) if several => Self::Wide,
            (Kind::Half | Kind::BFloat16, _) if several => Self::Rounded,
            _ => Self::Narrow,
        }
    }

    /// Returns `sum + a · b`.
    fn add(self, sum: Option<Tensor>, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let product = || -> Result<Tensor> {
            let product = Tensor::f_empty([a.size()[0], b.size()[1]], (a.kind(), a.device()))?;
            mm_into(&product, a, b, false)?;
            Ok(product)
        };
        Ok(match (self, sum) {
            (Self::Narrow, None) => product()?,
            (Self::Narrow, Some(sum)) => {
                mm_into(&sum, a, b, true)?;
                sum
            }
            (Self::Rounded, None) => product()?.f_to_kind(Kind::Float)?,
            (Self::Rounded, Some(mut sum)) => {
                let _same = sum.f_add_(&product()?)?;
                sum
            }
            (Self::Wide, None) => a.f_mm_dtype(b, Kind::Float)?,
            (Self::Wide, Some(sum)) => {
                // In place: the operator overwrites the sum.
                let _same = sum.f_addmm_dtype_out(&sum, a, b, Kind::Float)?;
                sum
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rows_that_count_are_found_alike_on_the_host_and_on_a_device() {
        let labels = Tensor::from_slice(&[-100_i64, 3, -100, 0, 7, -100]);
        let expected = Tensor::from_slice(&[1_i64, 3, 4]);
        assert_eq!(
            counted_rows(&labels, 3, -100).expect("on the host"),
            expected
        );
        let found = counted_rows_on_device(&labels, 3, -100).expect("by a sort");
        assert_eq!(found, expected);
    }

    #[test]
    fn chunks_on_a_gpu_take_a_quarter_of_its_free_memory_at_most() {
        let rows = |classes, gib: f64| {
            let free_bytes = (gib * f64::from(1 << 30)) as u64;
            auto_rows(classes, Kind::BFloat16, ChunkDevice::Gpu { free_bytes }).get()
        };
        // Llama 3's vocabulary: 1.28 MB a row.
        assert_eq!(rows(128_256, 100.0), 4096);
        assert_eq!(rows(128_256, 10.0), 2048);
        assert_eq!(rows(128_256, 2.0), 256);
        assert_eq!(rows(128_256, 0.0), 256);
        assert_eq!(rows(32_000, 2.0), 1536);
        assert_eq!(rows(1, 100.0), 4096);
        let on_cpu = auto_rows(128_256, Kind::BFloat16, ChunkDevice::Cpu);
        assert_eq!(on_cpu.get(), 256);
        assert_eq!(ChunkDevice::of(Device::Cpu), ChunkDevice::Cpu);
    }

    #[test]
    fn sums_of_chunks_are_in_f32_and_by_one_operator_on_cuda() {
        let cuda = Device::Cuda(0);
        for (device, kind, several, expected) in [
            (cuda, Kind::BFloat16, true, ProductSums::Wide),
            (cuda, Kind::Half, true, ProductSums::Wide),
            (cuda, Kind::Float, true, ProductSums::Narrow),
            (cuda, Kind::BFloat16, false, ProductSums::Narrow),
            (Device::Cpu, Kind::BFloat16, true, ProductSums::Rounded),
            (Device::Mps, Kind::Half, true, ProductSums::Rounded),
            (Device::Cpu, Kind::Double, true, ProductSums::Narrow),
        ] {
            assert_eq!(ProductSums::on(device, kind, several), expected);
        }
        // The first chunk is not rounded to bf16 and then widened: all of them are summed alike.
        let tiny = Tensor::full([1, 1], 1.0 / 512.0, (Kind::BFloat16, Device::Cpu));
        let one = tiny.ones_like();
        let mut sum = None;
        for _ in 0..512 {
            sum = Some(ProductSums::Rounded.add(sum, &tiny, &one).expect("1x1"));
        }
        assert_eq!(sum.expect("512 chunks").double_value(&[]), 1.0);
    }

    #[test]
    fn the_operators_of_wide_sums_have_the_arguments_that_they_are_called_with() {
        // Their kernels are on CUDA only: on a CPU the call ends at the dispatcher, after its arguments were taken.
        let a = Tensor::ones([2, 3], (Kind::BFloat16, Device::Cpu));
        let b = Tensor::ones([3, 4], (Kind::BFloat16, Device::Cpu));
        let sum = Tensor::zeros([2, 4], (Kind::Float, Device::Cpu));
        for (sum, operator) in [
            (None, "aten::mm.dtype"),
            (Some(sum), "aten::addmm.dtype_out"),
        ] {
            let error = ProductSums::Wide
                .add(sum, &a, &b)
                .expect_err("no CPU kernel");
            let text = error.to_string();
            assert!(text.contains(operator) && text.contains("CPU"), "{text}");
        }
    }
}
