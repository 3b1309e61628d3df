//! Every system call of a save over another checkpoint fails in turn.
//! It is a program of its own, since it starts itself again under a preloaded library.
#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

#[path = "../../../faults/mod.rs"]
mod faults;

use std::path::Path;

use faults::{Case, Fault, Faults, under_injection};
use overdrive_transformer::{CausalLm, LoadOptions, SaveOptions};
use tch::Tensor;

const SHARDS: SaveOptions = SaveOptions {
    max_shard_bytes: 20_000,
};

fn load(folder: &Path) -> overdrive_transformer::Result<CausalLm> {
    CausalLm::from_pretrained(folder, &LoadOptions::default())
}

fn weights(model: &CausalLm) -> Vec<Tensor> {
    let named = model.named_parameters().into_iter();
    named.map(|(_, tensor)| tensor.detach().copy()).collect()
}

fn save_with_a_fault(faults: &Faults, case: &Case, model: &CausalLm) {
    model.save_pretrained(&case.folder, &SHARDS).unwrap();
    let old = weights(model);
    for (_, tensor) in model.named_parameters() {
        let _ = tch::no_grad(|| tensor.shallow_clone().f_add_scalar_(1.0).unwrap());
    }
    let new = weights(model);
    let (saved, call) = faults.during(case, || model.save_pretrained(&case.folder, &SHARDS));
    let place = format!("{case:?}, {call:?}");
    if call.is_none() || case.fault == Fault::Short {
        assert!(saved.is_ok(), "{place}: {saved:?}");
    }
    // It may also be a checkpoint without its index.
    let loaded = load(&case.folder).map(|model| weights(&model));
    let whole = loaded.map(|found| found == new || (saved.is_err() && found == old));
    assert!(whole.unwrap_or(saved.is_err()), "{place}");
    model.save_pretrained(&case.folder, &SHARDS).unwrap();
    assert!(weights(&load(&case.folder).unwrap()) == new, "{place}");
}

#[test]
fn a_save_over_a_sharded_checkpoint_leaves_no_mixture_of_both() {
    let name = "a_save_over_a_sharded_checkpoint_leaves_no_mixture_of_both";
    under_injection(name, |faults| {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let model = load(&fixtures.join("gpt2")).unwrap();
        for fault in Fault::ALL {
            let calls = faults.every_call(fault, |case| save_with_a_fault(faults, case, &model));
            assert!(calls > 10, "{fault:?}: only {calls} calls");
        }
    });
}
