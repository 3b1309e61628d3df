//! 8-bit and paged AdamW compared with bitsandbytes and AdamW. A test target of its own, because one test counts memory,
//! and one starts this binary again with a limit on the size of files.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "it/common.rs"]
mod common;

use common::{Run, Tensors, cpu, difference, fixture, one_group, with_gradient};
use overdrive_optim::{
    AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, EMBEDDING_NAMES, Optimizer, PagedAdamW,
    PagedAdamWConfig, PagingConfig, ParamGroup, StateBits,
};
use tch::{Device, Kind, Tensor};

const NAMES: &[&str] = &["proj.weight", "embed.weight", "norm.weight"];

fn config() -> AdamW8bitConfig {
    AdamW8bitConfig {
        learning_rate: 1e-2,
        betas: (0.9, 0.99),
        ..AdamW8bitConfig::default()
    }
}

fn trained(fixture: &Tensors, kind: Kind) -> (Run<'_>, AdamW8bit) {
    let mut run = Run::new(fixture, NAMES, kind);
    run.skipped = "norm.weight";
    let mut optimizer = AdamW8bit::new(run.groups(), config()).unwrap();
    (0..common::STEPS).for_each(|t| run.step(&mut optimizer, t));
    (run, optimizer)
}

/// The differences from a case, largest and mean, by the largest change of the parameter.
fn apart(run: &Run<'_>, case: &str, name: &str) -> (f64, f64) {
    let expected = &run.fixture[&format!("{case}.20.{name}")];
    let change = (expected - &run.fixture[&format!("initial.{name}")])
        .abs()
        .max();
    let apart = (run.parameters[name].detach().to_kind(Kind::Float) - expected).abs() / change;
    let result = (
        apart.max().double_value(&[]),
        apart.mean(Kind::Double).double_value(&[]),
    );
    println!(
        "{case} {name}: {:.1e} at most, {:.1e} on average",
        result.0, result.1
    );
    result
}

#[test]
fn codes_and_parameters_equal_the_update_of_bitsandbytes_with_nearest_codes() {
    let fixture = fixture("adamw8bit");
    let (run, optimizer) = trained(&fixture, Kind::Float);
    let state = optimizer.state_dict().unwrap().tensors;
    for name in ["proj.weight", "embed.weight"] {
        for (own, theirs) in [("exp_avg", "state1"), ("exp_avg_sq", "state2")] {
            let (own, theirs) = (
                &state[&format!("{name}.{own}")],
                &fixture[&format!("nearest.state.{name}.{theirs}")],
            );
            assert_eq!(own.kind(), Kind::Uint8);
            let moved = (own.to_kind(Kind::Int) - theirs.to_kind(Kind::Int)).abs();
            let count = moved.ne(0).sum(Kind::Int64).int64_value(&[]);
            println!("{name}: {count} of {} codes moved", own.numel());
            assert!(moved.max().int64_value(&[]) <= 1);
            assert!(count * 100 <= own.numel() as i64);
        }
        for part in ["absmax1", "absmax2"] {
            let expected = &fixture[&format!("nearest.state.{name}.{part}")];
            assert!(difference(&state[&format!("{name}.{part}")], expected) <= 1e-2);
        }
        let (_, mean) = apart(&run, "nearest", name);
        assert!(mean <= 1e-3);
    }
    // Too small for 8 bits.
    assert_eq!(state["norm.weight.exp_avg"].kind(), Kind::Float);
    assert!(
        difference(
            &state["norm.weight.exp_avg"],
            &fixture["nearest.state.norm.weight.state1"]
        ) <= 1e-6
    );
    assert!(
        difference(
            &run.parameters["norm.weight"],
            &fixture["nearest.20.norm.weight"]
        ) <= 1e-6
    );
}

#[test]
fn parameters_follow_bitsandbytes_and_float32_adamw() {
    let fixture = fixture("adamw8bit");
    let (run, _) = trained(&fixture, Kind::Float);
    for case in ["bitsandbytes", "float32"] {
        let (most, mean) = apart(&run, case, "proj.weight");
        assert!(most <= 0.06 && mean <= 5e-3);
        // Rows without gradients in most steps: where bitsandbytes advises 32 bits.
        let (_, mean) = apart(&run, case, "embed.weight");
        assert!(mean <= 5e-3);
    }
}

