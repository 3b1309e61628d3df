use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_core::Error as Common;
use overdrive_kernels::Element;
use tch::{Kind, Tensor};

use crate::error::{check_floating, wrong_shape};
use crate::kernel::rotary::{Angles, HeadCopy, Heads, gather, rotate_in_place, scatter};
use crate::rows::check_len;
use crate::{Result, gpu};
use overdrive_kernels::tensors::{Fresh, elements, has_kernel};
use overdrive_kernels::with_element;

/// The channels of a head that form a pair and are rotated together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Convention {
    /// `(i, i + R/2)`: GPT-NeoX and Hugging Face's Llama models.
    #[default]
    HalfSplit,
    /// `(2i, 2i + 1)`: the paper, GPT-J, Meta's own Llama weights.
    Interleaved,
}

/// The order of the dimensions of queries and keys.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Layout {
    /// `(B, H, T, D)`, as `scaled_dot_product_attention` takes it.
    #[default]
    Bhtd,
    /// `(B, T, H, D)`, as a projection returns it.
    Bthd,
}

/// The options of a rotary position embedding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RotaryOptions {
    /// The channels that form a pair (default: half-split).
    pub convention: Convention,
    /// The order of the dimensions of `q`, `k` and `v` (default: `(B, H, T, D)`).
    pub layout: Layout,
}

/// The heads in a joint projection: `heads` query heads, `kv_heads` key heads and as many value heads, in this
/// order, each of `head_dim` channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QkvShape {
    /// The number of query heads, `H`.
    pub heads: i64,
    /// The number of key heads and of value heads, `Hkv`.
    pub kv_heads: i64,
    /// The number of channels of a head, `D`.
    pub head_dim: i64,
}

