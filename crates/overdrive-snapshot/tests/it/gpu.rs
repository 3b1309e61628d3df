//! Snapshots of tensors on a GPU.

use crate::common::failures;
use overdrive_snapshot::{Contents, Scope, SnapshotManager, SnapshotOptions};
use tch::{Device, Kind, Tensor};

#[test]
#[ignore = "needs a CUDA GPU"]
fn tensors_on_a_gpu_may_change_while_their_copies_are_under_way() {
    let dir = tempfile::tempdir().unwrap();
    for max_pinned_bytes in [0, 1 << 20, 1 << 30] {
        let options = SnapshotOptions {
            max_pinned_bytes,
            ..SnapshotOptions::default()
        };
        let folder = dir.path().join(max_pinned_bytes.to_string());
        let mut manager = SnapshotManager::open(&folder, options).unwrap();
        let device = Device::Cuda(0);
        let mut weight = Tensor::zeros([1 << 22], (Kind::Float, device));
        for step in 1..=3 {
            let _ = weight.fill_(step as f64);
            let mut contents = Contents::at(step);
            let tensors = [("weight".to_owned(), weight.shallow_clone())];
            contents.tensors("model", Scope::Run, tensors).unwrap();
            manager.save(contents).unwrap();
            // At once, and for longer than the copy takes.
            for _ in 0..100 {
                let _ = weight.g_mul_scalar_(2.0);
            }
        }
        assert!(failures(manager.wait().unwrap()).is_empty());
        for snapshot in manager.list().unwrap() {
            let found = Tensor::zeros([1 << 22], (Kind::Float, Device::Cpu));
            let targets = [("weight".to_owned(), found.shallow_clone())];
            snapshot.copy_into("model", Scope::Run, 0, targets).unwrap();
            let (least, most) = (found.min(), found.max());
            assert_eq!(least, most);
            assert_eq!(most.double_value(&[]), snapshot.step() as f64);
        }
    }
}
