//! Rotary position embedding: heads in any layout are rotated into rows of tokens.

use overdrive_kernels::threads::{block_rows, run_jobs};
use overdrive_kernels::{Element, Kernel, Simd, dispatch, each_vector, load, store};

use crate::Convention;

/// Heads in memory: head `h` of token `t` of sequence `b` begins at `b · sequence + t · token + h · head`, and its
/// channels are contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Heads<'a, T> {
    pub(crate) data: &'a [T],
    pub(crate) sequence: usize,
    pub(crate) token: usize,
    pub(crate) head: usize,
}

/// The cosines and sines of the tokens, `pairs` for each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Angles<'a> {
    pub(crate) cos: &'a [f32],
    pub(crate) sin: &'a [f32],
    pub(crate) pairs: usize,
    /// The distance between the tables of two sequences: 0 if all share one.
    pub(crate) sequence: usize,
    pub(crate) convention: Convention,
    /// If `true`, the rotation is inverted, as for a gradient.
    pub(crate) reverse: bool,
}

impl<'a> Angles<'a> {
    /// Returns the cosines and sines of a token.
    #[inline(always)]
    fn of(&self, sequence: usize, token: usize) -> (&'a [f32], &'a [f32]) {
        let at = sequence * self.sequence + token * self.pairs;
        (
            &self.cos[at..at + self.pairs],
            &self.sin[at..at + self.pairs],
        )
    }
}

/// Heads to copy, rotated or not, into some columns of each token's row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadCopy<'a, T> {
    pub(crate) from: Heads<'a, T>,
    pub(crate) heads: usize,
    /// The first column in the row.
    pub(crate) offset: usize,
    pub(crate) angles: Option<Angles<'a>>,
}

/// Fills `rows`, which have `width` elements for each token of each sequence, with the heads of `copies`.
///
/// `length` is the number of tokens of a sequence, `dim` the number of channels of a head.
pub(crate) fn gather<T: Element>(
    copies: &[HeadCopy<'_, T>],
    length: usize,
    dim: usize,
    rows: &mut [T],
    width: usize,
) {
    // Twice, since each element is read and written.
    let tokens = block_rows(rows.len() / width, width * size_of::<T>() * 2);
    let blocks = rows.chunks_mut(tokens * width).enumerate();
    run_jobs(blocks, |(block, rows)| {
        for &copy in copies {
            dispatch(Gather {
                copy,
                length,
                dim,
                first: block * tokens,
                rows: &mut *rows,
                width,
            });
        }
    });
}

/// Fills three buffers of token rows, each with the heads of one of `copies`, from column 0 on.
pub(crate) fn scatter<T: Element>(
    copies: [HeadCopy<'_, T>; 3],
    length: usize,
    dim: usize,
    [q, k, v]: [&mut [T]; 3],
) {
    let widths = copies.map(|copy| copy.heads * dim);
    let total = widths.iter().sum::<usize>();
    let tokens = block_rows(q.len() / widths[0], total * size_of::<T>() * 2);
    let blocks = q
        .chunks_mut(tokens * widths[0])
        .zip(k.chunks_mut(tokens * widths[1]))
        .zip(v.chunks_mut(tokens * widths[2]));
    run_jobs(blocks.enumerate(), |(block, ((q, k), v))| {
        for ((copy, width), rows) in copies.into_iter().zip(widths).zip([q, k, v]) {
            dispatch(Gather {
                copy,
                length,
                dim,
                first: block * tokens,
                rows,
                width,
            });
        }
    });
}

/// Rotates the first `heads` heads of each token in place, pairing the halves of their channels; for few tokens, which
/// are rows of `width` elements.
pub(crate) fn rotate_in_place(
    rows: &mut [f32],
    width: usize,
    length: usize,
    (heads, dim): (usize, usize),
    angles: Angles<'_>,
) {
    dispatch(InPlace {
        rows,
        width,
        length,
        heads,
        dim,
        angles,
    });
}

struct InPlace<'a> {
    rows: &'a mut [f32],
    width: usize,
    length: usize,
    heads: usize,
    dim: usize,
    angles: Angles<'a>,
}

impl Kernel for InPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let pairs = self.angles.pairs;
        for (index, row) in self.rows.chunks_exact_mut(self.width).enumerate() {
            let (cos, sin) = self.angles.of(index / self.length, index % self.length);
            for head in row.chunks_exact_mut(self.dim).take(self.heads) {
                let (x, upper) = head[..2 * pairs].split_at_mut(pairs);
                each_vector(
                    pairs,
                    #[inline(always)]
                    |span| {
                        let (a, b) = (load(s, x, span), load(s, upper, span));
                        let (cos, sin) = (load(s, cos, span), load(s, sin, span));
                        store(s, s.sub(s.mul(a, cos), s.mul(b, sin)), x, span);
                        store(s, s.mul_add(b, cos, s.mul(a, sin)), upper, span);
                    },
                );
            }
        }
    }
}

