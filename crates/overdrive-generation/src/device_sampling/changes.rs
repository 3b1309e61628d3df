//! The changes of the scores of a step, recorded for a device.

use tch::{Device, Kind, Tensor};

use super::upload;
use crate::processors::Scores;
use crate::{Result, TokenMask};

/// The changes of the scores of one row, by kind, in the order in which a device makes them. Exclusions may come at
/// any time: no addition, multiplication or subtraction brings an excluded token back.
#[derive(Debug, Default)]
pub(crate) struct RowChanges {
    vocabulary: usize,
    additions: Vec<(i64, f32)>,
    repetitions: Vec<(i64, f32)>,
    subtractions: Vec<(i64, f32, f32)>,
    excluded: Vec<i64>,
    allowed: Option<TokenMask>,
    /// `true` if the changes need another order, or the scores of all tokens.
    only_on_host: bool,
}

impl RowChanges {
    pub(crate) fn new(vocabulary: usize) -> RowChanges {
        RowChanges {
            vocabulary,
            ..RowChanges::default()
        }
    }

    /// Returns the tokens that a constraint allows.
    pub(super) fn allowed(&self) -> Option<&TokenMask> {
        self.allowed.as_ref()
    }

    fn contains(&self, id: i64) -> bool {
        usize::try_from(id).is_ok_and(|id| id < self.vocabulary)
    }

    /// Returns `true` if a device can make the changes.
    pub(crate) fn is_for_device(&self) -> bool {
        // A device adds in an arbitrary order, which affects the rounding if two values are added to the same token.
        let mut ids: Vec<i64> = self.additions.iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        !self.only_on_host && ids.windows(2).all(|pair| pair[0] != pair[1])
    }
}

impl Scores for RowChanges {
    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn add(&mut self, id: i64, value: f32) {
        self.only_on_host |= !self.repetitions.is_empty() || !self.subtractions.is_empty();
        if self.contains(id) {
            self.additions.push((id, value));
        }
    }

    fn penalize_repetition(&mut self, id: usize, penalty: f32) {
        self.only_on_host |= !self.subtractions.is_empty();
        self.repetitions.push((id as i64, penalty));
    }

    fn subtract(&mut self, id: usize, frequency: f32, presence: f32) {
        self.subtractions.push((id as i64, frequency, presence));
    }

    fn exclude(&mut self, ids: &[i64]) {
        let known = ids.iter().copied().filter(|id| self.contains(*id));
        let known: Vec<i64> = known.collect();
        self.excluded.extend(known);
    }

    fn keep_only(&mut self, allowed: &TokenMask) {
        self.allowed = Some(allowed.clone());
    }

    fn force(&mut self, _: &[i64]) {
        self.only_on_host = true;
    }

    fn make_valid(&mut self) {
        self.only_on_host = true;
    }

    fn decay(&mut self, _: &[i64], _: f64) {
        self.only_on_host = true;
    }
}

/// The changes of all rows, with indices into the flat scores.
#[derive(Debug, Default)]
struct Batch {
    indices: [Vec<i64>; 4],
    additions: Vec<f32>,
    repetitions: Vec<f32>,
    frequencies: Vec<f32>,
    presences: Vec<f32>,
    /// The rows with a constraint, and the bits of the tokens that it allows.
    masked: Vec<i64>,
    bits: Vec<i32>,
}

impl Batch {
    fn new<'a>(rows: impl Iterator<Item = Option<&'a RowChanges>>) -> Batch {
        let mut batch = Batch::default();
        for (row, changes) in rows.enumerate() {
            let Some(changes) = changes else { continue };
            let start = (row * changes.vocabulary) as i64;
            let [added, repeated, subtracted, excluded] = &mut batch.indices;
            for (id, value) in &changes.additions {
                added.push(start + id);
                batch.additions.push(*value);
            }
            for (id, penalty) in &changes.repetitions {
                repeated.push(start + id);
                batch.repetitions.push(*penalty);
            }
            for (id, frequency, presence) in &changes.subtractions {
                subtracted.push(start + id);
                // Negative: a device adds them.
                batch.frequencies.push(-frequency);
                batch.presences.push(-presence);
            }
            excluded.extend(changes.excluded.iter().map(|id| start + id));
            if let Some(allowed) = &changes.allowed {
                batch.masked.push(row as i64);
                let words = allowed.words().iter();
                batch.bits.extend(words.map(|word| word.cast_signed()));
            }
        }
        batch
    }
}

