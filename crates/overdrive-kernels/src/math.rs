//! Elementary functions of vectors, to within a few units in the last place.

use crate::Simd;

/// `c[0] + c[1]·x + …`
#[inline(always)]
fn polynomial<S: Simd, const N: usize>(s: S, x: S::F, coefficients: [f32; N]) -> S::F {
    let mut sum = s.splat(coefficients[N - 1]);
    for &coefficient in coefficients[..N - 1].iter().rev() {
        sum = s.mul_add(sum, x, s.splat(coefficient));
    }
    sum
}

/// `eˣ`: 0 below −87.34 (2⁻¹²⁶ is the least result), ∞ above 88.73, NaN for NaN.
///
/// `x = n·ln 2 + r` with integral `n` and `|r| ≤ ln 2 / 2`; `eʳ` is the polynomial of Cephes' `expf`
/// (S. Moshier).
#[inline(always)]
pub fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    // Just above the logarithm of the smallest normal number, so that results are never subnormal.
    const LEAST: f32 = -87.336_54;
    // The second operand preserves NaN. At the upper bound the result is already ∞.
    let bounded = s.max(s.splat(LEAST), s.min(s.splat(89.0), x));
    let n = s.round(s.mul(bounded, s.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts, of which the first has zeros at the end: n times it is exact.
    let r = s.mul_add(n, s.splat(-0.693_359_4), bounded);
    let r = s.mul_add(n, s.splat(2.121_944_4e-4), r);
    let tail = polynomial(
        s,
        r,
        [
            0.5,
            1.666_666_5e-1,
            4.166_579_6e-2,
            8.333_452e-3,
            1.398_199_9e-3,
            1.987_569_1e-4,
        ],
    );
    // The small terms first and 1 last: their rounding errors are far below the last bit of the result.
    let power = s.add(s.mul_add(s.mul(r, r), tail, r), s.splat(1.0));
    s.select_lt(x, s.splat(LEAST), s.splat(0.0), s.scale(power, n))
}

/// `1 / (1 + e⁻ˣ)`
#[inline(always)]
pub fn sigmoid<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    s.div(one, s.add(one, exp(s, s.sub(s.splat(0.0), x))))
}

/// `tanh x`: Cephes' polynomial near 0, where the quotient of exponentials would cancel.
#[inline(always)]
pub fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let size = s.abs(x);
    let one = s.splat(1.0);
    // Where the exponential is ∞ the quotient is 0 and the result exactly 1.
    let far = s.div(s.splat(2.0), s.add(exp(s, s.add(size, size)), one));
    let far = s.sub(one, far);
    // Computed from the magnitude, with the sign restored, so that the function is odd to the last bit.
    let far = s.select_lt(x, s.splat(0.0), s.sub(s.splat(0.0), far), far);
    let square = s.mul(x, x);
    let near = polynomial(
        s,
        square,
        [
            -3.333_328e-1,
            1.333_144_2e-1,
            -5.373_971_6e-2,
            2.063_909e-2,
            -5.704_988_7e-3,
        ],
    );
    let near = s.mul_add(s.mul(near, square), x, x);
    s.select_lt(size, s.splat(0.625), near, far)
}

