//! Passes over all logits of a row, written so that the compiler vectorizes them.

/// The number of elements of one iteration: a few registers of any vector width.
pub(crate) const BLOCK: usize = 32;
/// The number of sums that a loop keeps side by side: with SSE2's 16 registers of 4 elements, two sets
/// of four.
const LANES: usize = 16;

/// Returns the largest of `scores`, or `None` if one is NaN or +∞, or all are -∞.
pub(crate) fn maximum(scores: &[f32]) -> Option<f32> {
    let (most, fine) = largest(scores);
    (fine && most > f32::NEG_INFINITY).then_some(most)
}

/// Returns the largest of `scores`, and `true` if none is NaN or +∞.
#[inline]
fn largest(scores: &[f32]) -> (f32, bool) {
    let mut most = [f32::NEG_INFINITY; LANES];
    // The flags are as wide as the scores, so that both can be updated with vector instructions.
    let mut wrong = [0u32; LANES];
    let blocks = scores.chunks_exact(LANES);
    let rest = blocks.remainder();
    for block in blocks {
        for ((most, wrong), &score) in most.iter_mut().zip(&mut wrong).zip(block) {
            *most = if score > *most { score } else { *most };
            *wrong |= is_wrong(score);
        }
    }
    for ((most, wrong), &score) in most.iter_mut().zip(&mut wrong).zip(rest) {
        *most = most.max(score);
        *wrong |= is_wrong(score);
    }
    let most = most.into_iter().fold(f32::NEG_INFINITY, f32::max);
    (most, wrong == [0; LANES])
}

/// Returns 1 for NaN and +∞, in an integer as wide as the element: a `bool` would have to be packed.
#[inline]
#[allow(
    clippy::neg_cmp_op_on_partial_ord,
    reason = "one comparison that is true for NaN as well"
)]
fn is_wrong(score: f32) -> u32 {
    u32::from(!(score < f32::INFINITY))
}

/// Returns `true` if a score of a block is at least `least`.
#[inline]
fn any_from(block: &[f32], least: f32) -> bool {
    block
        .iter()
        .fold(0, |any, &score| any | u32::from(score >= least))
        != 0
}

/// Returns the index of the first of the largest of `scores`; `None` as for [`maximum`].
///
/// The function makes one pass. It remembers the last stretch whose maximum exceeds all earlier
/// ones, and searches only that stretch.
pub(crate) fn arg_max(scores: &[f32]) -> Option<usize> {
    /// The length of a stretch, wide enough that the bookkeeping after each stretch costs nothing.
    const STRETCH: usize = 1024;
    let mut best = (f32::NEG_INFINITY, 0);
    for (number, stretch) in scores.chunks(STRETCH).enumerate() {
        let (most, fine) = largest(stretch);
        if !fine {
            return None;
        }
        if most > best.0 {
            best = (most, number * STRETCH);
        }
    }
    if best.0 == f32::NEG_INFINITY {
        return None;
    }
    let offset = scores[best.1..].iter().position(|&score| score == best.0)?;
    Some(best.1 + offset)
}

/// Calls `found` with the index of each score of at least `least`, in order. A block without such a
/// score costs one comparison per element.
pub(crate) fn for_each_from(scores: &[f32], least: f32, mut found: impl FnMut(usize, f32)) {
    for (number, block) in scores.chunks(BLOCK).enumerate() {
        if any_from(block, least) {
            for (index, &score) in block.iter().enumerate() {
                if score >= least {
                    found(number * BLOCK + index, score);
                }
            }
        }
    }
}

/// Returns the `k`-th best of `scores`, `1 <= k <= scores.len()`, without sorting them: `kept`
/// holds only scores that may still be among the best, and is halved whenever it is full.
pub(crate) fn kth_best(scores: &[f32], k: usize, kept: &mut Vec<f32>) -> f32 {
    kept.clear();
    let room = (2 * k).max(64);
    let mut least = f32::NEG_INFINITY;
    for block in scores.chunks(BLOCK) {
        if !any_from(block, least) {
            continue;
        }
        kept.extend(block.iter().copied().filter(|&score| score >= least));
        if kept.len() >= room + BLOCK {
            let (_, &mut kth, _) = kept.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
            kept.truncate(k);
            least = kth;
        }
    }
    if kept.len() < k {
        return f32::NEG_INFINITY;
    }
    *kept.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1
}

