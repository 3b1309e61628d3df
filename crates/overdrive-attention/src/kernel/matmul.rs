//! Matmuls of small matrices: `C = start(C) + A · B`.
#![allow(
    unsafe_code,
    reason = "the innermost loop reads and writes through pointers, within bounds that are checked once"
)]

use overdrive_kernels::{LANES, Real, Simd, Vector, vectorized};

/// The value of `C` before `A · B` is added.
#[derive(Debug, Clone, Copy)]
pub(super) enum Start<'a, R> {
    /// Zeros.
    Zero,
    /// The current values.
    Add,
    /// The current values, each column times a factor.
    ScaleColumns(&'a [R]),
    /// The current values, each row times a factor.
    ScaleRows(&'a [R]),
}

/// `C (m, n) = start(C) + A (m, k) · B (k, n)`.
#[derive(Debug)]
pub(super) struct Matmul<'a, R> {
    pub(super) m: usize,
    /// A multiple of the vector length.
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: &'a [R],
    /// The distance between the rows of `A`, or between its columns if `a_by_columns`.
    pub(super) lda: usize,
    /// If `true`, the columns of `A` are contiguous rather than its rows.
    pub(super) a_by_columns: bool,
    pub(super) b: &'a [R],
    pub(super) ldb: usize,
    pub(super) c: &'a mut [R],
    pub(super) ldc: usize,
    pub(super) start: Start<'a, R>,
}

/// A matmul whose matrices fit its sizes; created only by [`Matmul::checked`].
struct Checked<'p, 'a, R>(&'p mut Matmul<'a, R>);

impl<'a, R> Matmul<'a, R> {
    /// Checks everything that the tiles rely on when they access elements through pointers.
    #[inline(always)]
    fn checked(&mut self) -> Checked<'_, 'a, R> {
        let reach = |rows: usize, distance: usize, width: usize| match rows {
            0 => 0,
            _ => (rows - 1) * distance + width,
        };
        let (rows, width) = match self.a_by_columns {
            true => (self.k, self.m),
            false => (self.m, self.k),
        };
        assert!(width == 0 || self.a.len() >= reach(rows, self.lda, width));
        assert!(self.b.len() >= reach(self.k, self.ldb, self.n));
        assert!(self.c.len() >= reach(self.m, self.ldc, self.n));
        match self.start {
            Start::ScaleColumns(factors) => assert!(factors.len() >= self.n),
            Start::ScaleRows(factors) => assert!(factors.len() >= self.m),
            Start::Zero | Start::Add => {}
        }
        Checked(self)
    }
}

vectorized! {
    /// Computes the matmul on this thread.
    pub(super) fn matmul<S: Simd, R: Real>(s: S, p: &mut Matmul<'_, R>) {
        // There are no masked stores: callers pad the columns of `B` and `C` to whole vectors.
        assert!(p.n.is_multiple_of(R::Vector::<S>::LEN));
        // A constant in the loops below, so that the innermost loop has no branch on the layout of `A`.
        let by_columns = p.a_by_columns;
        let p = p.checked();
        if by_columns {
            columns::<S, R::Vector<S>, true>(s, p);
        } else {
            columns::<S, R::Vector<S>, false>(s, p);
        }
    }
}

#[inline(always)]
fn columns<S: Simd, V: Vector<Token = S>, const BY_COLUMNS: bool>(
    s: S,
    mut p: Checked<'_, '_, V::Scalar>,
) {
    let width = p.0.n;
    let mut n = 0;
    while n < width {
        let vectors = (width - n) / V::LEN;
        if S::TILE >= 4 && vectors >= 4 {
            panel::<V, 4, BY_COLUMNS>(s, &mut p, n);
            n += 4 * V::LEN;
        } else if vectors >= 2 {
            panel::<V, 2, BY_COLUMNS>(s, &mut p, n);
            n += 2 * V::LEN;
        } else {
            panel::<V, 1, BY_COLUMNS>(s, &mut p, n);
            n += V::LEN;
        }
    }
}

