//! The faster matmul library for each class of shapes, measured once per processor.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use overdrive_build::Environment;
use overdrive_build::measured::{Figures, Processor};
use tch::{Device, Kind, Tensor};

use super::{GemmLibrary, default_library, multiply, one_dnn_available};
use crate::error::Result;
use crate::{build_info, threads};

/// The name of the stored figures.
const SUBJECT: &str = "matmul-libraries";
/// The other library must be faster by this factor, so that noise does not decide.
const MARGIN: f64 = 1.03;
/// Shapes with fewer rows do not occur in training, and their speed depends on the number of rows.
const MIN_ROWS: i64 = 256;
/// Layers with fewer inputs or outputs (adapters) are unlike any measured one.
const MIN_WIDTH: i64 = 128;
/// The sizes of the inputs and outputs of a layer that are measured, and the largest size that each stands for.
const WIDTHS: [(i64, i64); 3] = [(384, 512), (1024, 2048), (4096, i64::MAX)];
/// The approximate number of multiplications and additions of a measured matmul, which takes a few milliseconds.
const PRODUCT_FLOPS: i64 = 1 << 30;
const ROUNDS: usize = 5;
/// The two shortest times of a library must agree within this factor.
const SPREAD: f64 = 1.05;
/// The time after which no more classes are measured (on a slow or busy machine); the others keep the default.
const BUDGET: Duration = Duration::from_secs(3);

/// One of the three matmuls of a linear layer, which differ in the transposed factor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    /// `x · wᵀ`
    Forward,
    /// `dy · w`
    InputGradient,
    /// `dyᵀ · x`
    WeightGradient,
}

/// A class of shapes: a pass, and the indices in [`WIDTHS`] of the sizes of the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Class {
    pass: Pass,
    inputs: usize,
    outputs: usize,
}

impl Class {
    fn all() -> impl Iterator<Item = Self> {
        let passes = [Pass::Forward, Pass::InputGradient, Pass::WeightGradient];
        let classes = passes.into_iter().flat_map(|pass| {
            (0..9).map(move |pair| Self {
                pass,
                inputs: pair / 3,
                outputs: pair % 3,
            })
        });
        // In the largest layers both libraries reach the peak, and a product would take too long.
        classes.filter(|class| class.inputs + class.outputs < 4)
    }

    /// Returns the class of `(n, k) · (k, m)`; `None` for shapes that are not measured.
    fn of(n: i64, k: i64, m: i64, left_transposed: bool, right_transposed: bool) -> Option<Self> {
        let (pass, rows, inputs, outputs) = match (left_transposed, right_transposed) {
            (false, true) => (Pass::Forward, n, k, m),
            (false, false) => (Pass::InputGradient, n, m, k),
            (true, false) => (Pass::WeightGradient, k, m, n),
            (true, true) => return None,
        };
        let width = |size: i64| WIDTHS.iter().position(|(_, most)| size <= *most);
        let measured = rows >= MIN_ROWS && inputs >= MIN_WIDTH && outputs >= MIN_WIDTH;
        let class = Self {
            pass,
            inputs: width(inputs)?,
            outputs: width(outputs)?,
        };
        (measured && Self::all().any(|other| other == class)).then_some(class)
    }

    /// Returns the name of its figure: `forward 384 1024`.
    fn name(self) -> String {
        let pass = match self.pass {
            Pass::Forward => "forward",
            Pass::InputGradient => "input-gradient",
            Pass::WeightGradient => "weight-gradient",
        };
        format!(
            "{pass} {} {}",
            WIDTHS[self.inputs].0, WIDTHS[self.outputs].0
        )
    }
}

/// The faster library for each class of shapes.
///
/// A class is one of the three matmuls of a linear layer (forward, and the gradients of its input and of its
/// weight) with up to 512, up to 2048, or more inputs and outputs. Shapes outside the classes (fewer than 256
/// rows, fewer than 128 inputs or outputs) use the processor's default.
#[derive(Debug, Clone, PartialEq)]
pub struct LibraryTable {
    default: GemmLibrary,
    /// Classes for which the other library is faster.
    others: BTreeMap<Class, GemmLibrary>,
}

impl LibraryTable {
    /// Returns the table for a processor with this default library, from the measured ratios of libtorch's time
    /// to oneDNN's, under the names `forward 384 1024` (or `input-gradient`, `weight-gradient`; inputs; outputs).
    /// The default is replaced where the other library is faster by 3 %.
    pub fn new(default: GemmLibrary, ratios: &Figures) -> Self {
        let mut others = BTreeMap::new();
        for class in Class::all() {
            let name = class.name();
            let Some((_, ratio)) = ratios.iter().find(|(other, _)| *other == name) else {
                continue;
            };
            match default {
                GemmLibrary::OneDnn if *ratio * MARGIN < 1.0 => {
                    others.insert(class, GemmLibrary::Torch);
                }
                GemmLibrary::Torch if *ratio > MARGIN => {
                    others.insert(class, GemmLibrary::OneDnn);
                }
                _ => {}
            }
        }
        Self { default, others }
    }