impl QkvShape {
    /// Returns the number of columns of the joint projection: `(H + 2·Hkv)·D`.
    pub fn width(&self) -> i64 {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    fn is_positive(&self) -> bool {
        self.heads > 0 && self.kv_heads > 0 && self.head_dim > 0
    }
}

/// Rotates the channel pairs of queries and keys by the angles of their positions (rotary position
/// embedding, Su et al. 2021, arXiv:2104.09864).
///
/// `q` and `k` have the same batch, length and head size and may have different numbers of heads.
/// `cos` and `sin` are `(T, R/2)`, or `(B, T, R/2)` if sequences have different positions; they get no
/// gradient. The first `R ≤ D` channels of each head are rotated; the others are copied. The arithmetic is in
/// f32 (f64 for f64), and each result is rounded to the dtype of its input. Results are stored as
/// `(B, T, H, D)` in memory, regardless of the layout. Only the tables are saved for backward.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the shapes do not fit each other or a dtype is not a floating-point one.
pub fn rotary(
    q: &Tensor,
    k: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    options: &RotaryOptions,
) -> Result<(Tensor, Tensor)> {
    if (q.size().first(), q.size().last()) != (k.size().first(), k.size().last()) {
        return Err(wrong_shape(
            "rotary",
            "k",
            k,
            format!(
                "a tensor with the batch and head size of q, whose shape is {:?}",
                q.size()
            ),
        ));
    }
    let rotate = |name, x| rotated(name, x, cos, sin, options);
    Ok((rotate("q", q)?, rotate("k", k)?))
}

/// Applies rotary position embeddings to the heads of one tensor, as [`rotary`] does to two: to the queries of a layer
/// without keys of its own.
///
/// # Errors
/// As [`rotary`].
pub fn rotary_single(
    q: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    options: &RotaryOptions,
) -> Result<Tensor> {
    rotated("q", q, cos, sin, options)
}

fn rotated(
    name: &'static str,
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    options: &RotaryOptions,
) -> Result<Tensor> {
    let x = by_length(x, name, options.layout)?;
    let size = x.size();
    let tables = Tables::new("rotary", cos, sin, &size, options.convention)?;
    let gpu = tables.gpu(&x, size[3])?;
    let rotated = if gpu.is_some() || (has_kernel(&x) && x.numel() > 0) {
        apply(Rotate { tables, gpu }, &[&x])?.remove(0)
    } else {
        tables.rotate(&x)?
    };
    convert_layout(rotated, options.layout)
}

/// Splits a joint projection into queries, keys and values and rotates queries and keys in one pass;
/// backward writes the gradient of the projection in one pass.
///
/// `qkv (B, T, (H + 2·Hkv)·D)`; `cos` and `sin` as for [`rotary`]. The results are `(B, H, T, D)` and twice
/// `(B, Hkv, T, D)`, or in the layout of the options. They are stored as `(B, T, H, D)` in memory, which
/// libtorch's attention kernels take without a copy.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the shapes do not fit each other or a dtype is not a floating-point one.
///
/// ```
/// use overdrive_fused::{QkvShape, RotaryOptions, split_qkv_rotary};
/// use tch::{Device, Kind, Tensor};
///
/// let shape = QkvShape { heads: 4, kv_heads: 2, head_dim: 8 };
/// let qkv = Tensor::randn([1, 5, shape.width()], (Kind::Float, Device::Cpu));
/// let angles = Tensor::rand([5, 4], (Kind::Float, Device::Cpu));
/// let options = RotaryOptions::default();
/// let (q, k, v) = split_qkv_rotary(&qkv, &angles.cos(), &angles.sin(), shape, &options)?;
/// assert_eq!((q.size(), k.size(), v.size()), (vec![1, 4, 5, 8], vec![1, 2, 5, 8], vec![1, 2, 5, 8]));
/// # Ok::<(), overdrive_fused::Error>(())
/// ```
pub fn split_qkv_rotary(
    qkv: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    shape: QkvShape,
    options: &RotaryOptions,
) -> Result<(Tensor, Tensor, Tensor)> {
    let size = qkv.size();
    let counts = [shape.heads, shape.kv_heads, shape.kv_heads];
    if !shape.is_positive() || size.len() != 3 || size[2] != shape.width() {
        return Err(wrong_shape(
            "split_qkv_rotary",
            "qkv",
            qkv,
            format!("(B, T, {}), the width of {shape:?}", shape.width()),
        ));
    }
    check_floating("split_qkv_rotary", "qkv", qkv)?;
    let one = [size[0], size[1], 1, shape.head_dim];
    let tables = Tables::new("split_qkv_rotary", cos, sin, &one, options.convention)?;
    let gpu = tables.gpu(qkv, shape.head_dim)?;
    let parts = if gpu.is_some() || (has_kernel(qkv) && qkv.numel() > 0) {
        let function = SplitRotate {
            tables,
            counts,
            gpu,
        };
        apply(function, &[qkv])?
    } else {
        let heads = qkv.f_unflatten(2, [-1, shape.head_dim])?;
        let mut parts = heads.f_split_with_sizes(counts.as_slice(), 2)?;
        for copy in &mut parts[..2] {
            *copy = tables.rotate(copy)?;
        }
        parts
    };
    let mut parts = parts.into_iter().map(|x| convert_layout(x, options.layout));
    match (parts.next(), parts.next(), parts.next()) {
        (Some(q), Some(k), Some(v)) => Ok((q?, k?, v?)),
        _ => unreachable!("three counts give three parts"),
    }
}

/// Returns a checked argument as `(B, T, H, D)`.
fn by_length(x: &Tensor, name: &'static str, layout: Layout) -> Result<Tensor> {
    if x.dim() != 4 {
        return Err(wrong_shape(
            "rotary",
            name,
            x,
            "four dimensions: batch, heads, length and head size",
        ));
    }
    check_floating("rotary", name, x)?;
    convert_layout(x.shallow_clone(), layout)
}

/// Converts `(B, T, H, D)` to the layout or back, by the same transpose.
fn convert_layout(x: Tensor, layout: Layout) -> Result<Tensor> {
    Ok(match layout {
        Layout::Bthd => x,
        Layout::Bhtd => x.f_transpose(1, 2)?,
    })
}

/// The tables, checked against the heads that they rotate.
#[derive(Debug)]
struct Tables {
    /// f32 (or f64, if given in f64) and contiguous.
    cos: Tensor,
    sin: Tensor,
    convention: Convention,
}

impl Tables {
    /// Checks the tables for heads of shape `(B, T, H, D)`.
    fn new(
        function: &'static str,
        cos: &Tensor,
        sin: &Tensor,
        heads: &[i64],
        convention: Convention,
    ) -> Result<Self> {
        let (batch, length, dim) = (heads[0], heads[1], heads[3]);
        for (name, table) in [("cos", cos), ("sin", sin)] {
            let size = table.size();
            let pairs = size.last().copied().unwrap_or(0);
            let leading = &size[..size.len().saturating_sub(1)];
            let fits = leading == [length] || leading == [batch, length] || leading == [1, length];
            if !fits || 2 * pairs > dim || cos.size() != size {
                return Err(wrong_shape(
                    function,
                    name,
                    table,
                    format!(
                        "({length}, R/2) or ({batch}, {length}, R/2) with R at most the head size {dim}, for both cos and sin"
                    ),
                ));
            }
            check_floating(function, name, table)?;
        }
        let table = |table: &Tensor| -> Result<Tensor> {
            let wide = match table.kind() {
                // Not narrowed yet, because libtorch's operators rotate f64 heads in f64.
                Kind::Double => table.shallow_clone(),
                _ => table.f_to_kind(Kind::Float)?,
            };
            // The tables are constants: their graph would otherwise live as long as each layer's.
            Ok(wide.f_detach()?.f_contiguous()?)
        };
        Ok(Self {
            cos: table(cos)?,
            sin: table(sin)?,
            convention,
        })
    }