#[test]
fn half_parameters_are_updated_in_float32_and_rounded() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let values = (Tensor::arange(5000, cpu(Kind::Float)) * 0.37)
            .sin()
            .to_kind(kind);
        let gradient = (&values * 7.3).cos();
        let half = with_gradient(&values, &gradient);
        let full = with_gradient(&values.to_kind(Kind::Float), &gradient.to_kind(Kind::Float));
        for parameter in [&half, &full] {
            AdamW8bit::new(one_group("w", parameter), config())
                .unwrap()
                .step()
                .unwrap();
        }
        assert!(half.equal(&full.to_kind(kind)), "{kind:?}");
        assert!(!half.equal(&values));
    }
}

#[test]
fn state_is_three_quarters_smaller_than_that_of_adamw() {
    let weight = Tensor::ones([1000, 1000], cpu(Kind::Float));
    let parameter = with_gradient(&weight, &weight);
    let mut plain = AdamW::new(one_group("w", &parameter), AdamWConfig::default()).unwrap();
    let mut small = AdamW8bit::new(one_group("w", &parameter), config()).unwrap();
    plain.step().unwrap();
    small.step().unwrap();
    let blocks = 1_000_000u64.div_ceil(256);
    assert_eq!(small.state_bytes(), 2_000_000 + 2 * 4 * blocks + 4);
    assert_eq!(plain.state_bytes(), 8_000_004);
    // 74.6% with the scales.
    assert!(small.state_bytes() as f64 <= 0.255 * plain.state_bytes() as f64);
}

#[test]
fn a_named_parameter_keeps_a_float32_state() {
    let fixture = fixture("adamw8bit");
    let run = Run::new(&fixture, NAMES, Kind::Float);
    let config = AdamW8bitConfig {
        full_precision_names: vec!["embed".into()],
        ..config()
    };
    let mut optimizer = AdamW8bit::new(run.groups(), config).unwrap();
    run.step(&mut optimizer, 0);
    let state = optimizer.state_dict().unwrap().tensors;
    assert_eq!(state["embed.weight.exp_avg"].kind(), Kind::Float);
    assert_eq!(state["proj.weight.exp_avg"].kind(), Kind::Uint8);
    assert!(!state.contains_key("embed.weight.absmax1"));
}

#[test]
fn a_paged_optimizer_keeps_a_named_parameter_in_32_bits_also_after_a_resume() {
    let weight = |rows| Tensor::ones([rows, 64], cpu(Kind::Float)).set_requires_grad(true);
    let (embedding, projection, small) = (weight(128), weight(128), weight(63));
    let groups = || {
        let named = [
            ("embed_tokens.weight", &embedding),
            ("proj.weight", &projection),
            ("small.weight", &small),
        ];
        let named = named.map(|(name, tensor)| (name.to_owned(), tensor.shallow_clone()));
        vec![ParamGroup::new("all", named.into())]
    };
    let config = |names: &[&str]| PagedAdamWConfig {
        state_bits: StateBits::Eight,
        full_precision_names: names.iter().map(ToString::to_string).collect(),
        paging: paging(1 << 20, 4096),
        ..PagedAdamWConfig::default()
    };
    let step = |optimizer: &mut PagedAdamW, number| {
        for tensor in [&embedding, &projection, &small] {
            let gradient = gradients([tensor.size()[0], 64], number);
            overdrive_sys::grad::set(tensor, &gradient).unwrap();
        }
        optimizer.step().unwrap();
    };
    let mut optimizer = PagedAdamW::new(groups(), config(&EMBEDDING_NAMES)).unwrap();
    step(&mut optimizer, 0);
    let state = optimizer.state_dict().unwrap();
    let kind = |name: &str| state.tensors[&format!("{name}.exp_avg")].kind();
    assert_eq!(kind("embed_tokens.weight"), Kind::Float);
    assert_eq!(kind("proj.weight"), Kind::Uint8);
    // Below bitsandbytes' `min_8bit_size` of 4096 elements.
    assert_eq!(kind("small.weight"), Kind::Float);

    // The stored option counts, so a resume without it continues bit for bit.
    let begun = [&embedding, &projection, &small].map(|tensor| tensor.detach().copy());
    let mut resumed = PagedAdamW::new(groups(), config(&[])).unwrap();
    resumed.load_state_dict(&state).unwrap();
    assert_eq!(resumed.config().full_precision_names, EMBEDDING_NAMES);
    step(&mut optimizer, 1);
    let expected = [&embedding, &projection, &small].map(|tensor| tensor.detach().copy());
    let _no_grad = tch::no_grad_guard();
    for (tensor, begun) in [&embedding, &projection, &small].into_iter().zip(&begun) {
        tensor.shallow_clone().copy_(begun);
    }
    step(&mut resumed, 1);
    for (tensor, expected) in [&embedding, &projection, &small].into_iter().zip(&expected) {
        assert_eq!(&tensor.detach(), expected);
    }
}

