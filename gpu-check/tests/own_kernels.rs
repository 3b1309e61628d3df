//! The section `own_kernels` with a library that stands in for the CUDA driver. It serves the whole process, so this is a
//! process of its own.

#![allow(clippy::unwrap_used, reason = "a test may panic")]
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::path::Path;
use std::process::Command;
use std::rc::Rc;
use std::time::Duration;

use overdrive_gpu_check::finding::{Check, Outcome};
use overdrive_gpu_check::line::Line;
use overdrive_gpu_check::report::KernelUse;
use overdrive_gpu_check::sections::{SECTIONS, Target, run_here};

/// Makes launches for tensors on the CPU do nothing, which is right in no comparison, but counted.
fn install(folder: &Path) {
    let library = folder.join("libcuda.so.1");
    let source = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../crates/overdrive-gpu/tests/stand_in/driver.c"
    );
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let status = Command::new(compiler)
        .args([
            "-shared",
            "-fPIC",
            "-DCAPABILITY=90",
            "-DLOG=\"/dev/null\"",
            "-o",
        ])
        .arg(&library)
        .arg(source)
        .status()
        .unwrap();
    assert!(status.success());
    // SAFETY: the library was made of the source above, which has the functions of the driver with their types.
    unsafe { overdrive_gpu::serve_cpu_with(&library) }.unwrap();
}

#[test]
fn the_section_loads_every_image_and_tells_which_kernels_its_checks_launched() {
    let folder = tempfile::tempdir().unwrap();
    install(folder.path());
    let lines: Rc<RefCell<Vec<Line>>> = Rc::default();
    let sink = Rc::clone(&lines);
    let section = SECTIONS
        .iter()
        .find(|section| section.name == "own_kernels");
    let limit = Duration::from_secs(600);
    run_here(section.unwrap(), Target::Cpu, 0, limit, move |line| {
        sink.borrow_mut().push(line.clone());
    });
    let lines = lines.take();
    let check = |name: &str| -> Check {
        let mut checks = lines.iter().filter_map(|line| match line {
            Line::Done { check, .. } => Some(check),
            _ => None,
        });
        checks.find(|check| check.name == name).unwrap().clone()
    };
    let loaded = check("every image for this GPU is loaded");
    assert_eq!(
        (loaded.outcome, loaded.detail.as_str()),
        (Outcome::Passed, "sm_90a")
    );
    assert!(loaded.figures[0].value.unwrap() > 400.0, "{loaded:?}");

    let fused = check("the checks of fused launch the kernels");
    assert_eq!(fused.outcome, Outcome::Passed, "{fused:?}");
    assert_eq!(fused.figures.len(), 7);
    assert!(
        fused.figures.iter().all(|figure| figure.value > Some(0.0)),
        "{fused:?}"
    );
    // A CPU has kernels of its own for the others: what launches nothing is found.
    let optimizers = check("the checks of optimizers launch the kernels");
    assert_eq!(optimizers.outcome, Outcome::Failed);
    assert_eq!(optimizers.detail, "never launched: adam8");

    let used: Vec<&KernelUse> = lines
        .iter()
        .filter_map(|line| match line {
            Line::Kernels(used) => Some(used),
            _ => None,
        })
        .collect();
    let [used] = used[..] else {
        panic!("{used:?}");
    };
    assert_eq!(used.target.as_deref(), Some("sm_90a"));
    assert!(used.launches["cross_entropy"] > 0 && !used.launches.contains_key("adam8"));
    assert_eq!(lines.last(), Some(&Line::End));
}
