//! The memory of a save, in a process of its own: it is counted for the whole process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use overdrive_optim::{StateDict, StateError, Stateful};
use overdrive_snapshot::{Error, Ranks, RunState, SnapshotManager, SnapshotOptions};
use overdrive_sys::memory;
use tch::{Device, Kind, Tensor};

/// A rank of two, without the other one.
struct Alone {
    rank: usize,
}

impl Ranks for Alone {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        2
    }

    fn all_gather(&self, own: &[u64]) -> io::Result<Vec<Vec<u64>>> {
        Ok(vec![own.to_vec(); 2])
    }

    fn posted(&self, _: &str) -> io::Result<Option<String>> {
        // The other one has failed, so that no save waits for it.
        Ok(Some(r#"{"rank": 0, "reason": "it has no disk"}"#.into()))
    }
}

/// A value that counts how often its state dict is taken.
struct Counted(Arc<AtomicUsize>);

impl Stateful for Counted {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        self.0.fetch_add(1, Ordering::SeqCst);
        StateDict::of_value(&1)
    }

    fn load_state_dict(&mut self, _: &StateDict) -> Result<(), StateError> {
        Ok(())
    }
}

fn allocated() -> u64 {
    memory::stats(Device::Cpu).unwrap().allocated_bytes
}

#[test]
fn a_rank_copies_only_what_it_writes() {
    const ELEMENTS: i64 = 1 << 22;
    let bytes = 4 * ELEMENTS as u64;
    let whole = Tensor::ones([ELEMENTS], (Kind::Float, Device::Cpu));
    for rank in [0, 1] {
        let dir = tempfile::tempdir().unwrap();
        let options = SnapshotOptions::default();
        let ranks = Box::new(Alone { rank });
        let mut manager = SnapshotManager::with_ranks(dir.path(), options, ranks).unwrap();
        let count = Arc::new(AtomicUsize::new(0));
        let (mut shared, mut own) = (Counted(Arc::clone(&count)), Counted(Arc::default()));
        let own_count = Arc::clone(&own.0);
        let before = allocated();
        let state = RunState::new()
            .tensors("model", [("weight".to_owned(), whole.shallow_clone())])
            .register("optimizer", &mut shared)
            .register_per_rank("shard", &mut own);
        manager.save_state(1, None, state).unwrap();
        let outcomes = manager.wait().unwrap();
        // The copies stay for the next snapshot.
        let copied = allocated() - before;
        match rank {
            0 => assert!(copied >= bytes, "{copied} bytes"),
            _ => assert!(copied < bytes / 8, "{copied} bytes"),
        }
        assert_eq!(count.load(Ordering::SeqCst), 1 - rank, "rank {rank}");
        assert_eq!(own_count.load(Ordering::SeqCst), 1, "rank {rank}");
        let error = outcomes
            .into_iter()
            .find_map(|outcome| outcome.result.err());
        assert!(
            matches!(&error, Some(Error::Peer { rank: 0, reason, .. }) if reason == "it has no disk"),
            "{error:?}"
        );
    }
}