#[test]
fn an_average_of_squares_never_becomes_zero_beside_large_ones() {
    // One gradient of 1 in a block of 1e-5: 1e-10 of the scale, below half of the least code.
    let gradient = Tensor::full([64, 64], 1e-5, cpu(Kind::Float));
    let _ = gradient.get(0).get(0).fill_(1.0);
    let parameter = with_gradient(&Tensor::zeros([64, 64], cpu(Kind::Float)), &gradient);
    let mut optimizer = AdamW8bit::new(one_group("w", &parameter), config()).unwrap();
    for _ in 0..20 {
        optimizer.step().unwrap();
    }
    // Then none at all: the averages fade, and no step is larger than the learning rate's.
    overdrive_sys::grad::set(&parameter, &gradient.zeros_like()).unwrap();
    for _ in 0..20 {
        let before = parameter.detach().copy();
        optimizer.step().unwrap();
        let step = (&parameter - before).abs().max().double_value(&[]);
        assert!(step <= 2e-2, "{step}");
    }
}

fn paging(max_resident_bytes: u64, min_paged_elements: usize) -> PagingConfig {
    PagingConfig {
        max_resident_bytes,
        min_paged_elements,
        ..PagingConfig::default()
    }
}

fn gradients(shape: [i64; 2], step: i64) -> Tensor {
    let count = shape[0] * shape[1];
    (Tensor::arange(count, cpu(Kind::Float)) * (0.01 + 0.003 * step as f64))
        .sin()
        .view(shape)
}

/// Parameters after six steps with fixed gradients.
fn six_steps(optimizer: &mut dyn Optimizer, parameter: &Tensor) -> Tensor {
    for step in 0..6 {
        let shape = [parameter.size()[0], parameter.size()[1]];
        let gradient = gradients(shape, step).to_kind(parameter.kind());
        overdrive_sys::grad::set(parameter, &gradient).unwrap();
        optimizer.step().unwrap();
    }
    parameter.detach()
}

#[test]
fn paged_adamw_is_bit_equal_to_adamw() {
    // An odd size: windows end within vectors.
    let weight = (Tensor::arange(1013 * 301, cpu(Kind::Float)) * 0.1)
        .cos()
        .view([1013, 301]);
    for kind in [Kind::Float, Kind::Double] {
        let leaf = || weight.to_kind(kind).copy().set_requires_grad(true);
        let (plain, paged) = (leaf(), leaf());
        let mut adamw = AdamW::new(one_group("w", &plain), AdamWConfig::default()).unwrap();
        let config = PagedAdamWConfig {
            paging: paging(1 << 20, 1000),
            ..PagedAdamWConfig::default()
        };
        let mut optimizer = PagedAdamW::new(one_group("w", &paged), config).unwrap();
        let expected = six_steps(&mut adamw, &plain);
        assert!(six_steps(&mut optimizer, &paged).equal(&expected));
        assert!(optimizer.resident_state_bytes() <= 1 << 20);
        assert!(optimizer.state_bytes() >= 2 * 1013 * 301 * 4);
        let (one, two) = (
            optimizer.state_dict().unwrap().tensors,
            adamw.state_dict().unwrap().tensors,
        );
        for (key, tensor) in two {
            assert!(one[&key].equal(&tensor), "{key}");
        }
    }
}