/// Makes the changes of the rows on `scores (B, V)`, f32 and contiguous, in place; `None` leaves a row as it is.
pub(super) fn apply<'a>(
    scores: &Tensor,
    rows: impl Iterator<Item = Option<&'a RowChanges>>,
) -> Result<()> {
    let batch = Batch::new(rows);
    let device = scores.device();
    let mut flat = scores.f_view([-1])?;
    // One copy for all indices and one for all values.
    let indices = Uploaded::new(&batch.indices, device)?;
    let values = Uploaded::new(
        &[
            &batch.additions,
            &batch.repetitions,
            &batch.frequencies,
            &batch.presences,
        ],
        device,
    )?;
    if let (Some(ids), Some(values)) = (indices.part(0)?, values.part(0)?) {
        let _same = flat.f_index_add_(0, &ids, &values)?;
    }
    if let (Some(ids), Some(penalties)) = (indices.part(1)?, values.part(1)?) {
        let old = flat.f_index_select(0, &ids)?;
        let product = old.f_mul(&penalties)?;
        let new = product.f_where_self(&old.f_lt(0.0)?, &old.f_div(&penalties)?)?;
        let _same = flat.f_index_copy_(0, &ids, &new)?;
    }
    if let (Some(ids), Some(frequencies), Some(presences)) =
        (indices.part(2)?, values.part(2)?, values.part(3)?)
    {
        let _same = flat.f_index_add_(0, &ids, &frequencies)?;
        let _same = flat.f_index_add_(0, &ids, &presences)?;
    }
    if let Some(ids) = indices.part(3)? {
        let _same = flat.f_index_fill_(0, &ids, f64::NEG_INFINITY)?;
    }
    keep_allowed(scores, &batch)
}

/// Excludes the tokens that the constraints do not allow.
fn keep_allowed(scores: &Tensor, batch: &Batch) -> Result<()> {
    if batch.masked.is_empty() {
        return Ok(());
    }
    let (device, size) = (scores.device(), scores.size());
    let masked = batch.masked.len() as i64;
    // One bit per token is copied to the device and expanded there.
    let words = upload(Tensor::f_from_slice(&batch.bits)?, device)?.f_view([masked, -1, 1])?;
    let shifts = Tensor::f_arange(32, (Kind::Int, device))?;
    let bits = words
        .f_bitwise_right_shift(&shifts)?
        .f_bitwise_and(1i64)?
        .f_eq(0i64)?
        .f_flatten(1, 2)?;
    let hidden = bits.f_narrow(1, 0, size[1])?;
    let mut scores = scores.shallow_clone();
    if masked == size[0] {
        let _same = scores.f_masked_fill_(&hidden, f64::NEG_INFINITY)?;
        return Ok(());
    }
    let rows = upload(Tensor::f_from_slice(&batch.masked)?, device)?;
    let kept = scores.f_index_select(0, &rows)?;
    let kept = kept.f_masked_fill(&hidden, f64::NEG_INFINITY)?;
    let _same = scores.f_index_copy_(0, &rows, &kept)?;
    Ok(())
}

/// Lists in one tensor on a device.
struct Uploaded {
    all: Option<Tensor>,
    ends: Vec<usize>,
}

impl Uploaded {
    fn new<T: tch::kind::Element + Copy, L: AsRef<[T]>>(
        lists: &[L],
        device: Device,
    ) -> Result<Uploaded> {
        let mut all: Vec<T> = Vec::new();
        let mut ends = Vec::with_capacity(lists.len());
        for list in lists {
            all.extend_from_slice(list.as_ref());
            ends.push(all.len());
        }
        let all = match all.is_empty() {
            true => None,
            false => Some(upload(Tensor::f_from_slice(&all)?, device)?),
        };
        Ok(Uploaded { all, ends })
    }

    /// Returns list `index`, unless it is empty.
    fn part(&self, index: usize) -> Result<Option<Tensor>> {
        let start = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        let count = self.ends[index] - start;
        Ok(match &self.all {
            Some(all) if count > 0 => Some(all.f_narrow(0, start as i64, count as i64)?),
            _ => None,
        })
    }
}