#[inline(always)]
fn panel<V: Vector, const WIDTH: usize, const BY_COLUMNS: bool>(
    s: V::Token,
    p: &mut Checked<'_, '_, V::Scalar>,
    n: usize,
) {
    let rows = p.0.m;
    let mut m = 0;
    // Six rows by four vectors leave eight of 32 registers for the operands.
    while rows - m >= 6 {
        tile::<V, 6, WIDTH, BY_COLUMNS>(s, p, m, n);
        m += 6;
    }
    if rows - m >= 4 {
        tile::<V, 4, WIDTH, BY_COLUMNS>(s, p, m, n);
        m += 4;
    }
    if rows - m >= 2 {
        tile::<V, 2, WIDTH, BY_COLUMNS>(s, p, m, n);
        m += 2;
    }
    if rows - m >= 1 {
        tile::<V, 1, WIDTH, BY_COLUMNS>(s, p, m, n);
    }
}

/// Computes `HEIGHT` rows by `WIDTH` vectors of `C`, held in registers during the sum over `k`.
#[inline(always)]
fn tile<V: Vector, const HEIGHT: usize, const WIDTH: usize, const BY_COLUMNS: bool>(
    s: V::Token,
    p: &mut Checked<'_, '_, V::Scalar>,
    m: usize,
    n: usize,
) {
    let p = &mut *p.0;
    assert!(m + HEIGHT <= p.m && n + WIDTH * V::LEN <= p.n);
    let (lda, ldb, ldc) = (p.lda, p.ldb, p.ldc);
    // SAFETY: `Checked` has found every row of the matrices within its slice, and the tile lies in `C`.
    unsafe {
        let a = p.a.as_ptr().add(if BY_COLUMNS { m } else { m * lda });
        let b = p.b.as_ptr().add(n);
        let c = p.c.as_mut_ptr().add(m * ldc + n);
        let mut sums = [[V::splat(s, V::Scalar::ZERO); WIDTH]; HEIGHT];
        match p.start {
            Start::Zero => {}
            Start::Add => {
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (column, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load_pointer(s, c.add(row * ldc + column * V::LEN));
                    }
                }
            }
            Start::ScaleColumns(factors) => {
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (column, sum) in sums.iter_mut().enumerate() {
                        let factor = V::load_pointer(s, factors.as_ptr().add(n + column * V::LEN));
                        *sum = V::load_pointer(s, c.add(row * ldc + column * V::LEN)).mul(factor);
                    }
                }
            }
            Start::ScaleRows(factors) => {
                for (row, sums) in sums.iter_mut().enumerate() {
                    let factor = V::splat(s, *factors.as_ptr().add(m + row));
                    for (column, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load_pointer(s, c.add(row * ldc + column * V::LEN)).mul(factor);
                    }
                }
            }
        }
        for k in 0..p.k {
            let b = b.add(k * ldb);
            // `B` is loaded once for all rows of the tile; each element of `A` is broadcast.
            let mut vectors = [V::splat(s, V::Scalar::ZERO); WIDTH];
            for (column, vector) in vectors.iter_mut().enumerate() {
                *vector = V::load_pointer(s, b.add(column * V::LEN));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let index = if BY_COLUMNS {
                    k * lda + row
                } else {
                    row * lda + k
                };
                let factor = V::splat(s, *a.add(index));
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = factor.mul_add(vector, *sum);
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (column, sum) in sums.into_iter().enumerate() {
                sum.store_pointer(c.add(row * ldc + column * V::LEN));
            }
        }
    }
}

/// Rows at equal distances in a slice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a, R> {
    pub(super) data: &'a [R],
    pub(super) distance: usize,
    pub(super) count: usize,
}