#[test]
fn paged_8bit_adamw_is_bit_equal_to_adamw8bit() {
    let weight = (Tensor::arange(1013 * 301, cpu(Kind::Float)) * 0.1)
        .cos()
        .view([1013, 301]);
    for kind in [Kind::Float, Kind::BFloat16] {
        let leaf = || weight.to_kind(kind).copy().set_requires_grad(true);
        let (plain, paged) = (leaf(), leaf());
        let config = AdamW8bitConfig::default();
        let mut small = AdamW8bit::new(one_group("w", &plain), config).unwrap();
        let config = PagedAdamWConfig {
            state_bits: StateBits::Eight,
            paging: paging(1 << 20, 1000),
            ..PagedAdamWConfig::default()
        };
        let mut optimizer = PagedAdamW::new(one_group("w", &paged), config).unwrap();
        let expected = six_steps(&mut small, &plain);
        assert!(six_steps(&mut optimizer, &paged).equal(&expected));
    }
}

#[test]
fn paged_half_parameters_follow_float32_ones() {
    let weight = (Tensor::arange(300 * 500, cpu(Kind::Float)) * 0.1)
        .cos()
        .view([300, 500]);
    let config = || PagedAdamWConfig {
        paging: paging(1 << 20, 1000),
        ..PagedAdamWConfig::default()
    };
    let results = [Kind::Float, Kind::Half].map(|kind| {
        let parameter = weight.to_kind(kind).copy().set_requires_grad(true);
        let mut optimizer = PagedAdamW::new(one_group("w", &parameter), config()).unwrap();
        six_steps(&mut optimizer, &parameter)
    });
    assert!(difference(&results[1], &results[0]) <= 6e-3);
}

#[test]
fn a_strided_parameter_is_updated_without_changing_its_neighbours() {
    let whole = (Tensor::arange(200 * 100, cpu(Kind::Float)) * 0.1)
        .cos()
        .view([200, 100]);
    let dense = whole.narrow(1, 0, 60).contiguous().set_requires_grad(true);
    let beside = whole.narrow(1, 60, 40).copy();
    let strided = whole.narrow(1, 0, 60).detach().set_requires_grad(true);
    let mut first = AdamW8bit::new(one_group("w", &dense), config()).unwrap();
    let mut second = AdamW8bit::new(one_group("w", &strided), config()).unwrap();
    let expected = six_steps(&mut first, &dense);
    assert!(six_steps(&mut second, &strided).equal(&expected));
    assert!(whole.narrow(1, 60, 40).equal(&beside));
}

#[test]
fn a_missing_folder_is_an_error_that_leaves_the_parameter_unchanged() {
    let weight = Tensor::ones([200, 100], cpu(Kind::Float));
    let parameter = with_gradient(&weight, &weight);
    let config = PagedAdamWConfig {
        paging: PagingConfig {
            folder: Some("/no/such/folder".into()),
            ..paging(1 << 20, 1000)
        },
        ..PagedAdamWConfig::default()
    };
    let mut optimizer = PagedAdamW::new(one_group("w", &parameter), config).unwrap();
    let message = optimizer.step().unwrap_err().to_string();
    assert!(
        message.starts_with("cannot allocate disk space in /no/such/folder: there is no such folder; the paged optimizer needs 0.2 MiB there"),
        "{message}"
    );
    assert!(parameter.equal(&weight));
    assert_eq!(optimizer.state_bytes(), 0);
    let small = PagedAdamWConfig {
        paging: paging(1000, 0),
        ..PagedAdamWConfig::default()
    };
    assert_eq!(
        small.validate().unwrap_err().to_string(),
        "`max_resident_bytes` is 1000; it must be at least 1048576 (1 MiB)"
    );
}

/// A full file system: the size limit of files stands in for it, in a process of its own.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error_before_anything_changes() {
    if std::env::var_os("OVERDRIVE_TEST_FULL_DISK").is_none() {
        let test = std::env::current_exe().unwrap();
        // `ulimit -f` counts blocks of 1024 bytes; SIGXFSZ is ignored so that the write fails instead.
        let script = "trap '' XFSZ; ulimit -f 100; exec \"$0\" --exact --nocapture a_full_disk_is_an_error_before_anything_changes";
        let output = std::process::Command::new("bash")
            .args(["-c", script, test.to_str().unwrap()])
            .env("OVERDRIVE_TEST_FULL_DISK", "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}"
        );
        return;
    }
    let weight = Tensor::ones([200, 100], cpu(Kind::Float));
    let parameter = with_gradient(&weight, &weight);
    let config = PagedAdamWConfig {
        paging: paging(1 << 20, 1000),
        ..PagedAdamWConfig::default()
    };
    let mut optimizer = PagedAdamW::new(one_group("w", &parameter), config).unwrap();
    let message = optimizer.step().unwrap_err().to_string();
    assert!(
        message.contains("set `paging.folder` to a disk with more space"),
        "{message}"
    );
    assert!(parameter.equal(&weight));
    assert_eq!(optimizer.state_bytes(), 0);
}