    /// Returns the GPU kernels for heads of `dim` channels of `x`.
    fn gpu(&self, x: &Tensor, dim: i64) -> Result<Option<overdrive_gpu::Rotary>> {
        let pairs = self.cos.size().last().copied().unwrap_or(0);
        gpu::rotary(x, dim, pairs, self.convention == Convention::Interleaved)
    }

    /// Returns the tables in f32, as the kernel takes them.
    fn narrow(&self) -> Result<(Tensor, Tensor)> {
        Ok((
            self.cos.f_to_kind(Kind::Float)?,
            self.sin.f_to_kind(Kind::Float)?,
        ))
    }

    fn angles<'a>(
        &self,
        (cos, sin): &'a (Tensor, Tensor),
        length: usize,
        reverse: bool,
    ) -> Result<Angles<'a>> {
        let size = cos.size();
        let pairs = size.last().copied().unwrap_or(0) as usize;
        // A batch dimension of 1 is one table for all sequences, as in transformers.
        let own = size.len() == 3 && size[0] > 1;
        Ok(Angles {
            cos: elements(cos)?,
            sin: elements(sin)?,
            pairs,
            sequence: if own { length * pairs } else { 0 },
            convention: self.convention,
            reverse,
        })
    }

    /// Rotates `x (B, T, H, D)` with libtorch's differentiable operators.
    fn rotate(&self, x: &Tensor) -> Result<Tensor> {
        let wide = match x.kind() {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        let table = |table: &Tensor| table.f_to_kind(wide)?.f_unsqueeze(-2);
        let (cos, sin) = (table(&self.cos)?, table(&self.sin)?);
        let pairs = cos.size().last().copied().unwrap_or(0);
        let dim = x.size()[3];
        let rotated = x.f_narrow(3, 0, 2 * pairs)?.f_to_kind(wide)?;
        let rest = x.f_narrow(3, 2 * pairs, dim - 2 * pairs)?;
        let (split, axis) = match self.convention {
            Convention::HalfSplit => ([2, pairs], 3),
            Convention::Interleaved => ([pairs, 2], 4),
        };
        let split = rotated.f_unflatten(3, split)?;
        let (a, b) = (split.f_select(axis, 0)?, split.f_select(axis, 1)?);
        let first = a.f_mul(&cos)?.f_sub(&b.f_mul(&sin)?)?;
        let second = b.f_mul(&cos)?.f_add(&a.f_mul(&sin)?)?;
        // Concatenates along the axis that was split, so that each channel returns to its column.
        let joined = Tensor::f_stack(&[first, second], axis)?.f_flatten(3, 4)?;
        Ok(Tensor::f_cat(&[joined.f_to_kind(x.kind())?, rest], 3)?)
    }
}

