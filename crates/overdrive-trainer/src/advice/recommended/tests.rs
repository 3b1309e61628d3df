//! The table of the guide is that of the code, and the settings follow from the facts.

use std::fs;
use std::path::Path;

use overdrive_core::units;
use overdrive_precision::Precision;

use super::settings::LEAST_MICRO_BATCH;
use super::*;
use crate::arguments::TrainingArguments;

/// The length of the sequences in the guide's tables.
const LENGTH: u64 = 1024;

fn device(name: &str) -> &'static DeviceFacts {
    DEVICES.iter().find(|device| device.name == name).unwrap()
}

fn settings(device: &DeviceFacts, model: &ModelSize, task: Task) -> Option<RecommendedSettings> {
    RecommendedSettings::of(device, model.shape, LENGTH, task).unwrap()
}

#[test]
fn the_names_of_the_models_are_their_sizes() {
    for model in &MODELS {
        let size = units::short_count(model.shape.parameters());
        let digits = |text: &str| text.trim_end_matches(['M', 'B']).parse::<f64>().unwrap();
        let (named, counted) = (digits(model.name), digits(&size));
        assert!(
            (named - counted).abs() / counted < 0.03,
            "{} {size}",
            model.name
        );
    }
}

#[test]
fn the_precision_follows_from_capability_and_tensor_cores() {
    for (name, precision, attention) in [
        ("GTX 1080 Ti", Precision::Fp32, "memory-efficient"),
        ("GTX 1660 Ti", Precision::Fp32, "memory-efficient"),
        ("RTX 2080 Ti", Precision::Fp16, "memory-efficient"),
        ("T4", Precision::Fp16, "memory-efficient"),
        ("V100 16GB", Precision::Fp16, "memory-efficient"),
        ("RTX 3060", Precision::Bf16, "flash"),
        ("RTX 4090", Precision::Bf16, "flash"),
        ("A100 40GB", Precision::Bf16, "flash"),
        ("H200", Precision::Bf16, "flash"),
        ("CPU, 8 cores, 16 GiB", Precision::Fp32, "blockwise"),
    ] {
        let device = device(name);
        assert_eq!(
            (device.precision(), device.attention()),
            (precision, attention),
            "{name}"
        );
    }
}

#[test]
fn all_settings_fit_and_keep_the_effective_batch() {
    for device in &DEVICES {
        for model in &MODELS {
            for task in [Task::Train, Task::Finetune] {
                let Some(settings) = settings(device, model, task) else {
                    continue;
                };
                assert!(settings.estimated_bytes <= device.usable_memory());
                assert_eq!(
                    settings.candidate.batch.effective_batch(),
                    task.effective_batch()
                );
                let is_all = settings.trains == TrainedWeights::All;
                assert!(task == Task::Finetune || is_all, "{settings}");
            }
        }
    }
}

#[test]
fn more_memory_never_costs_a_method_or_a_larger_batch() {
    // The order of the choices: fewer trained weights are worse, then smaller micro-batches.
    for model in &MODELS {
        let mut last = 0;
        for memory_mib in [4, 8, 12, 16, 24, 48, 80, 160, 320].map(|gib| gib << 10) {
            let device = DeviceFacts {
                memory_mib,
                ..device("RTX 4090").clone()
            };
            let rank = settings(&device, model, Task::Finetune).map_or(0, |found| {
                let method = match found.trains {
                    TrainedWeights::Qlora => 1,
                    TrainedWeights::Lora => 2,
                    TrainedWeights::All => 3,
                };
                method + 3 * u64::from(found.candidate.batch.micro_batch() >= LEAST_MICRO_BATCH)
            });
            assert!(rank >= last, "{} at {memory_mib} MiB", model.name);
            last = rank;
        }
        assert_eq!(last, 6, "{}", model.name);
    }
}

#[test]
fn an_eight_billion_model_needs_four_bits_on_a_consumer_card_and_not_on_an_h200() {
    let llama = &MODELS[3];
    let of = |name| settings(device(name), llama, Task::Finetune).map(|found| found.trains);
    assert_eq!(of("RTX 3060"), Some(TrainedWeights::Qlora));
    assert_eq!(of("A100 40GB"), Some(TrainedWeights::Lora));
    assert_eq!(of("RTX 2060"), None);
}

#[test]
fn settings_become_keys() {
    let found = settings(device("RTX 2080 Ti"), &MODELS[0], Task::Train).unwrap();
    let arguments = found.applied_to(&TrainingArguments::default());
    arguments.validate().unwrap();
    assert!(arguments.fp16 && !arguments.bf16);
    assert_eq!(arguments.sequences_per_step(), 64);
    assert_eq!(arguments.dataloader_num_workers, 2);
}

fn devices_table() -> String {
    let mut table = "| device | memory | compute capability | precision | attention | workers |\n\
                     |---|---|---|---|---|---|\n"
        .to_owned();
    for device in &DEVICES {
        let (capability, memory) = match device.kind {
            DeviceKind::Gpu {
                capability: (major, minor),
            } => (
                format!("{major}.{minor}"),
                format!("{} MiB", units::thousands(device.memory_mib)),
            ),
            DeviceKind::Cpu { .. } => ("–".to_owned(), format!("{} GiB", device.memory_mib >> 10)),
        };
        let scaling = match device.precision() {
            Precision::Fp16 => ", loss scaling",
            _ => "",
        };
        table += &format!(
            "| {} | {memory} | {capability} | {}{scaling} | {} | {} |\n",
            device.name,
            device.precision(),
            device.attention(),
            device.workers()
        );
    }
    table
}

fn settings_table(task: Task) -> String {
    let head = |model: &ModelSize| format!(" {} ({}) |", model.name, model.example);
    let mut table = format!(
        "| device |{}\n|---|---|---|---|---|\n",
        MODELS.iter().map(head).collect::<String>()
    );
    for device in &DEVICES {
        table += &format!("| {} |", device.name);
        for model in &MODELS {
            let cell = settings(device, model, task);
            let cell = cell.map_or_else(|| "–".to_owned(), |found| found.choice());
            table += &format!(" {} |", cell.trim_start_matches("all weights, "));
        }
        table.push('\n');
    }
    table
}

/// Compares the text between two comments of the page; with `OVERDRIVE_WRITE_TABLES` set, writes it.
fn check(block: &str, expected: &str) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/src/settings.md");
    let text = fs::read_to_string(&page).unwrap();
    let begin = format!("<!-- {block}: made from overdrive_trainer::DEVICES -->\n");
    let end = format!("<!-- end of {block} -->");
    let (before, rest) = text.split_once(&begin).expect(block);
    let (found, after) = rest.split_once(&end).expect(block);
    if std::env::var_os("OVERDRIVE_WRITE_TABLES").is_some() {
        fs::write(&page, format!("{before}{begin}{expected}{end}{after}")).unwrap();
    } else {
        assert!(
            found == expected,
            "the table `{block}` of docs/src/settings.md differs from the code; write it with \
             OVERDRIVE_WRITE_TABLES=1 cargo test -p overdrive-trainer --lib recommended"
        );
    }
}

/// One test for all tables, because they are in one page.
#[test]
fn the_tables_of_the_page_on_settings_are_those_of_the_code() {
    check("devices", &devices_table());
    check("training", &settings_table(Task::Train));
    check("fine-tuning", &settings_table(Task::Finetune));
}
