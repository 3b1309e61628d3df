use std::fs;
use std::path::PathBuf;
use std::process::Command;

use tch::{Device, Kind, Tensor};
use tempfile::TempDir;

use crate::driver::{Context, Driver};
use crate::{EightBitNumbers, EightBitWeight, Error, Kernels};

/// Kernels on a driver that writes down what it is given.
pub(super) struct StandIn {
    pub(super) kernels: &'static Kernels,
    log: PathBuf,
    _folder: TempDir,
}

impl StandIn {
    /// Compiles a driver that claims this compute capability, times ten.
    pub(super) fn new(capability: u32) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (log, library) = (
            folder.path().join("log"),
            folder.path().join("libcuda.so.1"),
        );
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/stand_in/driver.c");
        let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
        let status = Command::new(compiler)
            .args([
                "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o",
            ])
            .args([library.as_os_str(), source.as_ref()])
            .arg(format!("-DLOG=\"{}\"", log.display()))
            .arg(format!("-DCAPABILITY={capability}"))
            .status()
            .unwrap();
        assert!(status.success());
        let driver = Driver::open(library.as_os_str(), Some(library.as_os_str())).unwrap();
        let made = Kernels::new(Context::new(driver, 0).unwrap(), Device::Cpu).unwrap();
        Self {
            kernels: Box::leak(Box::new(made)),
            log,
            _folder: folder,
        }
    }

    /// Returns the lines since the last call.
    pub(super) fn take(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let _ = fs::remove_file(&self.log);
        text.lines().map(str::to_owned).collect()
    }

    fn capture(&self, captures: bool) {
        let mark = self.log.with_extension("capture");
        match captures {
            true => fs::write(mark, "").unwrap(),
            false => fs::remove_file(mark).unwrap(),
        }
    }
}

fn rows(kind: Kind) -> (Tensor, Tensor) {
    let cpu = (kind, Device::Cpu);
    (Tensor::zeros([3, 64], cpu), Tensor::zeros([64], cpu))
}

#[test]
fn each_architecture_gets_its_own_code() {
    // A cubin's header has the architecture; PTX is compiled by the driver.
    for (capability, target, loaded) in [
        (80, "sm_80", "cubin for 80"),
        (86, "sm_80", "cubin for 80"),
        (89, "sm_80", "cubin for 80"),
        (90, "sm_90a", "cubin for 90"),
        (100, "sm_100a", "cubin for 100"),
        (120, "sm_120a", "cubin for 120"),
        (103, "ptx", "ptx "),
        (121, "ptx", "ptx "),
    ] {
        let stand_in = StandIn::new(capability);
        assert_eq!(stand_in.kernels.target(), target, "{capability}");
        let is_verified = stand_in.kernels.report().is_some();
        assert_eq!(is_verified, target == "sm_90a", "{capability}");
        let norm = stand_in.kernels.rms_norm(Kind::Float, 64, false).unwrap();
        assert!(norm.is_some());
        let log = stand_in.take();
        let modules = log.iter().filter(|line| line.starts_with(loaded)).count();
        assert_eq!(modules, 3, "{capability}: {log:#?}");
    }
}

#[test]
fn a_gpu_before_ampere_has_no_kernels() {
    assert_eq!(crate::embedded::target_for((7, 5)), None);
}

#[test]
fn a_kernel_is_loaded_once_and_its_context_is_current_only_while_it_is_used() {
    let stand_in = StandIn::new(90);
    let (x, weight) = rows(Kind::BFloat16);
    assert_eq!(stand_in.take(), ["retain 100"]);
    for round in 0..2 {
        let norm = stand_in.kernels.rms_norm(Kind::BFloat16, 64, false);
        norm.unwrap()
            .unwrap()
            .forward(&x, None, &weight, 1e-6)
            .unwrap();
        let log = stand_in.take();
        let count = |what: &str| log.iter().filter(|line| line.starts_with(what)).count();
        // Forward, and backward with and without a further gradient.
        let expected = if round == 0 { 3 } else { 0 };
        assert_eq!(count("cubin"), expected, "{log:#?}");
        assert_eq!(count("load rms_norm"), expected, "{log:#?}");
        assert_eq!(count("launch"), 1, "{log:#?}");
        assert_eq!(count("push"), count("pop"), "{log:#?}");
        assert!(log.last().unwrap() == "pop" && log[0] == "push", "{log:#?}");
    }
}

#[test]
fn launches_are_counted_by_kernel() {
    let stand_in = StandIn::new(90);
    let (x, weight) = rows(Kind::Float);
    let norm = stand_in.kernels.rms_norm(Kind::Float, 64, false);
    let norm = norm.unwrap().unwrap();
    // Every kernel is in the list, launched or not.
    let counts = stand_in.kernels.launches();
    assert_eq!((counts.len(), counts.values().sum::<u64>()), (20, 0));
    let out = norm.forward(&x, None, &weight, 1e-6).unwrap();
    for _ in 0..2 {
        let _gradients = norm.backward(&x, &weight, &out.inverse, &x, None).unwrap();
    }
    // A launch that is refused is none.
    norm.forward(&x.to_kind(Kind::Half), None, &weight, 1e-6)
        .unwrap_err();
    let counts = stand_in.kernels.launches();
    assert_eq!(counts["rms_norm_forward"], 1);
    assert_eq!(counts["rms_norm_backward"], 2);
    assert_eq!(counts.values().sum::<u64>(), 3);
}

