//! A small run of the example `seq2seq`: it learns, and its folder generates and is read by transformers.

use std::path::{Path, PathBuf};
use std::process::Command;

use overdrive::generation::{GenerationConfig, ModelFiles, generate};
use overdrive::transformer::{LoadOptions, Seq2SeqLm};

use crate::alone;
use crate::on_python::python;
use crate::seq2seq_example::{Flags, run};

fn flags(out: PathBuf) -> Flags {
    Flags {
        out,
        model: None,
        data: None,
        steps: 400,
        batch_size: 32,
        learning_rate: 2e-3,
        held_out: 100,
        seed: 42,
    }
}

/// Trains a model from scratch to reverse words, and goes on from its folder; returns the last folder.
fn reversing(dir: &Path) -> PathBuf {
    let _alone = alone();
    let folder = dir.join("reverse");
    let exact = run(&flags(folder.clone())).unwrap();
    // Half of the words have two or three letters, and may be among those that were trained; the others are new.
    assert!(exact > 0.7, "{exact}");

    let files = ModelFiles::open(&folder).unwrap();
    let tokenizer = files.tokenizer().unwrap();
    let model = Seq2SeqLm::from_pretrained(&folder, &LoadOptions::default()).unwrap();
    let ids = tokenizer.encode("abc", true).unwrap();
    let source: Vec<i64> = ids.get_ids().iter().map(|&id| id.into()).collect();
    assert_eq!(source, [3, 4, 5, 1]);
    let config = GenerationConfig::from_map(&files.generation_config().unwrap()).unwrap();
    let output = generate(&model, &[source], &config).unwrap();
    let written: Vec<u32> = output.new_tokens(0).iter().map(|&id| id as u32).collect();
    assert_eq!(tokenizer.decode(&written, true).unwrap(), "cba");

    // From that folder, with pairs of a file.
    let data = dir.join("pairs.csv");
    let rows: String = (0..60).map(|_| "abc,cba\nfed,def\n").collect();
    std::fs::write(&data, format!("source,target\n{rows}")).unwrap();
    let again = Flags {
        model: Some(folder),
        data: Some(data),
        steps: 20,
        held_out: 20,
        learning_rate: 1e-4,
        ..flags(dir.join("again"))
    };
    assert_eq!(run(&again).unwrap(), 1.0);
    again.out
}

#[test]
fn a_model_from_scratch_learns_to_reverse_words_and_goes_on_from_its_folder() {
    reversing(tempfile::tempdir().unwrap().path());
}

#[test]
#[ignore = "needs Python with torch and transformers"]
fn transformers_reads_a_trained_folder_and_reverses_words_on_python() {
    let python = python(&["torch", "transformers"]);
    let dir = tempfile::tempdir().unwrap();
    let script = "
import sys, torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
torch.set_num_threads(1)
model, tokenizer = (auto.from_pretrained(sys.argv[1]) for auto in (AutoModelForSeq2SeqLM, AutoTokenizer))
ids = tokenizer('abc', return_tensors='pt', return_token_type_ids=False)
print(tokenizer.decode(model.generate(**ids)[0], skip_special_tokens=True))
";
    let output = Command::new(&python)
        .args(["-c", script])
        .arg(reversing(dir.path()))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert_eq!(text, "cba", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn too_few_pairs_are_refused_by_number() {
    let _alone = alone();
    let dir = tempfile::tempdir().unwrap();
    let error = run(&Flags {
        held_out: 4000,
        ..flags(dir.path().to_path_buf())
    })
    .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("4000 pairs are too few: --held-out"),
        "{error}"
    );
}