struct Gather<'a, 'p, T> {
    copy: HeadCopy<'p, T>,
    length: usize,
    dim: usize,
    /// The token of the first row, counted over all sequences.
    first: usize,
    rows: &'a mut [T],
    width: usize,
}

impl<T: Element> Kernel for Gather<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let HeadCopy {
            from,
            heads,
            offset,
            angles,
        } = self.copy;
        // Grown by the first token and reused by the others of the block.
        let mut table = Vec::new();
        for (row, to) in self.rows.chunks_exact_mut(self.width).enumerate() {
            let index = self.first + row;
            let (sequence, token) = (index / self.length, index % self.length);
            let start = sequence * from.sequence + token * from.token;
            let angles = angles.map(|angles| {
                let (cos, sin) = angles.of(sequence, token);
                (angles, cos, sin)
            });
            // Once for each token, because all heads of a token share the table.
            if let Some((angles, cos, sin)) = angles
                && angles.convention == Convention::Interleaved
            {
                spread(cos, sin, angles.reverse, &mut table);
            }
            for head in 0..heads {
                let at = start + head * from.head;
                let x = &from.data[at..at + self.dim];
                let y = &mut to[offset + head * self.dim..offset + (head + 1) * self.dim];
                match angles {
                    None => y.copy_from_slice(x),
                    Some((angles, cos, sin)) => {
                        let rotated = 2 * angles.pairs;
                        // Partial rotary embedding (GPT-NeoX, Phi): channels past R have no position.
                        y[rotated..].copy_from_slice(&x[rotated..]);
                        let (x, y) = (&x[..rotated], &mut y[..rotated]);
                        match angles.convention {
                            Convention::HalfSplit => halves(s, x, cos, sin, angles.reverse, y),
                            Convention::Interleaved => {
                                let (cos, sin) = table.split_at(rotated);
                                pairs(s, x, cos, sin, y);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Writes the cosine and the signed sine for each channel: `c, c, …` and then `-s, s, …`.
fn spread(cos: &[f32], sin: &[f32], reverse: bool, table: &mut Vec<f32>) {
    table.clear();
    table.extend(cos.iter().flat_map(|&c| [c, c]));
    table.extend(
        sin.iter()
            .map(|&sin| if reverse { -sin } else { sin })
            .flat_map(|sin| [-sin, sin]),
    );
}

#[inline(always)]
fn halves<S: Simd, T: Element>(
    s: S,
    x: &[T],
    cos: &[f32],
    sin: &[f32],
    reverse: bool,
    y: &mut [T],
) {
    let half = cos.len();
    // The inverse rotation negates the sine, so one loop serves both directions.
    let sign = s.splat(if reverse { -1.0 } else { 1.0 });
    let (x, x_upper) = x.split_at(half);
    let (y, y_upper) = y.split_at_mut(half);
    each_vector(
        half,
        #[inline(always)]
        |span| {
            let (a, b) = (load(s, x, span), load(s, x_upper, span));
            let (cos, sin) = (load(s, cos, span), s.mul(sign, load(s, sin, span)));
            store(s, s.sub(s.mul(a, cos), s.mul(b, sin)), y, span);
            store(s, s.mul_add(b, cos, s.mul(a, sin)), y_upper, span);
        },
    );
}

#[inline(always)]
fn pairs<S: Simd, T: Element>(s: S, x: &[T], cos: &[f32], sin: &[f32], y: &mut [T]) {
    each_vector(
        x.len(),
        #[inline(always)]
        |span| {
            let x = load(s, x, span);
            // With cosine and sine repeated for both channels, a pair needs one shuffle; separating even and odd
            // channels would need two for the loads and two for the stores.
            let rotated = s.mul(s.swap_pairs(x), load(s, sin, span));
            store(s, s.mul_add(x, load(s, cos, span), rotated), y, span);
        },
    );
}
