//! The order of the trials.

use overdrive_accumulation::BatchPlan;
use overdrive_core::units;
use overdrive_fused::has_loss_kernel;
use overdrive_precision::Precision;

use super::{Trial, TuneCandidate, TuneOptions, TuneOutcome, TuneRow, Tuning};
use crate::Error;
use crate::arguments::TrainingArguments;
use crate::memory_estimate::{DecoderShape, GpuMemory};

/// A row counts as slower if it has less than this fraction of the fastest's rate.
const SLOWER: f64 = 0.95;
/// A row counts as equally fast if it has at least this fraction of the fastest's rate.
const AS_FAST: f64 = 0.98;
/// The number of consecutive slower rows after which the search stops trying smaller micro-batches.
const PATIENCE: usize = 2;
/// The share of data loading below which other numbers of workers gain nothing.
const LOADING: f64 = 0.01;

/// The state of a search.
pub(super) struct Search<'a, E> {
    arguments: &'a TrainingArguments,
    shape: DecoderShape,
    options: &'a TuneOptions,
    trial: &'a mut dyn FnMut(&TuneCandidate) -> Result<TuneOutcome, E>,
    trials: usize,
    /// All divisors of the effective batch, the largest first.
    batches: Vec<BatchPlan>,
    rows: Vec<TuneRow>,
}

impl<'a, E: From<Error>> Search<'a, E> {
    pub(super) fn new(
        arguments: &'a TrainingArguments,
        shape: DecoderShape,
        options: &'a TuneOptions,
        trial: &'a mut dyn FnMut(&TuneCandidate) -> Result<TuneOutcome, E>,
    ) -> Result<Self, E> {
        let effective = TrainingArguments {
            per_device_train_batch_size: arguments.sequences_per_step(),
            gradient_accumulation_steps: 1,
            ..arguments.clone()
        };
        Ok(Self {
            batches: TrainingArguments::batch_plans(effective.batch_plan(1)?).collect(),
            arguments,
            shape,
            options,
            trial,
            trials: 0,
            rows: Vec::new(),
        })
    }

    pub(super) fn run(mut self) -> Result<Tuning, E> {
        let precision = self.precision()?;
        self.micro_batches(precision, false)?;
        self.micro_batches(precision, true)?;
        self.workers()?;
        self.rows.sort_by_key(|row| {
            let candidate = row.candidate;
            let of_chosen = candidate.precision != precision;
            (
                of_chosen,
                candidate.gradient_checkpointing,
                std::cmp::Reverse(candidate.batch.micro_batch()),
                candidate.dataloader_num_workers,
            )
        });
        Ok(Tuning {
            limit_bytes: self.options.limit_bytes,
            best: best(&self.rows),
            rows: self.rows,
        })
    }

    /// Tries one micro-batch in each precision, and returns the fastest one.
    fn precision(&mut self) -> Result<Precision, E> {
        let mut fastest: Option<(Precision, f64)> = None;
        let mut slower = Vec::new();
        for &precision in &self.options.precisions {
            let rate = match self.probe(precision)? {
                Some(candidate) if self.options.precisions.len() > 1 => self.rate(candidate)?,
                _ => None,
            };
            match (rate, fastest) {
                (None, _) => {}
                // The recommended precision comes first, and is kept unless another one is clearly faster.
                (Some(rate), Some((_, most))) if rate * AS_FAST <= most => {
                    slower.push((precision, rate));
                }
                (Some(rate), before) => {
                    slower.extend(before);
                    fastest = Some((precision, rate));
                }
            }
        }
        let recommended = self.options.precisions.first().copied().unwrap_or_default();
        let (chosen, most) = fastest.unwrap_or((recommended, 0.0));
        for (precision, rate) in slower {
            let reason = format!(
                "{precision} is slower than {chosen}: {} tokens/s against {}",
                units::rounded(rate),
                units::rounded(most)
            );
            for checkpointing in [false, true] {
                for batch in self.batches.clone() {
                    self.leave_out(self.candidate(batch, precision, checkpointing), &reason)?;
                }
            }
        }
        Ok(chosen)
    }

    /// Returns the settings that compare a precision with others: the largest micro-batch up to the given one that
    /// fits, without checkpointing if there is one.
    fn probe(&self, precision: Precision) -> Result<Option<TuneCandidate>, E> {
        let given = self.arguments.per_device_train_batch_size;
        for checkpointing in [false, true] {
            for &batch in &self.batches {
                let candidate = self.candidate(batch, precision, checkpointing);
                if batch.micro_batch() <= given && self.fits(&candidate)? {
                    return Ok(Some(candidate));
                }
            }
        }
        Ok(None)
    }

