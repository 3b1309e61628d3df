//! Products of small matrices: `C = start(C) + A · B`.

use super::lanes::{Lanes, Real};
use super::multiversioned;

/// What `C` holds before the product is added.
#[derive(Debug, Clone, Copy)]
pub(super) enum Start<'a, R> {
    /// Zeros.
    Zero,
    /// What it holds.
    Add,
    /// What it holds, each column times a factor.
    ScaleColumns(&'a [R]),
    /// What it holds, each row times a factor.
    ScaleRows(&'a [R]),
}

/// `C (m, n) = start(C) + A (m, k) · B (k, n)`.
#[derive(Debug)]
pub(super) struct Product<'a, R> {
    pub(super) m: usize,
    /// A multiple of the vector length.
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) a: &'a [R],
    /// Distance of the rows of `A`, or of its columns where `a_by_columns`.
    pub(super) lda: usize,
    /// Whether the columns of `A` lie together rather than its rows.
    pub(super) a_by_columns: bool,
    pub(super) b: &'a [R],
    pub(super) ldb: usize,
    pub(super) c: &'a mut [R],
    pub(super) ldc: usize,
    pub(super) start: Start<'a, R>,
}

impl<R> Product<'_, R> {
    /// Everything that the tiles rely on when they leave slices for pointers.
    fn check(&self) {
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
    }
}

