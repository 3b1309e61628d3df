//! The GEMM of a coded weight, and the choice of its kernel.

use std::ops::Range;

use overdrive_kernels::InstructionSet;

use super::byte_gemm::{ByteGemm, ManyRegisters};
use super::byte_gemv::ByteGemv;
use super::byte_panels::BytePanels;
use super::byte_rows::{ByteLayout, ByteRows};
use super::coded_weight::CodedWeight;
use super::dequantize::float_gemm;
use super::word_gemm::WordGemm;
use super::word_rows::{Layout, WordRows};
use crate::kernel::joint_gemm::{Gemm, Results};

/// The largest number of rows of activations in bytes that a GEMV multiplies.
const MAX_ROWS: usize = 3;

/// The quantized activations of some weights: once for the weights that take the same words or bytes.
#[derive(Debug)]
pub(crate) struct QuantizedInputs<'a> {
    words: Vec<(Layout<'a>, WordRows)>,
    /// The bytes of a few rows.
    bytes: Vec<(ByteLayout, ByteRows)>,
    /// The bytes of more rows.
    panels: Vec<(ByteLayout, BytePanels)>,
}

impl<'a> QuantizedInputs<'a> {
    /// Quantizes `x (rows, inputs)` for `weights` of as many inputs.
    pub(crate) fn new<'w>(
        set: InstructionSet,
        x: &[f32],
        weights: impl IntoIterator<Item = &'w CodedWeight<'a>>,
    ) -> Self
    where
        'a: 'w,
    {
        let mut inputs = QuantizedInputs {
            words: Vec::new(),
            bytes: Vec::new(),
            panels: Vec::new(),
        };
        for weight in weights {
            let rows = x.len().checked_div(weight.inputs).unwrap_or(0);
            if let Some((form, layout)) = byte_form(set, weight, rows) {
                match form {
                    ByteForm::Rows if find(&inputs.bytes, &layout).is_none() => {
                        let rows = ByteRows::new(set, x, &layout);
                        inputs.bytes.push((layout, rows));
                    }
                    ByteForm::Panels if find(&inputs.panels, &layout).is_none() => {
                        let panels = BytePanels::new(set, x, &layout);
                        inputs.panels.push((layout, panels));
                    }
                    _ => {}
                }
            } else if let Some(layout) = Layout::of(weight)
                && find(&inputs.words, &layout).is_none()
            {
                let rows = WordRows::new(set, x, &layout);
                inputs.words.push((layout, rows));
            }
        }
        inputs
    }

    /// Returns the form of `rows` rows of activations for `weight`.
    fn of(&self, set: InstructionSet, weight: &CodedWeight<'a>, rows: usize) -> Input<'_> {
        let bytes = match byte_form(set, weight, rows) {
            Some((ByteForm::Rows, layout)) => find(&self.bytes, &layout).map(Input::Bytes),
            Some((ByteForm::Panels, layout)) => find(&self.panels, &layout).map(Input::Panels),
            None => None,
        };
        if let Some(bytes) = bytes {
            return bytes;
        }
        let words = Layout::of(weight).and_then(|layout| find(&self.words, &layout));
        words.map_or(Input::Floats, Input::Words)
    }
}

/// The forms of activations in bytes.
#[derive(Debug, Clone, Copy)]
enum ByteForm {
    /// Of a few rows.
    Rows,
    /// Of more rows.
    Panels,
}

/// Returns the form and the layout of `rows` rows of activations in bytes for a weight; `None` if it takes no bytes. The
/// form changes how fast a row is computed, not its bits.
fn byte_form(
    set: InstructionSet,
    weight: &CodedWeight<'_>,
    rows: usize,
) -> Option<(ByteForm, ByteLayout)> {
    let layout = ByteLayout::of(weight)?;
    // Two rows of codes of 4 bits take less time as panels there, of 8 bits up to 1.5 times as much.
    let panels = || rows > 1 && layout.coding.per_byte() == 2 && set.run(ManyRegisters);
    let form = match rows <= MAX_ROWS && !panels() {
        true => ByteForm::Rows,
        false => ByteForm::Panels,
    };
    Some((form, layout))
}

fn find<'a, L: PartialEq, R>(known: &'a [(L, R)], layout: &L) -> Option<&'a R> {
    let found = known.iter().find(|(known, _)| known == layout);
    found.map(|(_, rows)| rows)
}

/// The form in which activations are multiplied.
#[derive(Debug, Clone, Copy)]
enum Input<'a> {
    /// The bytes of a few rows.
    Bytes(&'a ByteRows),
    /// The bytes of more rows.
    Panels(&'a BytePanels),
    Words(&'a WordRows),
    /// Floats, for weights whose blocks do not fit their rows.
    Floats,
}

/// The GEMM of a coded weight in integers. Both activations and weights are bytes; where the layout of the weight does
/// not allow it, activations are words of 13 to 16 bits, and weights exact except for code books that are not multiples
/// of one number (NF4: words of 14 bits). The packed weight is read once for all rows of activations.
#[derive(Debug)]
pub(crate) struct CodedGemm<'a> {
    weight: &'a CodedWeight<'a>,
    /// The activations, `(rows, inputs)`.
    x: &'a [f32],
    input: Input<'a>,
    set: InstructionSet,
}

impl<'a> CodedGemm<'a> {
    /// Returns the GEMM of `x` with `weight`; `inputs` were made of `x` for this weight, among others.
    pub(crate) fn new(
        set: InstructionSet,
        x: &'a [f32],
        inputs: &'a QuantizedInputs<'_>,
        weight: &'a CodedWeight<'a>,
    ) -> Self {
        let rows = x.len().checked_div(weight.inputs).unwrap_or(0);
        CodedGemm {
            weight,
            x,
            input: inputs.of(set, weight, rows),
            set,
        }
    }
}

impl Gemm for CodedGemm<'_> {
    fn outputs(&self) -> usize {
        self.weight.outputs
    }

    fn row_bytes(&self) -> usize {
        self.weight.inputs.div_ceil(self.weight.coding.per_byte())
    }

    fn run(&self, outputs: Range<usize>, results: &mut dyn Results) {
        let (set, weight) = (self.set, self.weight);
        match self.input {
            Input::Floats => float_gemm(set, self.x, weight, outputs, results),
            Input::Bytes(x) => {
                let gemv = ByteGemv {
                    x,
                    weight,
                    outputs,
                    results,
                };
                gemv.run(set);
            }
            Input::Panels(x) => {
                let gemm = ByteGemm {
                    x,
                    weight,
                    outputs,
                    results,
                };
                gemm.run(set);
            }
            Input::Words(x) => set.run(WordGemm {
                x,
                weight,
                outputs,
                results,
            }),
        }
    }
}
