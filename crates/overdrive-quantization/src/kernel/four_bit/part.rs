//! A coded map in a product with others.

use std::ops::Range;

use super::activations::{Layout, WordRows};
use super::along::{self, Along};
use super::any::any_part;
use super::byte_rows::{ByteLayout, ByteRows};
use super::byte_tiles::ByteTiles;
use super::byte_units::ByteUnits;
use super::map::CodedMap;
use super::nibbles::Nibbles;
use super::tiles::Tiles;
use super::words::run_on;
use crate::kernel::element::Element;
use crate::kernel::joint::Part;
use crate::kernel::simd::InstructionSet;
use crate::kernel::threads::Target;

/// Rows of activations as the words or bytes that some maps take: once for those that take the same.
#[derive(Debug)]
pub(crate) struct WordForms<'a> {
    words: Vec<(Layout<'a>, WordRows)>,
    /// For a few rows.
    bytes: Vec<(ByteLayout, ByteRows)>,
    /// For more.
    units: Vec<(ByteLayout, ByteUnits)>,
}

impl<'a> WordForms<'a> {
    /// Of `x (rows, inputs)`, for `maps` of as many inputs.
    pub(crate) fn new<'m>(
        set: InstructionSet,
        x: &[f32],
        maps: impl IntoIterator<Item = &'m CodedMap<'a>>,
    ) -> Self
    where
        'a: 'm,
    {
        let mut forms = WordForms {
            words: Vec::new(),
            bytes: Vec::new(),
            units: Vec::new(),
        };
        for map in maps {
            let few = x.len() <= along::MOST * map.inputs;
            if let Some(layout) = ByteLayout::of(map).filter(|_| few || map.bytes) {
                if few && self::is_new(&forms.bytes, &layout) {
                    let rows = ByteRows::new(set, x, &layout);
                    forms.bytes.push((layout, rows));
                } else if !few && self::is_new(&forms.units, &layout) {
                    let rows = ByteUnits::new(set, x, &layout);
                    forms.units.push((layout, rows));
                }
            } else if let Some(layout) = Layout::of(map)
                && forms.words.iter().all(|(known, _)| *known != layout)
            {
                let rows = WordRows::new(set, x, &layout);
                forms.words.push((layout, rows));
            }
        }
        forms
    }

    fn of(&self, map: &CodedMap<'a>) -> Form<'_> {
        if let Some(layout) = ByteLayout::of(map) {
            if let Some((_, rows)) = self.bytes.iter().find(|(known, _)| *known == layout) {
                return Form::Bytes(rows);
            }
            let units = self.units.iter().find(|(known, _)| *known == layout);
            // Another map's, if this one is to have words.
            if let Some((_, rows)) = units.filter(|_| map.bytes) {
                return Form::Units(rows);
            }
        }
        if let Some(layout) = Layout::of(map)
            && let Some((_, rows)) = self.words.iter().find(|(known, _)| *known == layout)
        {
            return Form::Words(rows);
        }
        Form::Floats
    }
}

fn is_new<R>(forms: &[(ByteLayout, R)], layout: &ByteLayout) -> bool {
    forms.iter().all(|(known, _)| known != layout)
}

/// What activations are multiplied as.
#[derive(Debug, Clone, Copy)]
enum Form<'a> {
    /// A few rows, with codes of 4 bits in whole vectors.
    Bytes(&'a ByteRows),
    /// More rows of the same.
    Units(&'a ByteUnits),
    Words(&'a WordRows),
    /// Where blocks fit rows so badly that only floats will do.
    Floats,
}

/// Where kernels put what they compute: they are compiled once, whatever the kind of the results.
pub(super) trait Results {
    /// Values of a row of activations, for the outputs from `output` on.
    fn put(&self, row: usize, output: usize, values: &[f32]);
}

/// The columns of a map.
struct Columns<'a, T> {
    bias: Option<&'a [T]>,
    /// The column of its first output.
    first: usize,
    target: &'a Target<'a, T>,
}

impl<T: Element> Results for Columns<'_, T> {
    fn put(&self, row: usize, output: usize, values: &[f32]) {
        for (index, value) in values.iter().enumerate() {
            let output = output + index;
            let bias = self.bias.map_or(0.0, |bias| bias[output].to_f32());
            self.target
                .set(row, self.first + output, T::from_f32(value + bias));
        }
    }
}

/// One map of a product in integers: activations in words of 13 to 16 bits, weights exactly but for code
/// books that are no multiples of one number (NF4: words of 14 bits); or both in bytes, for a few rows and
/// where that is asked for.
/// The packed weights are read once for all rows of activations.
#[derive(Debug)]
pub(crate) struct CodedPart<'a, T> {
    map: &'a CodedMap<'a>,
    /// `(rows, inputs)`
    x: &'a [f32],
    form: Form<'a>,
    /// One number an output.
    bias: Option<&'a [T]>,
    set: InstructionSet,
}

impl<'a, T: Element> CodedPart<'a, T> {
    /// `forms` were made of `x` for this map, among others.
    pub(crate) fn new(
        set: InstructionSet,
        x: &'a [f32],
        forms: &'a WordForms<'_>,
        map: &'a CodedMap<'a>,
        bias: Option<&'a [T]>,
    ) -> Self {
        CodedPart {
            map,
            x,
            form: forms.of(map),
            bias,
            set,
        }
    }
}

impl<T: Element> Part<T> for CodedPart<'_, T> {
    fn outputs(&self) -> usize {
        self.map.outputs
    }

    fn row_bytes(&self) -> usize {
        self.map.inputs.div_ceil(self.map.coding.per_byte())
    }

    fn run(&self, outputs: Range<usize>, first: usize, y: &Target<'_, T>) {
        let (map, bias) = (self.map, self.bias);
        let results = Columns {
            bias,
            first,
            target: y,
        };
        match self.form {
            Form::Floats => any_part(self.set, self.x, map, bias, outputs, first, y),
            Form::Bytes(x) => run_on(
                self.set,
                Nibbles {
                    x,
                    map,
                    outputs,
                    results: &results,
                },
            ),
            Form::Units(x) => run_on(
                self.set,
                ByteTiles {
                    x,
                    map,
                    outputs,
                    results: &results,
                },
            ),
            Form::Words(x) if x.rows <= along::MOST => run_on(
                self.set,
                Along {
                    x,
                    map,
                    outputs,
                    results: &results,
                },
            ),
            Form::Words(x) => run_on(
                self.set,
                Tiles {
                    x,
                    map,
                    outputs,
                    results: &results,
                },
            ),
        }
    }
}
