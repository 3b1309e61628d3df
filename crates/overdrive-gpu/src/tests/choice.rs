//! Which GPUs use the kernels, without a GPU.

use std::cell::Cell;
use std::fs;
use std::path::Path;

use super::stand_in::StandIn;
use crate::choice::Gpus;
use crate::verified::VERIFIED;

/// Asks about a GPU of this compute capability; returns the images that are used and the number of times that the driver
/// was opened.
fn asked(capability: (u32, u32), asked: Option<bool>) -> (Option<&'static str>, usize) {
    let opened = Cell::new(0);
    let gpus = Gpus::new();
    let mut target = None;
    // Of several operations only the first opens the driver.
    for _ in 0..2 {
        let kernels = gpus.get(
            0,
            asked,
            || Ok(capability),
            || {
                opened.set(opened.get() + 1);
                Ok(StandIn::new(capability.0 * 10 + capability.1).kernels)
            },
        );
        target = kernels.unwrap().map(crate::Kernels::target);
    }
    (target, opened.get())
}

#[test]
fn the_kernels_are_on_by_default_on_hopper_and_elsewhere_only_if_they_are_asked_for() {
    for (capability, by_default, on) in [
        ((7, 0), None, None),
        ((7, 5), None, None),
        ((8, 0), None, Some("sm_80")),
        ((8, 6), None, Some("sm_80")),
        ((8, 9), None, Some("sm_80")),
        ((9, 0), Some("sm_90a"), Some("sm_90a")),
        ((10, 0), None, Some("sm_100a")),
        ((10, 3), None, Some("ptx")),
        ((12, 0), None, Some("sm_120a")),
        ((12, 1), None, Some("ptx")),
    ] {
        let expected = |target: Option<&'static str>| (target, usize::from(target.is_some()));
        assert_eq!(
            asked(capability, None),
            expected(by_default),
            "{capability:?}"
        );
        assert_eq!(
            asked(capability, Some(true)),
            expected(on),
            "{capability:?}"
        );
        assert_eq!(
            asked(capability, Some(false)),
            expected(None),
            "{capability:?}"
        );
    }
}

#[test]
fn kernels_that_are_turned_on_and_off_again_are_those_of_the_default() {
    let stand_in = StandIn::new(80);
    let gpus = Gpus::new();
    let used = |asked| {
        let kernels = gpus.get(0, asked, || Ok((8, 0)), || Ok(stand_in.kernels));
        kernels.unwrap().is_some()
    };
    assert_eq!(
        [None, Some(true), None, Some(false), Some(true)].map(used),
        [false, true, false, false, true]
    );
}

#[test]
fn each_verified_architecture_has_a_report_of_its_kernels() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for verified in VERIFIED {
        let path = repository.join(verified.report);
        let text =
            fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for named in [verified.target, "own_kernels", "decode_kernel"] {
            assert!(text.contains(named), "{}: {named}", path.display());
        }
    }
}

#[test]
fn a_kernel_without_a_report_is_used_on_request() {
    use crate::verified::is_kernel_used;
    assert!(is_kernel_used("rms_norm_forward", &[], None));
    assert!(!is_kernel_used("delta_rule", &[], None));
    assert!(is_kernel_used("delta_rule", &[], Some(true)));
    let decode = |direct, asked| {
        let constants = [("PAGED", 1), ("DIRECT", direct)];
        is_kernel_used("decode_attention", &constants, asked)
    };
    assert!(decode(0, None) && !decode(1, None) && decode(1, Some(true)));
}
