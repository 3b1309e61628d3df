//! Random states. A test target of its own with one test, because libtorch's generator is a global state.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_autograd::random::{self, Fork};
use tch::{Device, Kind, Tensor};

#[test]
fn random_states_are_saved_set_and_forked() {
    let draw = || Tensor::rand([4], (Kind::Float, Device::Cpu));
    random::manual_seed(Device::Cpu, 11).unwrap();
    let state = random::state(Device::Cpu).unwrap();
    let first = draw();
    random::set_state(Device::Cpu, &state).unwrap();
    assert_eq!(draw(), first);

    random::set_state(Device::Cpu, &state).unwrap();
    let fork = Fork::of(&[Device::Cpu]).unwrap();
    let _ = draw();
    fork.join().unwrap();
    assert_eq!(draw(), first);

    let refused = random::set_state(Device::Cpu, &Tensor::from_slice(&[1u8, 2, 3]));
    assert!(refused.is_err());
    assert!(random::devices().contains(&Device::Cpu));
}
