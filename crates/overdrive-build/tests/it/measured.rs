//! Measured figures in the cache folder, and the precision that follows from them. All figures are given.

use std::cell::Cell;
use std::fs;
use std::path::PathBuf;

use overdrive_build::measured::{Figures, Processor};
use overdrive_build::{Environment, MatmulSpeed};

const CPUINFO: &str = "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Xeon\ncpu MHz\t: 2600.1\n\
                       flags\t: avx2 avx512_bf16\n\nprocessor\t: 1\nflags\t: other\n";

struct Cache(PathBuf);

impl Cache {
    fn new(name: &str) -> Self {
        let name = format!("overdrive-measured-{}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn environment(&self) -> Environment {
        Environment::made_up("linux", [("XDG_CACHE_HOME", &self.0)])
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn figures(fp32: f64) -> Figures {
    MatmulSpeed { fp32, bf16: 170.25 }.to_figures()
}

#[test]
fn figures_are_measured_once_for_each_processor() {
    let cache = Cache::new("once");
    let environment = cache.environment();
    let measured = Cell::new(0);
    let of = |processor: &Processor, fp32| {
        processor.read_or_measure(&environment, "precision", || {
            measured.set(measured.get() + 1);
            Some(figures(fp32))
        })
    };
    let processor = Processor::of(CPUINFO, "2.11.0", 2);
    assert_eq!(of(&processor, 320.1), Some(figures(320.1)));
    assert_eq!(of(&processor, 999.0), Some(figures(320.1)));
    assert_eq!(measured.get(), 1);
    // The clock and the build of libtorch do not count; version, threads, flags and subject do.
    let faster = CPUINFO.replace("2600.1", "3100.9");
    let same = Processor::of(&faster, "2.11.0+cpu", 2);
    assert_eq!(of(&same, 999.0), Some(figures(320.1)));
    let others = [
        Processor::of(CPUINFO, "2.12.0", 2),
        Processor::of(CPUINFO, "2.11.0", 1),
        Processor::of(&CPUINFO.replace(" avx512_bf16", ""), "2.11.0", 2),
    ];
    for other in others {
        assert_eq!(other.read(&environment, "precision"), None);
        assert_eq!(of(&other, 7.0), Some(figures(7.0)));
    }
    assert_eq!(processor.read(&environment, "other"), None);
    assert_eq!(measured.get(), 4);
    // Drafts are removed.
    let files = fs::read_dir(cache.0.join("overdrive/measured")).unwrap();
    assert_eq!(files.count(), 4);
}

#[test]
fn damaged_and_foreign_files_are_measured_anew() {
    let cache = Cache::new("damaged");
    let environment = cache.environment();
    let processor = Processor::of(CPUINFO, "2.11.0", 2);
    let measure =
        |fp32| processor.read_or_measure(&environment, "precision", || Some(figures(fp32)));
    assert_eq!(measure(1.0), Some(figures(1.0)));
    let path = processor.file(&environment, "precision").unwrap();
    let whole = fs::read_to_string(&path).unwrap();
    let foreign = whole.replace("Xeon", "EPYC");
    for (number, damaged) in [
        String::new(),
        whole[..whole.len() - 5].to_owned(),
        whole.replace("170.25", "NaN"),
        whole.replace("170.25", "fast"),
        whole.replace("measurement 1", "measurement 0"),
        foreign,
    ]
    .into_iter()
    .enumerate()
    {
        fs::write(&path, damaged).unwrap();
        assert_eq!(processor.read(&environment, "precision"), None, "{number}");
        let fresh = 10.0 + number as f64;
        assert_eq!(measure(fresh), Some(figures(fresh)), "{number}");
    }
}

#[test]
fn the_figures_of_the_process_that_stores_first_count_for_all() {
    let cache = Cache::new("first");
    let environment = cache.environment();
    let processor = Processor::of(CPUINFO, "2.11.0", 2);
    let slow = processor.read_or_measure(&environment, "precision", || {
        // Another process finishes meanwhile.
        let fast = processor.read_or_measure(&environment, "precision", || Some(figures(1.0)));
        assert_eq!(fast, Some(figures(1.0)));
        Some(figures(2.0))
    });
    assert_eq!(slow, Some(figures(1.0)));
}

#[test]
fn a_cache_that_cannot_be_written_is_no_error_and_nothing_is_measured() {
    let cache = Cache::new("unwritable");
    // A file where the folder should be. (Permissions do not stop root.)
    fs::write(cache.0.join("overdrive"), "").unwrap();
    let processor = Processor::of(CPUINFO, "2.11.0", 2);
    let nowhere = Environment::made_up("linux", [("PATH", "/bin")]);
    for environment in [cache.environment(), nowhere] {
        let stored = processor.read_or_measure(&environment, "precision", || {
            panic!("figures that cannot be kept must not be measured")
        });
        assert_eq!(stored, None);
    }
}

#[test]
fn bf16_is_favoured_where_it_was_measured_to_be_faster() {
    let favours = |fp32, bf16| MatmulSpeed { fp32, bf16 }.favours_bf16();
    assert!(!favours(320.0, 170.0)); // Sapphire Rapids without AMX
    assert!(favours(220.0, 450.0)); // Zen 4
    assert!(!favours(300.0, 310.0)); // less than the casts cost
    let speed = MatmulSpeed {
        fp32: 320.4,
        bf16: 169.8,
    };
    assert_eq!(speed.to_string(), "fp32 320 GFLOP/s, bf16 170");
    assert_eq!(MatmulSpeed::from_figures(&speed.to_figures()), Some(speed));
    assert_eq!(MatmulSpeed::from_figures(&vec![("fp32".into(), 1.0)]), None);
    assert!(MatmulSpeed::from_figures(&vec![("fp32".into(), 1.0), ("bf16".into(), 0.0)]).is_none());
}
