//! Accumulation over several processes.

use overdrive_accumulation::{GradientAccumulator, GradientSync, SyncError, Window};
use tch::{Kind, Tensor};

use super::big_batch::{
    Batch, Model, Recorder, backward, big_batch_gradients, difference, no_clipping,
};

/// Two processes played one after the other: the second averages with what the first left.
struct Pair {
    tokens_of_both: u64,
    of_first: Option<Vec<Tensor>>,
    lasts: Vec<bool>,
}

impl GradientSync for Pair {
    fn world_size(&self) -> u64 {
        2
    }
    fn sum_count(&mut self, _count: u64) -> Result<u64, SyncError> {
        Ok(self.tokens_of_both)
    }
    fn before_backward(&mut self, _loss: &Tensor, last: bool) -> Result<(), SyncError> {
        self.lasts.push(last);
        Ok(())
    }
    fn synchronize(&mut self, parameters: &[Tensor]) -> Result<(), SyncError> {
        let Some(of_first) = &self.of_first else {
            self.of_first = Some(parameters.iter().map(|p| p.grad().copy()).collect());
            return Ok(());
        };
        for (parameter, first) in parameters.iter().zip(of_first) {
            let mean = (parameter.grad() + first) / 2.0;
            parameter.grad().copy_(&mean);
        }
        Ok(())
    }
}

#[test]
fn two_processes_with_uneven_tokens_equal_the_big_batch() {
    for announced in [true, false] {
        let of_process = [
            [Batch::new(0, 2, 1), Batch::new(1, 5, 0)],
            [Batch::new(2, 8, 0), Batch::new(3, 1, 3)],
        ];
        let all: Vec<Batch> = (0..4)
            .map(|i| Batch::new(i, [2, 5, 8, 1][i], [1, 0, 0, 3][i]))
            .collect();
        let (expected, _) = big_batch_gradients(&all, Kind::Float);
        let mut pair = Some(Pair {
            tokens_of_both: 16,
            of_first: None,
            lasts: Vec::new(),
        });
        let mut gradients = Vec::new();
        for batches in &of_process {
            let model = Model::new();
            let mut optimizer = Recorder::new(&model);
            // The order of the optimizer's parameters is that of the store; fix it for the pair.
            let mut accumulator =
                GradientAccumulator::with_sync(no_clipping(2), pair.take().unwrap()).unwrap();
            if announced {
                accumulator
                    .open(Window::new(batches.iter().map(Batch::tokens)))
                    .unwrap();
            }
            for batch in batches {
                backward(&mut accumulator, announced, &model.loss_sum(batch), batch);
            }
            let report = accumulator.step(&mut optimizer).unwrap();
            assert_eq!(report.total_tokens, 16);
            gradients = std::mem::take(&mut optimizer.seen);
            let sync = accumulator.sync_mut();
            let of_first = sync.of_first.take();
            let lasts = std::mem::take(&mut sync.lasts);
            assert_eq!(lasts, [false, true]);
            pair = Some(Pair {
                tokens_of_both: 16,
                of_first,
                lasts: Vec::new(),
            });
        }
        let relative = difference(&gradients, &expected);
        assert!(relative <= 1e-6, "{relative:e}");
    }
}

#[test]
fn a_failing_hook_is_an_error_with_its_cause() {
    struct Broken;
    impl GradientSync for Broken {
        fn world_size(&self) -> u64 {
            2
        }
        fn sum_count(&mut self, _count: u64) -> Result<u64, SyncError> {
            Err("rank 1 is gone".into())
        }
        fn synchronize(&mut self, _parameters: &[Tensor]) -> Result<(), SyncError> {
            Ok(())
        }
    }
    let mut accumulator = GradientAccumulator::with_sync(no_clipping(1), Broken).unwrap();
    let error = accumulator.open(Window::new([4])).unwrap_err();
    assert_eq!(
        error.to_string(),
        "synchronizing over processes failed: rank 1 is gone"
    );
}

#[test]
fn sync_gradients_is_true_for_the_last_micro_batch() {
    let model = Model::new();
    let mut optimizer = model.adamw();
    let mut accumulator = GradientAccumulator::new(no_clipping(3)).unwrap();
    let run = |accumulator: &mut GradientAccumulator| {
        let batch = Batch::new(0, 2, 0);
        accumulator
            .backward_counted(&model.loss_sum(&batch), 2)
            .unwrap();
    };
    let mut flags = Vec::new();
    for _ in 0..3 {
        flags.push((accumulator.sync_gradients(), accumulator.is_complete()));
        run(&mut accumulator);
    }
    assert_eq!(flags, [(false, false), (false, false), (true, false)]);
    assert!(accumulator.is_complete());
    accumulator.step(&mut optimizer).unwrap();

    // The data ends after one more.
    assert!(!accumulator.sync_gradients());
    accumulator.mark_last();
    assert!(accumulator.sync_gradients());
    run(&mut accumulator);
    assert!(accumulator.is_complete());
    assert_eq!(accumulator.pending(), 1);
    accumulator.step(&mut optimizer).unwrap();
    assert_eq!(accumulator.pending(), 0);

    // An announced window takes precedence over the configuration.
    accumulator.open(Window::new([2])).unwrap();
    assert!(accumulator.sync_gradients());
}