/// The process's own count of the mapped state, from /proc.
#[cfg(target_os = "linux")]
#[test]
fn no_more_of_the_mapped_state_is_resident_than_the_budget() {
    let folder = std::env::temp_dir();
    let weight = Tensor::ones([2000, 2000], cpu(Kind::Float));
    let parameter = with_gradient(&weight, &weight);
    for budget in [2u64 << 20, 20 << 20] {
        let config = PagedAdamWConfig {
            paging: PagingConfig {
                folder: Some(folder.clone()),
                ..paging(budget, 1000)
            },
            ..PagedAdamWConfig::default()
        };
        let mut optimizer = PagedAdamW::new(one_group("resident", &parameter), config).unwrap();
        for _ in 0..3 {
            optimizer.step().unwrap();
        }
        let (mapped, resident) = of_mapped_states(32_000_000);
        assert!(mapped >= 32_000_000, "{mapped} bytes are mapped");
        println!("{budget} allowed, {resident} resident of {mapped}");
        assert!(resident <= budget);
    }
}

/// Size and resident bytes of the mappings of state files with at least `least` bytes.
#[cfg(target_os = "linux")]
fn of_mapped_states(least: u64) -> (u64, u64) {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut sum, mut ours, mut size) = ((0, 0), false, 0);
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let first = words.next().unwrap_or_default();
        let bytes = || -> u64 {
            line.split_whitespace()
                .nth(1)
                .unwrap()
                .parse::<u64>()
                .unwrap()
                * 1024
        };
        match first {
            "Size:" => size = bytes(),
            "Rss:" if ours && size >= least => {
                sum.0 += size;
                sum.1 += bytes();
            }
            _ if !first.ends_with(':') => ours = line.contains("overdrive-optimizer-state-"),
            _ => {}
        }
    }
    sum
}

#[test]
fn counted_memory_does_not_hold_the_paged_state() {
    // Other tests of this file allocate meanwhile, so only a bound that they cannot reach.
    let weight = Tensor::ones([4000, 4000], cpu(Kind::Float));
    let parameter = with_gradient(&weight, &weight);
    let config = PagedAdamWConfig {
        paging: paging(1 << 20, 1000),
        ..PagedAdamWConfig::default()
    };
    let before = overdrive_sys::memory::stats(Device::Cpu)
        .unwrap()
        .allocated_bytes;
    let mut optimizer = PagedAdamW::new(one_group("counted", &parameter), config).unwrap();
    optimizer.step().unwrap();
    let after = overdrive_sys::memory::stats(Device::Cpu)
        .unwrap()
        .allocated_bytes;
    assert_eq!(optimizer.state_bytes(), 2 * 64_000_000 + 4);
    assert!(after < before + 100_000_000, "{before} to {after}");
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn steps_on_a_gpu_follow_cpu_steps() {
    let weight = (Tensor::arange(400 * 500, cpu(Kind::Float)) * 0.1)
        .cos()
        .view([400, 500]);
    for bits in [StateBits::ThirtyTwo, StateBits::Eight] {
        let results = [Device::Cpu, Device::Cuda(0)].map(|device| {
            let parameter = weight.to_device(device).copy().set_requires_grad(true);
            let config = PagedAdamWConfig {
                state_bits: bits,
                paging: paging(1 << 20, 1000),
                ..PagedAdamWConfig::default()
            };
            let mut optimizer = PagedAdamW::new(one_group("w", &parameter), config).unwrap();
            for step in 0..6 {
                let gradient = gradients([400, 500], step).to_device(device);
                overdrive_sys::grad::set(&parameter, &gradient).unwrap();
                optimizer.step().unwrap();
            }
            parameter.detach().to_device(Device::Cpu)
        });
        assert!(difference(&results[1], &results[0]) <= 1e-3);
    }
}