impl<'a, R> Rows<'a, R> {
    #[inline(always)]
    fn row(&self, index: usize, dim: usize) -> &'a [R] {
        &self.data[index * self.distance..][..dim]
    }
}

/// The largest number of rows that [`dot_products`] takes.
pub(super) const FEW_ROWS: usize = 4;

vectorized! {
    /// Computes `tile[key · lanes + row] = keys[key] · rows[row]` for at most [`FEW_ROWS`] rows, which would leave
    /// lanes of [`matmul`] empty: the lanes are keys instead. Each sum has the order of [`matmul`], and so its bits.
    pub(super) fn dot_products<S: Simd>(
        s: S,
        tile: &mut [f32],
        lanes: usize,
        keys: Rows<'_, f32>,
        rows: Rows<'_, f32>,
        dim: usize,
    ) {
        match rows.count {
            1 => dots::<S, 1>(s, tile, lanes, keys, rows, dim),
            2 => dots::<S, 2>(s, tile, lanes, keys, rows, dim),
            3 => dots::<S, 3>(s, tile, lanes, keys, rows, dim),
            _ => dots::<S, FEW_ROWS>(s, tile, lanes, keys, rows, dim),
        }
    }
}

#[inline(always)]
fn dots<S: Simd, const COUNT: usize>(
    s: S,
    tile: &mut [f32],
    lanes: usize,
    keys: Rows<'_, f32>,
    rows: Rows<'_, f32>,
    dim: usize,
) {
    let len = S::F32::LEN;
    let zero = S::F32::splat(s, 0.0);
    // Plain loops: a closure that `array::map` calls would be compiled without the instruction set.
    let mut row_slices: [&[f32]; COUNT] = [&[]; COUNT];
    for (row, slice) in row_slices.iter_mut().enumerate() {
        *slice = rows.row(row, dim);
    }
    let whole = dim - dim % len;
    let mut first = 0;
    while first < keys.count {
        let count = LANES.min(keys.count - first);
        let mut key_slices: [&[f32]; LANES] = [&[]; LANES];
        for (lane, slice) in key_slices.iter_mut().enumerate() {
            // Past the last key its elements are read again.
            *slice = keys.row(first + lane.min(count - 1), dim);
        }
        // Registers of several keys at once, since those of one are few chains of dependent additions.
        let mut sums = [[zero; COUNT]; LANES];
        let groups = LANES / len;
        let mut at = 0;
        while at < whole {
            for (group, sums) in sums.iter_mut().enumerate().take(groups) {
                let mut elements = [zero; LANES];
                let keys = key_slices.iter().skip(group * len);
                for (elements, key) in elements.iter_mut().zip(keys).take(len) {
                    *elements = S::F32::load(s, &key[at..]);
                }
                s.transpose_square(&mut elements);
                for (index, elements) in elements.iter().enumerate().take(len) {
                    for (sum, row) in sums.iter_mut().zip(&row_slices) {
                        *sum = elements.mul_add(S::F32::splat(s, row[at + index]), *sum);
                    }
                }
            }
            at += len;
        }
        for at in whole..dim {
            let mut of_keys = [0.0; LANES];
            for (of_keys, key) in of_keys.iter_mut().zip(&key_slices) {
                *of_keys = key[at];
            }
            for (group, sums) in sums.iter_mut().enumerate().take(groups) {
                let elements = S::F32::load(s, &of_keys[group * len..]);
                for (sum, row) in sums.iter_mut().zip(&row_slices) {
                    *sum = elements.mul_add(S::F32::splat(s, row[at]), *sum);
                }
            }
        }
        for row in 0..COUNT {
            let mut of_keys = [0.0; LANES];
            for (group, sums) in sums.iter().enumerate().take(groups) {
                sums[row].store(&mut of_keys[group * len..]);
            }
            for (key, sum) in of_keys[..count].iter().enumerate() {
                tile[(first + key) * lanes + row] = *sum;
            }
        }
        first += LANES;
    }
}
