//! Many rows of activations as bytes, packed in panels: one unit of inputs of all rows together.

use overdrive_kernels::threads::parallel_columns;
use overdrive_kernels::{BYTES, ColumnsMut, InstructionSet, Kernel, LANES, Simd};

use super::byte_rows::{ByteLayout, UNIT, quantize_group};
use super::coded_weight::MIN_GROUP_OF_BYTES;

/// The largest number of groups of a unit, each with a scale.
const MAX_GROUPS: usize = UNIT / MIN_GROUP_OF_BYTES;

/// The number of activations below which one thread quantizes all.
const PARALLEL: usize = 32 << 10;

/// The 128 inputs of a unit of one row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(32))]
pub(super) struct BytePanel {
    /// The inputs of the low and of the high halves of each lane of codes of 4 bits, alternating; of each lane of codes
    /// of 8 bits.
    pub(super) quads: [[i8; 4]; BYTES / 2],
    /// The scales times the unit of the weight.
    pub(super) scales: [f32; MAX_GROUPS],
    /// The start of the sums of products, which makes the code of zero add nothing.
    pub(super) starts: [i32; MAX_GROUPS],
    /// The sums of the quantized activations, which offsets are multiplied with.
    pub(super) sums: [f32; MAX_GROUPS],
}

/// A panel of zeros.
const NONE: BytePanel = BytePanel {
    quads: [[0; 4]; BYTES / 2],
    scales: [0.0; MAX_GROUPS],
    starts: [0; MAX_GROUPS],
    sums: [0.0; MAX_GROUPS],
};

/// Rows of activations, quantized symmetrically with a scale for each group of inputs.
#[derive(Debug)]
pub(super) struct BytePanels {
    /// `(units, rows)`
    all: Vec<BytePanel>,
    pub(super) rows: usize,
    pub(super) units: usize,
    /// The number of inputs that share a scale.
    pub(super) group: usize,
}

impl BytePanels {
    /// Quantizes `x (rows, inputs)`.
    pub(super) fn new(set: InstructionSet, x: &[f32], layout: &ByteLayout) -> Self {
        let inputs = layout.inputs();
        // The last unit of a row may have inputs that do not exist: zeros.
        let (rows, units) = (x.len() / inputs, inputs.div_ceil(UNIT));
        let mut all = vec![NONE; rows * units];
        parallel_columns(&mut all, rows, 1, x.len() >= PARALLEL, |mut out| {
            for row in out.range() {
                let x = &x[row * inputs..(row + 1) * inputs];
                let out = &mut out;
                set.run(Quantize {
                    x,
                    layout,
                    row,
                    out,
                });
            }
        });
        BytePanels {
            all,
            rows,
            units,
            group: layout.group,
        }
    }

    /// Returns one unit of all rows.
    #[inline(always)]
    pub(super) fn of_unit(&self, unit: usize) -> &[BytePanel] {
        &self.all[unit * self.rows..(unit + 1) * self.rows]
    }
}

/// The quantization of a row.
struct Quantize<'a, 'b> {
    x: &'a [f32],
    layout: &'a ByteLayout,
    row: usize,
    out: &'a mut ColumnsMut<'b, BytePanel>,
}

impl Kernel for Quantize<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.layout.group {
            16 => self.units::<S, 16>(s),
            32 => self.units::<S, 32>(s),
            64 => self.units::<S, 64>(s),
            _ => self.units::<S, UNIT>(s),
        }
    }
}

impl Quantize<'_, '_> {
    // Plain loops, which the compiler vectorizes for each set, but for the sums.
    #[inline(always)]
    fn units<S: Simd, const G: usize>(self, s: S) {
        let coding = &self.layout.coding;
        let excess = coding.excess::<S>();
        // Both halves of each byte are 1, so that products are the activations.
        let [ones, _] =
            s.unpack_nibbles::<false>(s.load_packed(&[0x11; BYTES]), s.byte_table(&[0; 16]));
        let whole = coding.per_byte() == 1;
        let turn = if coding.high_first { 32 } else { 0 };
        let (units, rest) = self.x.as_chunks::<UNIT>();
        let mut last = [0.0; UNIT];
        last[..rest.len()].copy_from_slice(rest);
        let last = (!rest.is_empty()).then_some(&last);
        for (at, x) in units.iter().chain(last).enumerate() {
            let mut panel = NONE;
            let mut bytes = [0; UNIT];
            let (groups, _) = x.as_chunks::<G>();
            let (out, _) = bytes.as_chunks_mut::<G>();
            // Hidden from the compiler: it would make each vector of several groups, by gathers.
            let count = std::hint::black_box(groups.len());
            let of_groups = groups.iter().zip(out).zip(&mut panel.scales);
            for ((x, out), scale) in of_groups.take(count) {
                *scale = quantize_group(x, out);
            }
            let (parts, _) = bytes.as_chunks::<BYTES>();
            let mut quads = [0; UNIT / 4];
            let (sums, _) = quads.as_chunks_mut::<LANES>();
            for (part, sums) in parts.iter().zip(sums) {
                s.store_sums(s.dot_bytes(s.zero_sums(), ones, s.load_bytes(part)), sums);
            }
            for (g, quads) in quads.chunks_exact(G / 4).enumerate().take(count) {
                let sum: i32 = quads.iter().sum();
                panel.starts[g] = -excess * sum;
                // Only integers have offsets, and their unit is 1.
                #[allow(clippy::cast_precision_loss, reason = "at most 2^14")]
                {
                    panel.sums[g] = sum as f32 * panel.scales[g];
                }
                panel.scales[g] *= coding.unit;
            }
            let (eights, _) = bytes.as_chunks::<8>();
            let (pairs, _) = panel.quads.as_chunks_mut::<2>();
            for (pair, eight) in pairs.iter_mut().zip(eights) {
                let eight = u64::from_le_bytes(eight.map(i8::cast_unsigned));
                let both = if whole {
                    eight
                } else {
                    halves(eight).rotate_left(turn)
                };
                let [a, b, c, d, e, f, g, h] = both.to_le_bytes().map(u8::cast_signed);
                *pair = [[a, b, c, d], [e, f, g, h]];
            }
            self.out.set(at, self.row, panel);
        }
    }
}

/// Returns the bytes 0, 2, 4 and 6, then the others, by shifts and masks, which the compiler vectorizes.
#[inline(always)]
fn halves(bytes: u64) -> u64 {
    let [even, odd] = [bytes, bytes >> 8].map(
        #[inline(always)]
        |bytes| {
            let bytes = bytes & 0x00ff_00ff_00ff_00ff;
            let bytes = (bytes | bytes >> 8) & 0x0000_ffff_0000_ffff;
            (bytes | bytes >> 16) & 0xffff_ffff
        },
    );
    even | odd << 32
}
