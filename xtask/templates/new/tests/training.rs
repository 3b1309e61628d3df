//! Training makes the loss fall, and neither micro-batches nor an interruption change it.

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use my_model::{Settings, train};
use tch::Device;

/// libtorch has one random generator for all threads, so runs that are compared run one after the other.
fn alone() -> MutexGuard<'static, ()> {
    static RUNNING: Mutex<()> = Mutex::new(());
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn settings(out: &Path, steps: u64) -> Settings {
    Settings {
        out: out.to_path_buf(),
        steps,
        save_steps: 10,
        ..Default::default()
    }
}

fn assert_close(losses: &[f64], expected: &[f64]) {
    assert_eq!(losses.len(), expected.len());
    for (step, (loss, expected)) in losses.iter().zip(expected).enumerate() {
        assert!(
            (loss - expected).abs() < 1e-3 * expected,
            "step {step}: {loss}, expected {expected}"
        );
    }
}

#[test]
fn the_loss_falls_and_a_checkpoint_is_written() -> anyhow::Result<()> {
    let _alone = alone();
    let folder = tempfile::tempdir()?;
    let summary = train(&settings(folder.path(), 100), Device::Cpu)?;
    let (first, last) = (summary.losses[0], summary.losses[99]);
    assert!(last < 0.2 * first, "the loss went from {first} to {last}");
    assert!(summary.accuracy > 0.95, "accuracy {}", summary.accuracy);
    assert!(folder.path().join("checkpoint-100/manifest.json").is_file());
    Ok(())
}

#[test]
fn micro_batches_add_up_to_the_whole_batch() -> anyhow::Result<()> {
    let _alone = alone();
    let losses = |micro_batches| {
        let folder = tempfile::tempdir()?;
        let settings = Settings {
            micro_batches,
            ..settings(folder.path(), 20)
        };
        anyhow::Ok(train(&settings, Device::Cpu)?.losses)
    };
    assert_close(&losses(4)?, &losses(1)?);
    Ok(())
}

#[test]
fn a_resumed_run_has_the_losses_of_an_uninterrupted_one() -> anyhow::Result<()> {
    let _alone = alone();
    let (whole, parts) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let whole = train(&settings(whole.path(), 30), Device::Cpu)?.losses;
    let before = train(&settings(parts.path(), 20), Device::Cpu)?.losses;
    let after = train(&settings(parts.path(), 30), Device::Cpu)?.losses;
    assert_eq!((before.len(), after.len()), (20, 10));
    assert_close(&[before, after].concat(), &whole);
    Ok(())
}