multiversioned! {
    /// Runs the product on this thread.
    fn product<R>(p: &mut Product<'_, R>) = run
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
unsafe fn run<V: Lanes>(p: &mut Product<'_, V::Scalar>) {
    p.check();
    assert!(p.n.is_multiple_of(V::LEN));
    // SAFETY: the caller vouches for the instruction set, `check` for the bounds of every tile.
    unsafe {
        if p.a_by_columns {
            columns::<V, true>(p);
        } else {
            columns::<V, false>(p);
        }
    }
}

/// # Safety
/// As [`tile`], for all of `C`.
#[inline(always)]
unsafe fn columns<V: Lanes, const BY_COLUMNS: bool>(p: &mut Product<'_, V::Scalar>) {
    let mut n = 0;
    while n < p.n {
        let vectors = (p.n - n) / V::LEN;
        // SAFETY: the vectors that are left are at least as many as each panel has.
        unsafe {
            if V::WIDE >= 4 && vectors >= 4 {
                panel::<V, 4, BY_COLUMNS>(p, n);
                n += 4 * V::LEN;
            } else if vectors >= 2 {
                panel::<V, 2, BY_COLUMNS>(p, n);
                n += 2 * V::LEN;
            } else {
                panel::<V, 1, BY_COLUMNS>(p, n);
                n += V::LEN;
            }
        }
    }
}

/// # Safety
/// As [`tile`], for every row of `C`.
#[inline(always)]
unsafe fn panel<V: Lanes, const WIDTH: usize, const BY_COLUMNS: bool>(
    p: &mut Product<'_, V::Scalar>,
    n: usize,
) {
    let mut m = 0;
    // SAFETY: each tile has no more rows than are left.
    unsafe {
        while p.m - m >= 6 {
            tile::<V, 6, WIDTH, BY_COLUMNS>(p, m, n);
            m += 6;
        }
        if p.m - m >= 4 {
            tile::<V, 4, WIDTH, BY_COLUMNS>(p, m, n);
            m += 4;
        }
        if p.m - m >= 2 {
            tile::<V, 2, WIDTH, BY_COLUMNS>(p, m, n);
            m += 2;
        }
        if p.m - m >= 1 {
            tile::<V, 1, WIDTH, BY_COLUMNS>(p, m, n);
        }
    }
}

/// `HEIGHT` rows by `WIDTH` vectors of `C`, in registers while the sum over `k` runs.
///
/// # Safety
/// The CPU has the instruction set of `V`; rows `m..m + HEIGHT` and columns
/// `n..n + WIDTH · V::LEN` lie in `C`; `Product::check` has passed.
#[inline(always)]
unsafe fn tile<V: Lanes, const HEIGHT: usize, const WIDTH: usize, const BY_COLUMNS: bool>(
    p: &mut Product<'_, V::Scalar>,
    m: usize,
    n: usize,
) {
    let (lda, ldb, ldc) = (p.lda, p.ldb, p.ldc);
    // SAFETY: `check` has found every row that the tile reads or writes within its slice.
    unsafe {
        let a = p.a.as_ptr().add(if BY_COLUMNS { m } else { m * lda });
        let b = p.b.as_ptr().add(n);
        let c = p.c.as_mut_ptr().add(m * ldc + n);
        let mut sums = [[V::splat(V::Scalar::ZERO); WIDTH]; HEIGHT];
        match p.start {
            Start::Zero => {}
            Start::Add => {
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (column, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load(c.add(row * ldc + column * V::LEN));
                    }
                }
            }
            Start::ScaleColumns(factors) => {
                for (row, sums) in sums.iter_mut().enumerate() {
                    for (column, sum) in sums.iter_mut().enumerate() {
                        let factor = V::load(factors.as_ptr().add(n + column * V::LEN));
                        *sum = V::load(c.add(row * ldc + column * V::LEN)).mul(factor);
                    }
                }
            }
            Start::ScaleRows(factors) => {
                for (row, sums) in sums.iter_mut().enumerate() {
                    let factor = V::splat(*factors.as_ptr().add(m + row));
                    for (column, sum) in sums.iter_mut().enumerate() {
                        *sum = V::load(c.add(row * ldc + column * V::LEN)).mul(factor);
                    }
                }
            }
        }
        for k in 0..p.k {
            let b = b.add(k * ldb);
            let mut vectors = [V::splat(V::Scalar::ZERO); WIDTH];
            for (column, vector) in vectors.iter_mut().enumerate() {
                *vector = V::load(b.add(column * V::LEN));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let index = if BY_COLUMNS {
                    k * lda + row
                } else {
                    row * lda + k
                };
                let factor = V::splat(*a.add(index));
                for (sum, vector) in sums.iter_mut().zip(vectors) {
                    *sum = factor.mul_add(vector, *sum);
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            for (column, sum) in sums.into_iter().enumerate() {
                sum.store(c.add(row * ldc + column * V::LEN));
            }
        }
    }
}

multiversioned! {
    /// `tile[key · lanes + row] = keys[key] · rows[row]`, for so few rows that they would leave the
    /// lanes of [`product`] empty: the vectors lie along the head dimension instead.
    fn dot_products<R>(
        tile: &mut [R],
        lanes: usize,
        keys: &[R],
        key_distance: usize,
        count: usize,
        rows: &[R],
        row_distance: usize,
        row_count: usize,
        dim: usize,
    ) = dots
}

/// # Safety
/// The CPU has the instruction set of `V`.
#[inline(always)]
#[allow(clippy::too_many_arguments, reason = "as `dot_products`")]
unsafe fn dots<V: Lanes>(
    tile: &mut [V::Scalar],
    lanes: usize,
    keys: &[V::Scalar],
    key_distance: usize,
    count: usize,
    rows: &[V::Scalar],
    row_distance: usize,
    row_count: usize,
    dim: usize,
) {
    let vectors = dim / V::LEN;
    for key in 0..count {
        let key_row = &keys[key * key_distance..][..dim];
        for row in 0..row_count {
            let query = &rows[row * row_distance..][..dim];
            // SAFETY: the caller vouches for the instruction set; both rows have `dim` numbers.
            let mut sum = unsafe {
                let mut sums = [V::splat(V::Scalar::ZERO); 2];
                for vector in 0..vectors {
                    let a = V::load(key_row.as_ptr().add(vector * V::LEN));
                    let b = V::load(query.as_ptr().add(vector * V::LEN));
                    sums[vector % 2] = a.mul_add(b, sums[vector % 2]);
                }
                sums[0].add(sums[1]).sum()
            };
            for index in vectors * V::LEN..dim {
                sum += key_row[index] * query[index];
            }
            tile[key * lanes + row] = sum;
        }
    }
}