/// Returns `x (B, T, H, D)` and its strides, without a copy if it is dense in either layout.
fn dense(x: &Tensor) -> Result<(Tensor, [usize; 3])> {
    let size: Vec<usize> = x.size().iter().map(|&n| n as usize).collect();
    let (length, heads, dim) = (size[1], size[2], size[3]);
    let exchanged = x.f_transpose(1, 2)?;
    // Dense as (B, H, T, D): read through its strides instead of copied.
    if !x.is_contiguous() && exchanged.is_contiguous() {
        return Ok((exchanged, [heads * length * dim, dim, length * dim]));
    }
    Ok((x.f_contiguous()?, [length * heads * dim, heads * dim, dim]))
}

fn heads<'a, T: Element>((x, strides): &'a (Tensor, [usize; 3])) -> Result<Heads<'a, T>> {
    Ok(Heads {
        data: elements(x)?,
        sequence: strides[0],
        token: strides[1],
        head: strides[2],
    })
}

/// Returns the tables in the form that the GPU kernels take.
fn on_gpu((cos, sin): &(Tensor, Tensor)) -> overdrive_gpu::RotaryTables<'_> {
    overdrive_gpu::RotaryTables { cos, sin }
}

struct Rotate {
    tables: Tables,
    gpu: Option<overdrive_gpu::Rotary>,
}

impl Rotate {
    fn run(&self, x: &Tensor, reverse: bool) -> FunctionResult<Vec<Tensor>> {
        let tables = self.tables.narrow()?;
        if let Some(kernels) = &self.gpu {
            return Ok(vec![kernels.rotate(x, on_gpu(&tables), reverse)?]);
        }
        let size = x.size();
        let (length, count, dim) = (size[1] as usize, size[2] as usize, size[3] as usize);
        let x = dense(x)?;
        let angles = self.tables.angles(&tables, length, reverse)?;
        with_element!(x.0.kind(), T => {
            let mut rotated = Fresh::<T>::new(&size)?;
            let copy = HeadCopy {
                from: heads::<T>(&x)?,
                heads: count,
                offset: 0,
                angles: Some(angles),
            };
            gather(&[copy], length, dim, rotated.elements_mut()?, count * dim);
            Ok(vec![rotated.into_tensor()])
        })
    }
}

impl Function for Rotate {
    const NAME: &'static str = "rotary";

    fn forward(
        &mut self,
        _: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        self.run(inputs[0], false)
    }

    fn backward(
        &self,
        _: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        match &gradients[0] {
            None => Ok(vec![None]),
            Some(gradient) => Ok(self.run(gradient, true)?.into_iter().map(Some).collect()),
        }
    }
}

struct SplitRotate {
    tables: Tables,
    counts: [i64; 3],
    gpu: Option<overdrive_gpu::Rotary>,
}

/// Copies the heads of `rows`, one row for each of `[batch, length]` tokens, to three new tensors (B, T, H, D) and
/// rotates the first two.
fn split_rotated<T: Element>(
    rows: &[T],
    [batch, length]: [i64; 2],
    counts: [i64; 3],
    angles: Angles<'_>,
) -> Result<[Tensor; 3]> {
    let tokens = length as usize;
    let width = rows.len() / (batch * length) as usize;
    let dim = width / counts.iter().sum::<i64>() as usize;
    let mut from = 0;
    let parts = [0, 1, 2].map(|index: usize| {
        let heads = counts[index] as usize;
        let copy = HeadCopy {
            from: Heads {
                data: &rows[from..],
                sequence: tokens * width,
                token: width,
                head: dim,
            },
            heads,
            offset: 0,
            // Values have no position.
            angles: (index < 2).then_some(angles),
        };
        from += heads * dim;
        copy
    });
    let fresh = |count| Fresh::<T>::new(&[batch, length, count, dim as i64]);
    let [mut q, mut k, mut v] = [fresh(counts[0])?, fresh(counts[1])?, fresh(counts[2])?];
    let to = [q.elements_mut()?, k.elements_mut()?, v.elements_mut()?];
    scatter(parts, tokens, dim, to);
    Ok([q.into_tensor(), k.into_tensor(), v.into_tensor()])
}

/// The cosines and sines of the tokens of one forward pass, prepared once for all layers.
#[derive(Debug)]
pub struct RowAngles {
    tables: Tables,
    narrow: (Tensor, Tensor),
    size: [i64; 2],
    shape: QkvShape,
}