    /// Tries the micro-batches from the largest down.
    fn micro_batches(&mut self, precision: Precision, checkpointing: bool) -> Result<(), E> {
        let mut slower = 0;
        for batch in self.batches.clone() {
            let candidate = self.candidate(batch, precision, checkpointing);
            if checkpointing && self.fits(&self.candidate(batch, precision, false))? {
                let reason = "fits without checkpointing, which computes blocks twice";
                self.leave_out(candidate, reason)?;
                continue;
            }
            if slower >= PATIENCE {
                let reason = format!("{PATIENCE} larger micro-batches in a row are slower");
                self.leave_out(candidate, &reason)?;
                continue;
            }
            let before = best(&self.rows).and_then(|index| self.rows[index].measured().copied());
            match (self.rate(candidate)?, before) {
                (Some(rate), Some(before)) if rate < SLOWER * before.tokens_per_second => {
                    slower += 1;
                }
                (Some(_), _) => slower = 0,
                (None, _) => {}
            }
        }
        Ok(())
    }

    /// Tries the numbers of workers with the best settings so far.
    fn workers(&mut self) -> Result<(), E> {
        let Some(row) = best(&self.rows).map(|index| self.rows[index].clone()) else {
            return Ok(());
        };
        let share = row.measured().map_or(0.0, |trial| trial.data_share);
        for &dataloader_num_workers in &self.options.workers {
            let candidate = TuneCandidate {
                dataloader_num_workers,
                ..row.candidate
            };
            if share < LOADING {
                let reason = format!("data loading takes {:.2}% of the step", 100.0 * share);
                self.leave_out(candidate, &reason)?;
            } else {
                self.rate(candidate)?;
            }
        }
        Ok(())
    }

    fn candidate(
        &self,
        batch: BatchPlan,
        precision: Precision,
        gradient_checkpointing: bool,
    ) -> TuneCandidate {
        TuneCandidate {
            batch,
            precision,
            gradient_checkpointing,
            dataloader_num_workers: self.arguments.dataloader_num_workers,
        }
    }

    fn estimate(&self, candidate: &TuneCandidate) -> Result<u64, E> {
        let arguments = candidate.of(self.arguments);
        let options = self.options;
        let gpu = options.device.is_cuda().then(|| GpuMemory {
            bytes: options.limit_bytes,
            loss_kernel: has_loss_kernel(options.device),
        });
        let peak = arguments.estimated_peak(self.shape, candidate.precision, candidate.batch, gpu);
        Ok(peak?)
    }

    fn fits(&self, candidate: &TuneCandidate) -> Result<bool, E> {
        Ok(self.estimate(candidate)? <= self.options.limit_bytes)
    }

    /// Adds a row that is not tried, unless there is a row with these settings.
    fn leave_out(&mut self, candidate: TuneCandidate, reason: &str) -> Result<(), E> {
        if self.rows.iter().any(|row| row.candidate == candidate) {
            return Ok(());
        }
        let estimated_bytes = self.estimate(&candidate)?;
        self.rows.push(TuneRow {
            candidate,
            estimated_bytes,
            outcome: TuneOutcome::LeftOut(reason.to_owned()),
        });
        Ok(())
    }

    /// Tries the settings, unless a row with them exists or they do not fit by the estimate. Returns the rate if the
    /// settings may be chosen.
    fn rate(&mut self, candidate: TuneCandidate) -> Result<Option<f64>, E> {
        let rate = |row: &TuneRow| row.measured().map(|trial| trial.tokens_per_second);
        if let Some(row) = self.rows.iter().find(|row| row.candidate == candidate) {
            return Ok(rate(row));
        }
        let limit = self.options.limit_bytes;
        let reason = if !self.fits(&candidate)? {
            Some(format!("the estimate is above {}", units::bytes(limit)))
        } else if self.trials >= self.options.max_trials {
            Some(format!(
                "all {} trials are used up",
                self.options.max_trials
            ))
        } else {
            None
        };
        if let Some(reason) = reason {
            self.leave_out(candidate, &reason)?;
            return Ok(None);
        }
        self.trials += 1;
        let outcome = match (self.trial)(&candidate)? {
            TuneOutcome::Measured(trial) if trial.peak_bytes > limit => {
                TuneOutcome::OverLimit(trial)
            }
            other => other,
        };
        let row = TuneRow {
            candidate,
            estimated_bytes: self.estimate(&candidate)?,
            outcome,
        };
        let rate = rate(&row);
        self.rows.push(row);
        Ok(rate)
    }
}

/// Returns the index of the row to choose: of those about as fast as the fastest, the one with the lowest peak.
fn best(rows: &[TuneRow]) -> Option<usize> {
    let measured = || {
        let rows = rows.iter().enumerate();
        rows.filter_map(|(index, row)| Some((index, *row.measured()?)))
    };
    let rate = |trial: &Trial| trial.tokens_per_second;
    let most = measured()
        .map(|(_, trial)| rate(&trial))
        .fold(0.0, f64::max);
    let as_fast = measured().filter(|(_, trial)| rate(trial) >= AS_FAST * most);
    let lowest = as_fast.min_by(|(_, a), (_, b)| {
        let by_peak = a.peak_bytes.cmp(&b.peak_bytes);
        by_peak.then(rate(b).total_cmp(&rate(a)))
    });
    lowest.map(|(index, _)| index)
}