    /// Returns the library for `(n, k) · (k, m)`, whose factors may be transposed views.
    pub fn library(
        &self,
        (n, k, m): (i64, i64, i64),
        left_transposed: bool,
        right_transposed: bool,
    ) -> GemmLibrary {
        Class::of(n, k, m, left_transposed, right_transposed)
            .and_then(|class| self.others.get(&class).copied())
            .unwrap_or(self.default)
    }

    /// Returns this processor's table: the stored one, else a new one, which takes about a second to measure.
    ///
    /// The table is read once per process. Where nothing can be stored, nothing is measured, and every shape uses the
    /// default: a resumed run would otherwise measure again and could get another table.
    pub(super) fn of_this_processor() -> &'static Self {
        static TABLE: OnceLock<LibraryTable> = OnceLock::new();
        TABLE.get_or_init(|| {
            let default = default_library();
            if !one_dnn_available() {
                return Self::new(default, &Figures::new());
            }
            let ratios = build_info::libtorch_version().ok().and_then(|libtorch| {
                let processor = Processor::detect(&libtorch, threads::intra_op());
                let measure = || measure().ok();
                processor.read_or_measure(&Environment::process(), SUBJECT, measure)
            });
            Self::new(default, &ratios.unwrap_or_default())
        })
    }
}

/// Measures the ratios for [`LibraryTable::new`].
fn measure() -> Result<Figures> {
    let threads = threads::intra_op();
    // A separate thread has no autocast, no dispatch mode and no gradient recording of the caller.
    std::thread::scope(|scope| {
        let measuring = scope.spawn(|| {
            threads::set_intra_op(threads)?;
            let began = Instant::now();
            let mut figures = Figures::new();
            for class in Class::all() {
                if began.elapsed() < BUDGET
                    && let Some(ratio) = ratio(class)?
                {
                    figures.push((class.name(), ratio));
                }
            }
            Ok(figures)
        });
        // A panic would be a bug of this function; without figures the default is used.
        measuring.join().unwrap_or(Ok(Figures::new()))
    })
}

/// Returns the ratio of libtorch's time to oneDNN's; `None` if the machine is too busy to tell.
fn ratio(class: Class) -> Result<Option<f64>> {
    let (inputs, outputs) = (WIDTHS[class.inputs].0, WIDTHS[class.outputs].0);
    let rows = (PRODUCT_FLOPS / (2 * inputs * outputs)).clamp(MIN_ROWS, 2048);
    // Constants, because a random number would change those of the caller. In memory of this function, because
    // libtorch's allocator counts: the first large matmul of a program may lie in a step whose peak is measured.
    let memory = |n: i64, m: i64| vec![0.37_f32; (n * m).unsigned_abs() as usize];
    let (mut x, mut w, mut dy) = (
        memory(rows, inputs),
        memory(outputs, inputs),
        memory(rows, outputs),
    );
    let matrix = |memory: &mut [f32], n, m| {
        let start = memory.as_mut_ptr().cast();
        // SAFETY: the slice has `n * m` elements of f32, and outlives the tensors, which are local.
        unsafe { Tensor::f_from_blob(start, &[n, m], &[m, 1], Kind::Float, Device::Cpu) }
    };
    let (x, w, dy) = (
        matrix(&mut x, rows, inputs)?,
        matrix(&mut w, outputs, inputs)?,
        matrix(&mut dy, rows, outputs)?,
    );
    let (out, left, right) = match class.pass {
        Pass::Forward => (dy, x, w.f_tr()?),
        Pass::InputGradient => (x, dy, w),
        Pass::WeightGradient => (w, dy.f_tr()?, x),
    };
    let timed = |library| -> Result<f64> {
        let began = Instant::now();
        multiply(library, &out, &left, &right, false)?;
        Ok(began.elapsed().as_secs_f64())
    };
    let (mut torch, mut one_dnn) = (Vec::new(), Vec::new());
    // The first round starts threads and compiles oneDNN's kernel. In turn, so that other work on the machine
    // slows both.
    for round in 0..=ROUNDS {
        let (of_torch, of_one_dnn) = (timed(GemmLibrary::Torch)?, timed(GemmLibrary::OneDnn)?);
        if round > 0 {
            torch.push(of_torch);
            one_dnn.push(of_one_dnn);
        }
    }
    let (torch, one_dnn) = (fastest(torch), fastest(one_dnn));
    Ok(torch.zip(one_dnn).map(|(torch, one_dnn)| torch / one_dnn))
}

/// Returns the shortest of the times, because other work only makes a product slower; `None` if the second
/// shortest does not confirm it.
fn fastest(mut seconds: Vec<f64>) -> Option<f64> {
    seconds.sort_by(f64::total_cmp);
    match seconds.as_slice() {
        [first, second, ..] if *second <= SPREAD * first && *first > 0.0 => Some(*first),
        _ => None,
    }
}
