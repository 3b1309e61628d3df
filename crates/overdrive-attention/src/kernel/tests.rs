#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_kernels::{InstructionSet, Real, Vector, vectorized};

use super::matmul::{Matmul, Rows, Start, dot_products, matmul};

/// Returns pseudo-random values in -1..1.
fn numbers(count: usize, seed: u32) -> Vec<f64> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(state >> 8) / f64::from(1 << 23) - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn of<R: Real>(values: &[f64]) -> Vec<R> {
    values.iter().map(|value| R::of(*value)).collect()
}

fn product_equals_the_plain_sum<R: Real>(tolerance: f64) {
    for set in InstructionSet::available() {
        let lanes = set.lanes::<R>();
        for (m, n, k) in [
            (1, lanes, 1),
            (6, 2 * lanes, 7),
            (13, 4 * lanes, 31),
            (23, 7 * lanes, 64),
        ] {
            for a_by_columns in [false, true] {
                let a = numbers(m * k, 1);
                let (b, c) = (numbers(k * n, 2), numbers(m * n, 3));
                let (by_row, by_column) = (numbers(m, 4), numbers(n, 5));
                let (rows, columns) = (of::<R>(&by_row), of::<R>(&by_column));
                let starts = [
                    Start::Zero,
                    Start::Add,
                    Start::ScaleRows(&rows),
                    Start::ScaleColumns(&columns),
                ];
                for start in starts {
                    let mut result = of::<R>(&c);
                    let mut p = Matmul {
                        m,
                        n,
                        k,
                        a: &of::<R>(&a),
                        lda: if a_by_columns { m } else { k },
                        a_by_columns,
                        b: &of::<R>(&b),
                        ldb: n,
                        c: &mut result,
                        ldc: n,
                        start,
                    };
                    matmul(set, &mut p);
                    for (at, got) in result.iter().enumerate() {
                        let (row, column) = (at / n, at % n);
                        let factor = match start {
                            Start::Zero => 0.0,
                            Start::Add => 1.0,
                            Start::ScaleRows(_) => by_row[row],
                            Start::ScaleColumns(_) => by_column[column],
                        };
                        let a = |k_at: usize| match a_by_columns {
                            true => a[k_at * m + row],
                            false => a[row * k + k_at],
                        };
                        let sum: f64 = (0..k).map(|k_at| a(k_at) * b[k_at * n + column]).sum();
                        let expected = c[at] * factor + sum;
                        assert!(
                            (got.to_f64() - expected).abs() < tolerance,
                            "{set:?} {m} {n} {k}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn the_product_of_every_instruction_set_equals_the_plain_sum() {
    product_equals_the_plain_sum::<f32>(2e-5);
    product_equals_the_plain_sum::<f64>(1e-13);
}

/// Each sum has the bits that [`matmul`] gives it, and nothing else is written.
#[test]
fn dot_products_are_those_of_the_matmul() {
    const LANES: usize = 16;
    for set in InstructionSet::available() {
        for (dim, keys, rows) in [(1, 1, 1), (16, 5, 2), (37, 16, 3), (64, 35, 4)] {
            let key_numbers = of::<f32>(&numbers(keys * 70, 6));
            let row_numbers = of::<f32>(&numbers(rows * 70, 7));
            let mut columns = vec![0.0; dim * LANES];
            for (row, numbers) in row_numbers.chunks(70).enumerate() {
                for (at, number) in numbers[..dim].iter().enumerate() {
                    columns[at * LANES + row] = *number;
                }
            }
            let mut expected = vec![0.0; keys * LANES];
            let mut product = Matmul {
                m: keys,
                n: LANES,
                k: dim,
                a: &key_numbers,
                lda: 70,
                a_by_columns: false,
                b: &columns,
                ldb: LANES,
                c: &mut expected,
                ldc: LANES,
                start: Start::Zero,
            };
            matmul(set, &mut product);
            let mut tile = vec![0.0_f32; (keys + 1) * LANES];
            let rows_of = |data, count| Rows {
                data,
                distance: 70,
                count,
            };
            dot_products(
                set,
                &mut tile,
                LANES,
                rows_of(&key_numbers, keys),
                rows_of(&row_numbers, rows),
                dim,
            );
            // The columns past the last row are zero.
            expected.extend([0.0; LANES]);
            assert_eq!(tile, expected, "{set:?} {dim} {keys} {rows}");
        }
    }
}

vectorized! {
    fn exp2_all<S: Simd, R: Real>(s: S, values: &mut [R]) {
        for chunk in values.chunks_exact_mut(R::Vector::<S>::LEN) {
            R::Vector::<S>::load(s, chunk).exp2().store(chunk);
        }
    }
}

fn exp2_is_within<R: Real>(least: f64, tolerance: f64) {
    for set in InstructionSet::available() {
        let inputs: Vec<f64> = (0..64_000)
            .map(|i| least * f64::from(i) / 64_000.0)
            .collect();
        let mut values = of::<R>(&inputs);
        let exact: Vec<f64> = values.iter().map(|x| x.to_f64().exp2()).collect();
        exp2_all(set, &mut values);
        for (value, exact) in values.iter().zip(exact) {
            assert!(
                (value.to_f64() / exact - 1.0).abs() < tolerance,
                "{set:?}: {value:?} {exact}"
            );
        }
        let mut edges = vec![R::of(f64::NEG_INFINITY); 16];
        edges[0] = R::of(f64::NAN);
        (edges[1], edges[2]) = (R::LOWEST, R::of(least * 1.01));
        exp2_all(set, &mut edges);
        assert!(edges[0].to_f64().is_nan());
        assert!(
            edges[1..].iter().all(|value| *value == R::ZERO),
            "{set:?}: {edges:?}"
        );
    }
}

#[test]
fn powers_of_two_are_within_a_rounding_of_the_exact_ones() {
    exp2_is_within::<f32>(-125.9, 1.5e-7);
    exp2_is_within::<f64>(-1021.9, 6e-16);
}