/// The distribution function of the normal distribution and its density, `(Φ(x), φ(x))`.
///
/// `erfc(z) = t·exp(-z² + P(t))` with `t = 2 / (2 + z)` and a polynomial fitted to it at Chebyshev
/// nodes for `0 ≤ z ≤ 15` (relative error 1.7e-7).
#[inline(always)]
pub fn normal<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    let z = s.mul(s.abs(x), s.splat(std::f32::consts::FRAC_1_SQRT_2));
    let two = s.splat(2.0);
    let t = s.div(two, s.add(two, z));
    let fitted = polynomial(
        s,
        t,
        [
            -1.265_501_9,
            0.999_786_74,
            0.376_261_03,
            0.086_205_92,
            -0.155_633_75,
            0.223_577_41,
            -1.072_641_1,
            1.445_437_9,
            -0.805_707_16,
            0.168_214_86,
        ],
    );
    let square = s.mul(s.splat(-0.5), s.mul(x, x));
    let upper = s.mul(s.splat(0.5), s.mul(t, exp(s, s.add(square, fitted))));
    // The smaller tail is computed and the other one is 1 minus it, so that the lower tail keeps its
    // relative precision.
    let below = s.select_lt(x, s.splat(0.0), upper, s.sub(s.splat(1.0), upper));
    const FRAC_1_SQRT_TAU: f32 = 0.398_942_3;
    (below, s.mul(s.splat(FRAC_1_SQRT_TAU), exp(s, square)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{InstructionSet, Kernel, each_vector, load, store};

    /// A function of the module over a slice.
    struct Map<'a> {
        which: Which,
        x: &'a [f32],
        y: &'a mut [f32],
    }

    #[derive(Clone, Copy)]
    enum Which {
        Exp,
        Sigmoid,
        Tanh,
        Below,
        Density,
    }

    impl Kernel for Map<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Simd>(self, s: S) {
            let Map { which, x, y } = self;
            each_vector(
                x.len(),
                #[inline(always)]
                |span| {
                    let x = load(s, x, span);
                    let result = match which {
                        Which::Exp => exp(s, x),
                        Which::Sigmoid => sigmoid(s, x),
                        Which::Tanh => tanh(s, x),
                        Which::Below => normal(s, x).0,
                        Which::Density => normal(s, x).1,
                    };
                    store(s, result, y, span);
                },
            );
        }
    }

    fn each_set(which: Which, x: &[f32], check: impl Fn(&str, f32, f32)) {
        for set in InstructionSet::available() {
            let mut y = vec![f32::NAN; x.len()];
            set.run(Map {
                which,
                x,
                y: &mut y,
            });
            x.iter().zip(y).for_each(|(&x, y)| check(set.name(), x, y));
        }
    }

    fn grid(from: f32, to: f32, steps: usize) -> Vec<f32> {
        (0..=steps)
            .map(|i| from + (to - from) * i as f32 / steps as f32)
            .collect()
    }

    #[test]
    fn exp_is_within_two_units_in_the_last_place_over_its_whole_range() {
        each_set(Which::Exp, &grid(-87.3, 88.72, 200_003), |set, x, y| {
            let exact = f64::from(x).exp();
            let error = (f64::from(y) - exact).abs() / exact;
            assert!(
                error < 2.0 * f64::from(f32::EPSILON),
                "{set}: exp({x}) = {y}, off by {error:e}"
            );
        });
    }

    #[test]
    fn exp_is_zero_where_it_would_be_subnormal() {
        let mut x = grid(-110.0, -87.2, 10_007);
        // Neighbours of the logarithm of the least normal number, -87.336545.
        x.extend((-20..20).map(|step| -87.336_54 + step as f32 * 7.7e-6));
        each_set(Which::Exp, &x, |set, x, y| {
            let exact = f64::from(x).exp();
            assert!(!y.is_subnormal(), "{set}: exp({x}) = {y:e}");
            let relative = (f64::from(y) - exact).abs() / exact;
            let is_right = match exact < f64::from(f32::MIN_POSITIVE) * 1.0001 {
                true => y == 0.0 || relative < 2.0 * f64::from(f32::EPSILON),
                false => relative < 2.0 * f64::from(f32::EPSILON),
            };
            assert!(is_right, "{set}: exp({x}) = {y:e}");
        });
    }

    #[test]
    fn exp_of_infinities_and_nan_is_what_it_should_be() {
        let x = [
            f32::NEG_INFINITY,
            -1e30,
            f32::INFINITY,
            1e30,
            88.8,
            0.0,
            -0.0,
            f32::NAN,
            1e-40,
        ];
        each_set(Which::Exp, &x, |set, x, y| {
            let expected = x.exp();
            let same = expected.is_nan() && y.is_nan() || expected == y;
            assert!(same, "{set}: exp({x}) = {y}");
        });
    }

    #[test]
    fn sigmoid_keeps_its_relative_accuracy_in_the_lower_tail() {
        each_set(Which::Sigmoid, &grid(-87.0, 87.0, 100_003), |set, x, y| {
            let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
            let error = (f64::from(y) - exact).abs() / exact;
            assert!(
                error < 3.0 * f64::from(f32::EPSILON),
                "{set}: sigmoid({x}) = {y}, off by {error:e}"
            );
        });
        each_set(
            Which::Sigmoid,
            &[f32::NEG_INFINITY, f32::INFINITY],
            |set, x, y| {
                assert_eq!(y, if x > 0.0 { 1.0 } else { 0.0 }, "{set}: sigmoid({x})");
            },
        );
    }

    #[test]
    fn tanh_keeps_its_relative_accuracy_near_zero() {
        let mut x = grid(-12.0, 12.0, 100_003);
        x.extend([1e-30, -1e-30, 1e-6, f32::INFINITY, f32::NEG_INFINITY, 0.0]);
        each_set(Which::Tanh, &x, |set, x, y| {
            let exact = f64::from(x).tanh();
            let error = (f64::from(y) - exact).abs();
            assert!(
                error <= 4.0 * f64::from(f32::EPSILON) * exact.abs(),
                "{set}: tanh({x}) = {y}, off by {error:e}"
            );
        });
    }

    #[test]
    fn the_normal_distribution_agrees_with_tabulated_values() {
        // From mpmath 1.3 with 30 digits: ncdf(x), npdf(x).
        let table = [
            (-8.0, 6.220_960_574_271_784e-16, 5.052_271_083_536_893e-15),
            (-5.0, 2.866_515_718_791_939e-7, 1.486_719_514_734_297_7e-6),
            (-3.0, 1.349_898_031_630_094_6e-3, 4.431_848_411_938_007_5e-3),
            (-1.0, 0.158_655_253_931_457_05, 0.241_970_724_519_143_37),
            (-0.1, 0.460_172_162_722_971, 0.396_952_547_477_011_8),
            (0.0, 0.5, 0.398_942_280_401_432_7),
            (0.5, 0.691_462_461_274_013_1, 0.352_065_326_764_299_5),
            (2.0, 0.977_249_868_051_820_8, 0.053_990_966_513_188_06),
            (6.0, 0.999_999_999_013_412_4, 6.075_882_849_823_286e-9),
        ];
        let x: Vec<f32> = table.iter().map(|row| row.0).collect();
        let row = |x: f32| table.iter().find(|row| row.0 == x).unwrap();
        // z² of the exponent is rounded at 32, which is 2e-6 of the result.
        each_set(Which::Below, &x, |set, x, y| {
            let exact: f64 = row(x).1;
            assert!(
                (f64::from(y) - exact).abs() / exact < 5e-6,
                "{set}: Φ({x}) = {y:e}"
            );
        });
        each_set(Which::Density, &x, |set, x, y| {
            let exact: f64 = row(x).2;
            assert!(
                (f64::from(y) - exact).abs() / exact < 5e-6,
                "{set}: φ({x}) = {y:e}"
            );
        });
    }
}
