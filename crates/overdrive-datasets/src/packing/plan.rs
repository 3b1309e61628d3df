use super::PackingStrategy;
use super::best_fit::best_fit_decreasing;
use crate::Result;
use overdrive_core::{Error as CommonError, check_option};

/// A segment of a sequence: its tokens `start..start + len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// The index of the sequence.
    pub sequence: u32,
    /// The first token.
    pub start: u32,
    /// The number of tokens.
    pub len: u32,
}

/// A plan that assigns segments of sequences to rows.
///
/// It depends on lengths only, so packing reads no tokens, and the plan of a million sequences takes 12 MB. A
/// model needs the segments' lengths too: positions start from 0 in each segment, attention is restricted to it,
/// and its first token is not a label.
///
/// ```
/// use overdrive_datasets::{PackPlan, PackingStrategy};
///
/// # fn main() -> overdrive_datasets::Result<()> {
/// let plan = PackPlan::new(&[5, 2, 3, 1], 4, PackingStrategy::Bfd)?;
/// let lengths = |row| plan.row(row).iter().map(|segment| segment.len).collect::<Vec<_>>();
/// // The first sequence lost its fifth token.
/// assert_eq!((lengths(0), lengths(1), lengths(2)), (vec![4], vec![3, 1], vec![2]));
/// assert_eq!(plan.tokens(), 10);
/// assert_eq!(plan.fill(), 10.0 / 12.0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackPlan {
    segments: Vec<Segment>,
    /// The index of each row's first segment, and the number of segments at the end.
    rows: Vec<usize>,
    capacity: usize,
}

impl PackPlan {
    /// Packs sequences of these lengths into rows of at most `capacity` tokens; empty sequences are skipped.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) for a capacity of 0 or from 2³² on, or more than 2³² sequences.
    pub fn new(lengths: &[u32], capacity: usize, strategy: PackingStrategy) -> Result<PackPlan> {
        let width = capacity_of(capacity)?;
        let whole = numbered(lengths)?.filter(|segment| segment.len > 0);
        let rows = match strategy {
            PackingStrategy::Bfd => {
                let cut = whole.map(|segment| Segment {
                    len: segment.len.min(width),
                    ..segment
                });
                best_fit_decreasing(cut.collect(), width)
            }
            PackingStrategy::BfdSplit => {
                let segments = whole.flat_map(|segment| split_segment(segment, width));
                best_fit_decreasing(segments.collect(), width)
            }
            PackingStrategy::Wrapped => wrapped(whole, width),
        };
        Ok(PackPlan::of_rows(rows, capacity))
    }

    /// Returns a plan with one row per sequence, truncated to `capacity`, without packing.
    ///
    /// # Errors
    /// Those of [`PackPlan::new`].
    pub fn one_each(lengths: &[u32], capacity: usize) -> Result<PackPlan> {
        let width = capacity_of(capacity)?;
        let whole = numbered(lengths)?.filter(|segment| segment.len > 0);
        let rows = whole.map(|segment| {
            vec![Segment {
                len: segment.len.min(width),
                ..segment
            }]
        });
        Ok(PackPlan::of_rows(rows.collect(), capacity))
    }

    fn of_rows(rows: Vec<Vec<Segment>>, capacity: usize) -> PackPlan {
        let mut ends = vec![0];
        let mut segments = Vec::new();
        for row in rows {
            segments.extend(row);
            ends.push(segments.len());
        }
        PackPlan {
            segments,
            rows: ends,
            capacity,
        }
    }

    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        self.rows.len() - 1
    }

    /// Returns `true` if there are no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the segments of a row in their order; none if there is no such row.
    pub fn row(&self, row: usize) -> &[Segment] {
        match (self.rows.get(row), self.rows.get(row + 1)) {
            (Some(&start), Some(&end)) => &self.segments[start..end],
            _ => &[],
        }
    }

    /// Returns the number of tokens of a row.
    pub fn row_tokens(&self, row: usize) -> usize {
        self.row(row)
            .iter()
            .map(|segment| segment.len as usize)
            .sum()
    }

    /// Returns the largest number of tokens of a row.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of tokens of all rows.
    pub fn tokens(&self) -> u64 {
        self.segments
            .iter()
            .map(|segment| u64::from(segment.len))
            .sum()
    }

    /// Returns the fraction of the rows' positions that hold tokens, from 0 to 1.
    pub fn fill(&self) -> f64 {
        let positions = (self.len() * self.capacity).max(1);
        self.tokens() as f64 / positions as f64
    }
}

fn capacity_of(capacity: usize) -> Result<u32> {
    let width = u32::try_from(capacity).ok().filter(|&width| width > 0);
    Ok(width.ok_or_else(|| {
        CommonError::option(
            "capacity",
            capacity,
            "at least 1 token a row, and below 2^32",
        )
    })?)
}

/// Returns each sequence as one segment.
fn numbered(lengths: &[u32]) -> Result<impl Iterator<Item = Segment>> {
    check_option(
        u32::try_from(lengths.len()).is_ok(),
        "lengths",
        format!("{} sequences", lengths.len()),
        "fewer than 2^32 sequences",
    )?;
    Ok((0..).zip(lengths).map(|(sequence, &len)| Segment {
        sequence,
        start: 0,
        len,
    }))
}