/// Returns `e^x` for `x <= 0`, within 3e-7 relative, and 0 below -87; it vectorizes, unlike the
/// system's.
#[inline]
pub(crate) fn exp(x: f32) -> f32 {
    /// Added to a float below 2^22, it leaves the nearest integer in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts, the first with zeros at its end, so that n times it is exact (Cody & Waite).
    const LN2_HIGH: f32 = 355.0 / 512.0;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let inside = x.max(-87.0);
    let shifted = inside * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (inside - n * LN2_HIGH) - n * LN2_LOW;
    let mut power = 1.0 / 5040.0;
    for coefficient in [
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        0.5,
        1.0,
        1.0,
    ] {
        power = power * r + coefficient;
    }
    let scale = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { power * scale }
}

/// Returns `Σ e^((score - max) / temperature)`.
pub(crate) fn sum_exp(scores: &[f32], max: f32, temperature: f32) -> f64 {
    let inverse = 1.0 / temperature;
    let mut total = 0.0;
    for stretch in scores.chunks(1024) {
        let mut sums = [0.0f32; LANES];
        let blocks = stretch.chunks_exact(LANES);
        let rest = blocks.remainder();
        for block in blocks {
            for (sum, &score) in sums.iter_mut().zip(block) {
                *sum += exp((score - max) * inverse);
            }
        }
        for (sum, &score) in sums.iter_mut().zip(rest) {
            *sum += exp((score - max) * inverse);
        }
        // In f64 from here on: the error does not grow with the vocabulary.
        total += f64::from(sums.iter().sum::<f32>());
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exp_is_within_3e_7_of_the_true_one_and_0_far_below() {
        for step in 0..870_000 {
            let x = -(step as f32) * 1e-4;
            let want = f64::from(x).exp();
            let error = (f64::from(exp(x)) - want).abs() / want;
            assert!(error < 3e-7, "{x}: {error}");
        }
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-1000.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
    }

    #[test]
    fn nan_and_infinity_are_found_at_any_place() {
        for index in [0, 31, 32, 1023, 1024, 1500, 2047, 2100] {
            for wrong in [f32::NAN, f32::INFINITY] {
                let mut scores = vec![0.5; 2101];
                scores[index] = wrong;
                assert_eq!(
                    (arg_max(&scores), maximum(&scores)),
                    (None, None),
                    "{index}"
                );
            }
        }
        assert_eq!(arg_max(&[f32::NEG_INFINITY; 40]), None);
        assert_eq!(arg_max(&[]), None);
    }

    proptest! {
        #[test]
        fn the_maximum_is_the_first_of_the_largest(
            scores in proptest::collection::vec(-5i32..5, 1..3000)
        ) {
            let scores: Vec<f32> = scores.into_iter().map(|x| x as f32).collect();
            let most = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let first = scores.iter().position(|&x| x == most);
            prop_assert_eq!(arg_max(&scores), first);
            prop_assert_eq!(maximum(&scores), Some(most));
        }

        #[test]
        fn the_kth_best_is_that_of_the_sorted_scores(
            scores in proptest::collection::vec(-50i32..50, 1..2000), k in 1usize..200
        ) {
            let scores: Vec<f32> = scores.into_iter().map(|x| x as f32).collect();
            let k = k.min(scores.len());
            let mut sorted = scores.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            prop_assert_eq!(kth_best(&scores, k, &mut Vec::new()), sorted[k - 1]);
            let mut from = Vec::new();
            for_each_from(&scores, sorted[k - 1], |index, _| from.push(index));
            let want: Vec<usize> =
                (0..scores.len()).filter(|&i| scores[i] >= sorted[k - 1]).collect();
            prop_assert_eq!(from, want);
        }
    }
}
