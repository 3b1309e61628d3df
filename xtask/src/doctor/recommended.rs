//! The rows of the guide's table of recommended settings for this machine.
//!
//! `overdrive_trainer::RecommendedSettings` computes them and needs libtorch, which may not be there yet. The page holds
//! its results, which a test of that crate compares.

use std::fs;

use super::gpu::Gpu;
use crate::cargo;

/// The page of the guide, below the workspace.
pub(super) const PAGE: &str = "docs/src/settings.md";

/// The rows of one device: its name, then what the page says about it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) device: String,
    pub(super) attention: String,
    pub(super) workers: String,
    pub(super) training: String,
    pub(super) finetuning: String,
}

/// Returns the rows for the GPU, or for a CPU with `memory` bytes; `None` if the table has no such device.
pub(super) fn rows(gpu: Option<&Gpu>, memory: Option<u64>) -> Option<Rows> {
    let page = fs::read_to_string(cargo::workspace().join(PAGE)).ok()?;
    rows_of(&page, gpu, memory)
}

fn rows_of(page: &str, gpu: Option<&Gpu>, memory: Option<u64>) -> Option<Rows> {
    let devices = table(page, "devices");
    let row = match gpu {
        Some(gpu) => like_gpu(&devices, gpu)?,
        None => like_cpu(&devices, memory?)?,
    };
    let device = row[0].clone();
    Some(Rows {
        attention: row.get(4)?.clone(),
        workers: row.get(5)?.clone(),
        training: by_model(&table(page, "training"), &device)?,
        finetuning: by_model(&table(page, "fine-tuning"), &device)?,
        device,
    })
}

/// Returns the cells of the table `name`, its header first.
fn table(page: &str, name: &str) -> Vec<Vec<String>> {
    let (start, end) = (format!("<!-- {name}: "), format!("<!-- end of {name} "));
    let lines = page.lines().skip_while(|line| !line.starts_with(&start));
    let lines = lines.take_while(|line| !line.starts_with(&end));
    let rows = lines.filter(|line| line.starts_with("| "));
    rows.map(|line| {
        let cells = line.trim_matches('|').split('|');
        cells.map(|cell| cell.trim().to_owned()).collect()
    })
    .collect()
}

/// Returns the GPU whose name the driver's name contains, or else the one with the most memory that is neither newer
/// nor larger.
fn like_gpu<'a>(devices: &'a [Vec<String>], gpu: &Gpu) -> Option<&'a Vec<String>> {
    let words: Vec<&str> = gpu.name.split(|c: char| !c.is_alphanumeric()).collect();
    let named = |row: &&Vec<String>| {
        row[0]
            .split_whitespace()
            .all(|word| words.iter().any(|own| own.eq_ignore_ascii_case(word)))
    };
    devices.iter().find(named).or_else(|| {
        let smaller = devices.iter().filter(|row| {
            let known = numbers(row).zip(gpu.capability);
            known.is_some_and(|((memory, capability), own)| {
                // From 8.0 on GPUs have bf16 and FlashAttention 2.
                let alike = (capability >= (8, 0)) == (own >= (8, 0));
                alike && memory <= gpu.memory_mib && capability <= own
            })
        });
        smaller.max_by_key(|row| numbers(row))
    })
}

/// Returns the memory in MiB and the compute capability of a GPU's row.
fn numbers(row: &[String]) -> Option<(u64, (u32, u32))> {
    let memory = row.get(1)?.strip_suffix(" MiB")?.replace(',', "");
    let (major, minor) = row.get(2)?.split_once('.')?;
    Some((
        memory.parse().ok()?,
        (major.parse().ok()?, minor.parse().ok()?),
    ))
}

/// Returns the CPU with the most memory that is at most `memory`.
fn like_cpu(devices: &[Vec<String>], memory: u64) -> Option<&Vec<String>> {
    let gibibytes = |row: &&Vec<String>| {
        let text = row.get(1)?.strip_suffix(" GiB")?;
        text.parse::<u64>().ok()
    };
    // A machine of 16 GiB has a little less for its programs.
    let own = (memory as f64 / f64::from(1 << 30)).ceil() as u64;
    let cpus = devices.iter().filter(|row| row[0].starts_with("CPU"));
    cpus.filter(|row| gibibytes(row).is_some_and(|size| size <= own))
        .max_by_key(gibibytes)
}

/// Returns the settings of `device` by model, those that fit.
fn by_model(table: &[Vec<String>], device: &str) -> Option<String> {
    let header = table.first()?;
    let row = table.iter().find(|row| row[0] == device)?;
    let cells = header.iter().zip(row).skip(1);
    let fits = cells.filter(|(_, cell)| *cell != "–");
    let fits: Vec<String> = fits
        .map(|(model, cell)| format!("{}: {cell}", model.split(' ').next().unwrap_or(model)))
        .collect();
    Some(match fits.is_empty() {
        true => "none of the models of the table fits".to_owned(),
        false => fits.join("; "),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(name: &str, memory_mib: u64, capability: (u32, u32)) -> Gpu {
        Gpu {
            name: name.to_owned(),
            driver: "580.1".to_owned(),
            driver_major: 580,
            memory_mib,
            capability: Some(capability),
        }
    }

    #[test]
    fn a_device_gets_the_row_of_its_name_or_of_the_next_smaller_one() {
        for (name, memory, capability, row) in [
            ("NVIDIA GeForce RTX 3090", 24_576, (8, 6), "RTX 3090"),
            ("NVIDIA A100-SXM4-80GB", 81_920, (8, 0), "A100 80GB"),
            ("Tesla V100-SXM2-16GB", 16_384, (7, 0), "V100 16GB"),
            ("NVIDIA L4", 23_034, (8, 9), "RTX 3060"),
            ("NVIDIA B200", 183_359, (10, 0), "H200"),
        ] {
            let gpu = gpu(name, memory, capability);
            let rows = rows(Some(&gpu), None).unwrap();
            assert_eq!(rows.device, row, "{name}");
        }
        assert_eq!(rows(Some(&gpu("GeForce 840M", 2048, (5, 0))), None), None);
    }

    #[test]
    fn a_cpu_gets_the_row_of_its_memory_with_the_models_that_fit() {
        // 16 GiB without what the system keeps for itself.
        let found = rows(None, Some(16_500_000_000)).unwrap();
        assert_eq!(found.device, "CPU, 8 cores, 16 GiB");
        assert_eq!((&*found.attention, &*found.workers), ("blockwise", "1"));
        assert!(found.training.starts_with("135M: 4 × 16"), "{found:?}");
        assert!(found.finetuning.contains("; 8.0B: QLoRA"), "{found:?}");
        assert!(!found.training.contains('–'), "{found:?}");
        assert_eq!(rows(None, Some(4_000_000_000)), None);
    }
}