fn split_segment(whole: Segment, width: u32) -> impl Iterator<Item = Segment> {
    (0..whole.len.div_ceil(width)).map(move |number| Segment {
        start: number * width,
        len: width.min(whole.len - number * width),
        ..whole
    })
}

fn wrapped(sequences: impl Iterator<Item = Segment>, width: u32) -> Vec<Vec<Segment>> {
    let mut rows: Vec<Vec<Segment>> = Vec::new();
    let mut room = 0;
    for mut rest in sequences {
        while rest.len > 0 {
            if room == 0 {
                rows.push(Vec::new());
                room = width;
            }
            let len = rest.len.min(room);
            if let Some(row) = rows.last_mut() {
                row.push(Segment { len, ..rest });
            }
            rest.start += len;
            rest.len -= len;
            room -= len;
        }
    }
    rows
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tokens_seen(plan: &PackPlan, lengths: &[u32]) -> Vec<Vec<u32>> {
        let mut seen: Vec<Vec<u32>> = lengths.iter().map(|&len| vec![0; len as usize]).collect();
        for row in 0..plan.len() {
            for part in plan.row(row) {
                for token in part.start..part.start + part.len {
                    seen[part.sequence as usize][token as usize] += 1;
                }
            }
        }
        seen
    }

    /// Computes best fit by looking at every row; the fast implementation must give the same result.
    fn slow_best_fit(lengths: &[u32], capacity: u32) -> Vec<Vec<u32>> {
        let mut order: Vec<usize> = (0..lengths.len()).filter(|&i| lengths[i] > 0).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(lengths[i].min(capacity)));
        let mut rows: Vec<(u32, Vec<u32>)> = Vec::new();
        for i in order {
            let len = lengths[i].min(capacity);
            let best = (0..rows.len())
                .filter(|&row| rows[row].0 >= len)
                .min_by_key(|&row| rows[row].0);
            match best {
                Some(row) => {
                    rows[row].0 -= len;
                    rows[row].1.push(len);
                }
                None => rows.push((capacity - len, vec![len])),
            }
        }
        rows.into_iter().map(|(_, row)| row).collect()
    }

    proptest! {
        #[test]
        fn every_token_is_packed_once_and_no_row_is_too_long(
            lengths in prop::collection::vec(0_u32..50, 0..60),
            capacity in 1_usize..40,
        ) {
            for strategy in PackingStrategy::ALL {
                let plan = PackPlan::new(&lengths, capacity, strategy).unwrap();
                prop_assert!((0..plan.len()).all(|row| (1..=capacity).contains(&plan.row_tokens(row))));
                for (sequence, counts) in tokens_seen(&plan, &lengths).iter().enumerate() {
                    for (token, &count) in counts.iter().enumerate() {
                        let cut = strategy == PackingStrategy::Bfd && token >= capacity;
                        prop_assert_eq!(count, u32::from(!cut), "{} {}", sequence, token);
                    }
                }
            }
        }

        #[test]
        fn rows_are_as_full_as_by_looking_at_every_row(
            lengths in prop::collection::vec(0_u32..30, 0..80),
            capacity in 1_u32..40,
        ) {
            let plan = PackPlan::new(&lengths, capacity as usize, PackingStrategy::Bfd).unwrap();
            let mut rooms: Vec<usize> = (0..plan.len()).map(|row| plan.row_tokens(row)).collect();
            let slow = slow_best_fit(&lengths, capacity);
            let mut slow: Vec<usize> = slow.iter().map(|row| row.iter().sum::<u32>() as usize).collect();
            rooms.sort_unstable();
            slow.sort_unstable();
            prop_assert_eq!(rooms, slow);
        }
    }

    #[test]
    fn wrapped_rows_are_full_but_for_the_last() {
        let plan = PackPlan::new(&[5, 0, 2, 3, 1], 4, PackingStrategy::Wrapped).unwrap();
        let rows: Vec<usize> = (0..plan.len()).map(|row| plan.row_tokens(row)).collect();
        assert_eq!(rows, [4, 4, 3]);
        let second: Vec<_> = plan
            .row(1)
            .iter()
            .map(|s| (s.sequence, s.start, s.len))
            .collect();
        assert_eq!(second, [(0, 4, 1), (2, 0, 2), (3, 0, 1)]);
    }

    #[test]
    fn lengths_of_natural_answers_fill_their_rows_to_99_percent() {
        // Lengths of instruction data are about log-normal: here with a median of 180 tokens and a tail
        // beyond the row, which is cut.
        let normal = |index: u64| {
            let sum: f64 = (0..12)
                .map(|draw| {
                    overdrive_core::random::random_u64(5, draw, index) as f64 / u64::MAX as f64
                })
                .sum();
            sum - 6.0
        };
        for (spread, capacity) in [(0.9, 1024), (0.9, 2048), (0.6, 1024), (1.2, 4096)] {
            let lengths: Vec<u32> = (0..10_000)
                .map(|index| (180.0 * f64::exp(spread * normal(index))).max(4.0) as u32)
                .collect();
            let plan = PackPlan::new(&lengths, capacity, PackingStrategy::Bfd).unwrap();
            assert!(plan.fill() >= 0.99, "{spread} {capacity}: {}", plan.fill());
        }
    }

    #[test]
    fn rows_without_capacity_are_refused() {
        let error = PackPlan::new(&[1], 0, PackingStrategy::Bfd)
            .unwrap_err()
            .to_string();
        assert!(error.contains("`capacity` is 0"), "{error}");
    }
}