impl RowAngles {
    /// Prepares the tables of [`split_qkv_rotary`] for the joint projection `shape` of `[B, T]` tokens.
    ///
    /// # Errors
    /// As [`split_qkv_rotary`].
    pub fn new(cos: &Tensor, sin: &Tensor, size: [i64; 2], shape: QkvShape) -> Result<RowAngles> {
        if !shape.is_positive() {
            let expected = "positive numbers of heads and channels";
            return Err(Common::option("shape", format!("{shape:?}"), expected).into());
        }
        let heads = [size[0], size[1], 1, shape.head_dim];
        let tables = Tables::new("split_qkv_rotary", cos, sin, &heads, Convention::HalfSplit)?;
        Ok(RowAngles {
            narrow: tables.narrow()?,
            tables,
            size,
            shape,
        })
    }

    /// Returns the number of tokens, `[B, T]`.
    pub fn tokens(&self) -> [i64; 2] {
        self.size
    }

    /// Rotates the queries and keys of rows `(B · T, width)` in place, as [`split_qkv_rotary`] does.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for rows of another length.
    pub fn rotate(&self, rows: &mut [f32]) -> Result<()> {
        let ([batch, length], shape) = (self.size, self.shape);
        check_len("rows", rows, batch * length * shape.width())?;
        let angles = self.tables.angles(&self.narrow, length as usize, false)?;
        let heads = (shape.heads + shape.kv_heads) as usize;
        let dims = (heads, shape.head_dim as usize);
        rotate_in_place(rows, shape.width() as usize, length as usize, dims, angles);
        Ok(())
    }
}

impl Function for SplitRotate {
    const NAME: &'static str = "split_qkv_rotary";

    fn forward(
        &mut self,
        _: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let tables = self.tables.narrow()?;
        if let Some(kernels) = &self.gpu {
            let counts = [self.counts[0], self.counts[1]];
            return Ok(kernels.split(inputs[0], counts, on_gpu(&tables))?.into());
        }
        let qkv = inputs[0].f_contiguous()?;
        let size = qkv.size();
        let angles = self.tables.angles(&tables, size[1] as usize, false)?;
        with_element!(qkv.kind(), T => {
            let elements = elements::<T>(&qkv)?;
            Ok(split_rotated(elements, [size[0], size[1]], self.counts, angles)?.into())
        })
    }

    fn backward(
        &self,
        _: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let Some(first) = gradients.iter().flatten().next() else {
            return Ok(vec![None]);
        };
        let (size, kind) = (first.size(), first.kind());
        let (length, dim) = (size[1] as usize, size[3] as usize);
        let width = self.counts.iter().sum::<i64>() as usize * dim;
        let tables = self.tables.narrow()?;
        let gradients = gradients
            .iter()
            .zip(self.counts)
            .map(|(gradient, count)| match gradient {
                Some(gradient) => Ok(gradient.shallow_clone()),
                // An unused output still has its columns in the joint gradient.
                None => {
                    let zeros = [size[0], size[1], count, size[3]];
                    Ok(Tensor::f_zeros(zeros, (kind, first.device()))?)
                }
            })
            .collect::<Result<Vec<_>>>()?;
        if let (Some(kernels), [q, k, v]) = (&self.gpu, gradients.as_slice()) {
            let joint = kernels.split_backward([q, k, v], on_gpu(&tables))?;
            return Ok(vec![Some(joint)]);
        }
        let sources = gradients.iter().map(dense).collect::<Result<Vec<_>>>()?;
        // A rotation is orthogonal: its gradient is the inverse rotation, which needs only the tables.
        let angles = self.tables.angles(&tables, length, true)?;
        with_element!(kind, T => {
            let mut joint = Fresh::<T>::new(&[size[0], size[1], width as i64])?;
            let mut parts = Vec::new();
            let mut offset = 0;
            for (index, (source, count)) in sources.iter().zip(self.counts).enumerate() {
                parts.push(HeadCopy {
                    from: heads::<T>(source)?,
                    heads: count as usize,
                    offset,
                    angles: (index < 2).then_some(angles),
                });
                offset += count as usize * dim;
            }
            gather(&parts, length, dim, joint.elements_mut()?, width);
            Ok(vec![Some(joint.into_tensor())])
        })
    }
}