#[test]
fn every_image_of_a_target_is_loaded_with_its_function_and_its_shared_memory() {
    let stand_in = StandIn::new(90);
    stand_in.take();
    let count = stand_in.kernels.load_all().unwrap();
    let variants = &crate::embedded::table().unwrap().variants;
    assert_eq!(count, variants.len());
    let log = stand_in.take();
    let lines = |start: &str| log.iter().filter(|line| line.starts_with(start)).count();
    assert_eq!([lines("cubin for 90"), lines("load ")], [count; 2]);
    // Beyond 48 KiB a function has to ask for shared memory.
    let large = variants
        .iter()
        .filter(|variant| variant.images["sm_90a"].shared > 48 << 10);
    assert_eq!(lines("attribute "), large.count());
    assert_eq!(lines("launch"), 0);
}

#[test]
fn a_kernel_is_not_loaded_inside_a_capture_but_launched_there() {
    let stand_in = StandIn::new(90);
    let (x, weight) = rows(Kind::Half);
    stand_in.capture(true);
    let inside = || stand_in.kernels.rms_norm(Kind::Half, 64, false).unwrap();
    assert!(inside().is_none());
    stand_in.capture(false);
    assert!(inside().is_some());
    stand_in.capture(true);
    stand_in.take();
    inside().unwrap().forward(&x, None, &weight, 1e-6).unwrap();
    let log = stand_in.take();
    assert_eq!(log.len(), 3, "only a launch between push and pop: {log:#?}");
}

#[test]
fn launches_that_may_run_together_have_counters_of_their_own() {
    let stand_in = StandIn::new(103);
    let codes = Tensor::zeros([16, 8192], (Kind::Int8, Device::Cpu));
    let scales = Tensor::ones([16], (Kind::Float, Device::Cpu));
    let weight = EightBitWeight {
        codes: &codes,
        scales: &scales,
        numbers: EightBitNumbers::Integer,
    };
    let kernels = stand_in.kernels.eight_bit(Kind::Half, &weight);
    let kernels = kernels.unwrap().unwrap();
    let x = Tensor::zeros([1, 8192], (Kind::Half, Device::Cpu));
    let counters = || {
        stand_in.take();
        let _product = kernels.product(&x, &weight).unwrap().unwrap();
        let log = stand_in.take();
        let launch = log.iter().find(|line| line.starts_with("launch")).unwrap();
        let fields: Vec<&str> = launch.split(' ').collect();
        // One block of outputs, shared by four programs.
        assert_eq!((fields[3], fields[4]), ("1", "4"), "{launch}");
        fields[12].parse::<u64>().unwrap()
    };
    let first = counters();
    assert_eq!(counters(), first);
    stand_in.capture(true);
    assert_eq!(counters(), first + 16, "the first capture");
    assert_eq!(counters(), first + 16);
    fs::write(stand_in.log.with_extension("capture"), "2").unwrap();
    assert_eq!(counters(), first + 32, "another capture");
    stand_in.capture(false);
    assert_eq!(counters(), first);
}

#[test]
fn what_does_not_fit_is_refused_before_a_launch() {
    let stand_in = StandIn::new(90);
    let kernels = stand_in.kernels;
    // Neither f64 nor rows that are too long, or not a multiple of 16 elements.
    for (kind, width) in [
        (Kind::Double, 64),
        (Kind::Float, 1 << 15),
        (Kind::Float, 100),
    ] {
        assert!(kernels.rms_norm(kind, width, false).unwrap().is_none());
    }
    let norm = kernels.rms_norm(Kind::Float, 64, false).unwrap().unwrap();
    stand_in.take();
    let (x, weight) = rows(Kind::Float);
    let other = norm.forward(&x.to_kind(Kind::Half), None, &weight, 1e-6);
    let message = other.unwrap_err().to_string();
    assert_eq!(message, "`x` is Half; it must be elements of *fp32");
    assert!(stand_in.take().is_empty(), "nothing was launched");
}

#[test]
fn a_tensor_that_is_not_aligned_or_contiguous_is_copied() {
    let stand_in = StandIn::new(103);
    let (_, weight) = rows(Kind::Float);
    let norm = stand_in
        .kernels
        .rms_norm(Kind::Float, 64, false)
        .unwrap()
        .unwrap();
    let all = Tensor::zeros([1 + 3 * 64], (Kind::Float, Device::Cpu));
    for x in [
        all.narrow(0, 1, 3 * 64).view([3, 64]),
        all.narrow(0, 0, 192).view([64, 3]).tr(),
    ] {
        stand_in.take();
        norm.forward(&x, None, &weight, 1e-6).unwrap();
        let log = stand_in.take();
        let launch = log.iter().find(|line| line.starts_with("launch")).unwrap();
        let address: u64 = launch.split(' ').nth(7).unwrap().parse().unwrap();
        assert_eq!(address % 16, 0, "{launch}");
    }
}

#[test]
fn a_driver_that_is_not_there_is_named_with_the_remedy() {
    let Err(error) = Driver::open("/nowhere/libcuda.so.1".as_ref(), None) else {
        panic!("there is no such file");
    };
    assert!(matches!(error, Error::Library { .. }));
    let message = error.to_string();
    assert!(message.contains("/nowhere/libcuda.so.1"), "{message}");
    assert!(message.contains("OVERDRIVE_GPU_KERNELS=0"), "{message}");
}
