//! Packages that Python makes here and now, beside transformers and our own model.
//!
//! They need a Python with the torch of this libtorch, transformers 5 and safetensors, and a C++ compiler.

mod plain;
mod weights;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{read_archive, write_archive};
use crate::on_python;
use overdrive_packages::{CompiledDecoder, CompiledModel, Error, LoadOptions, ReplaceOptions};
use overdrive_transformer::{
    CausalLm, ForwardInput, InitOptions, LlamaConfig, LoadOptions as ModelOptions, SaveOptions,
};
use tch::{Device, Kind, Tensor};

/// Sums of the same numbers in another order, in fp32: of 32 to 64 addends of about 1.
const TOLERANCE: f64 = 5e-5;

/// The paths alone: tensors cannot be shared by threads.
struct Fixture {
    folder: tempfile::TempDir,
}

impl Fixture {
    fn package(&self) -> PathBuf {
        self.folder.path().join("tiny.pt2")
    }

    fn plain(&self) -> PathBuf {
        self.folder.path().join("plain.pt2")
    }

    fn folder_of(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn model(&self, name: &str) -> CausalLm {
        CausalLm::from_pretrained(self.folder_of(name), &ModelOptions::default()).unwrap()
    }

    /// The logits that transformers computed with the folder `name`.
    fn logits_of(&self, name: &str) -> Tensor {
        let all = Tensor::read_safetensors(self.folder_of("logits.st")).unwrap();
        all.into_iter().find(|(found, _)| found == name).unwrap().1
    }

    fn ids(&self) -> Tensor {
        ids()
    }
}

fn ids() -> Tensor {
    let ids = Tensor::arange(21, (Kind::Int64, Device::Cpu));
    (ids * 29 + 3).remainder(64).view([3, 7])
}

/// The packages, made once.
fn fixture() -> &'static Fixture {
    static MADE: OnceLock<Fixture> = OnceLock::new();
    MADE.get_or_init(make)
}

/// Returns the version of the libtorch of this process, such as `2.11.0`.
fn libtorch_version() -> String {
    let version = overdrive_sys::build_info::libtorch_version().unwrap();
    version.split('+').next().unwrap().to_owned()
}

/// Returns the interpreter that has `modules` and the torch of this libtorch. AOTInductor also needs a C++ compiler.
///
/// # Panics
/// If one of them is missing, with what to install or set.
fn python(modules: &[&str]) -> String {
    let python = on_python::python(&[&["torch"], modules].concat());
    let version = "import torch; print(torch.__version__.split('+')[0])";
    let output = Command::new(&python).args(["-c", version]).output();
    let found = String::from_utf8(output.unwrap().stdout).unwrap();
    let (found, wanted) = (found.trim(), libtorch_version());
    assert!(
        found == wanted,
        "{python} has torch {found}, and this libtorch is {wanted}: install torch {wanted}"
    );
    let compiler = std::env::var("CXX").unwrap_or_else(|_| "g++".to_owned());
    let output = Command::new(&compiler).arg("--version").output();
    assert!(
        output.is_ok_and(|output| output.status.success()),
        "AOTInductor needs a C++ compiler, and {compiler} does not run: set CXX to one that does"
    );
    python
}

/// Runs a script of this crate in `folder`.
fn run_script(python: &str, folder: &Path, script: &str, arguments: &[std::ffi::OsString]) {
    let output = Command::new(python)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(script))
        .args(arguments)
        // AOTInductor's cache would otherwise answer for code that has changed.
        .env("TORCHINDUCTOR_CACHE_DIR", folder.join("cache"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{script}: {text}");
}

fn make() -> Fixture {
    let python = python(&["transformers", "safetensors"]);
    let folder = tempfile::tempdir().unwrap();
    let config = LlamaConfig {
        vocab_size: 64,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        max_position_embeddings: 32,
        tie_word_embeddings: true,
        // Large enough that the logits of two models are far apart.
        initializer_range: 0.3,
        ..LlamaConfig::default()
    };
    for (name, seed) in [("a", 1), ("b", 2)] {
        let options = InitOptions {
            seed,
            ..InitOptions::default()
        };
        let model = CausalLm::new(&config.clone().into(), &options).unwrap();
        let path = folder.path().join(name);
        model
            .save_pretrained(path, &SaveOptions::default())
            .unwrap();
    }
    let (tokens, logits) = (
        folder.path().join("ids.st"),
        folder.path().join("logits.st"),
    );
    Tensor::write_safetensors(&[("ids", &ids())], &tokens).unwrap();

    let at = |name: &str| folder.path().join(name).into_os_string();
    let run = |script: &str, arguments: &[std::ffi::OsString]| {
        run_script(&python, folder.path(), script, arguments);
    };
    run(
        "tests/python/reference.py",
        &[tokens.into(), logits.into(), at("a"), at("b")],
    );
    let flags = ["--models", "logits,prefill,decode", "--max-batch", "4"].map(Into::into);
    let mut arguments = vec!["--model".into(), at("a"), "--output".into(), at("tiny.pt2")];
    arguments.extend(flags);
    run("python/compile_package.py", &arguments);
    run("tests/python/plain_package.py", &[at("plain.pt2")]);
    Fixture { folder }
}

fn furthest(a: &Tensor, b: &Tensor) -> f64 {
    (a - b).abs().max().double_value(&[])
}

fn load(path: &Path, model: &str) -> CompiledModel {
    CompiledModel::load(path, &LoadOptions::for_model(model)).unwrap()
}

fn logits(model: &CompiledModel, ids: &Tensor) -> Tensor {
    model.run(&[ids]).unwrap().remove(0)
}

fn eager(model: &CausalLm, ids: &Tensor) -> Tensor {
    tch::no_grad(|| model.forward(ForwardInput::new(ids))).unwrap()
}

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn a_package_of_a_folder_of_ours_gives_the_logits_of_transformers_and_ours_on_python() {
    let fixture = fixture();
    let model = load(&fixture.package(), "logits");
    assert_eq!(model.input_names(), ["input_ids"]);
    assert_eq!(model.output_names(), ["logits"]);
    assert_eq!(model.info().device(), "cpu");
    let manifest = model.info().manifest.as_ref().unwrap();
    assert_eq!(
        (manifest.torch.as_str(), manifest.model_type.as_str()),
        (libtorch_version().as_str(), "llama")
    );

    let found = logits(&model, &fixture.ids());
    assert!(furthest(&fixture.logits_of("a"), &fixture.logits_of("b")) > 1.0);
    assert!(furthest(&found, &fixture.logits_of("a")) < TOLERANCE);
    let ours = fixture.model("a");
    assert!(furthest(&found, &eager(&ours, &fixture.ids())) < TOLERANCE);

    let named = model.run_named(&[("input_ids", &fixture.ids())]).unwrap();
    assert_eq!(named[0].0, "logits");
    assert_eq!(named[0].1, found);
    // Every size within the bounds, one among them.
    for (rows, len) in [(1, 1), (4, 1), (1, 32), (2, 9)] {
        let ids = Tensor::arange(rows * len, (Kind::Int64, Device::Cpu)) * 7 + len;
        let ids = ids.remainder(64).view([rows, len]);
        let far = furthest(&logits(&model, &ids), &eager(&ours, &ids));
        assert!(far < TOLERANCE, "{rows} x {len}: {far}");
    }
}

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn inputs_that_the_code_was_not_compiled_for_are_refused_by_name_on_python() {
    let fixture = fixture();
    let model = load(&fixture.package(), "logits");
    let error = |inputs: &[&Tensor]| model.run(inputs).unwrap_err().to_string();
    let ids = |rows: i64, len: i64| Tensor::zeros([rows, len], (Kind::Int64, Device::Cpu));

    assert!(
        error(&[]).contains("0 inputs were given; the model takes 1 (input_ids)"),
        "{}",
        error(&[])
    );
    let text = error(&[&ids(5, 3)]);
    assert!(
        text.contains("batch in 1..=4") && text.contains("[5, 3]"),
        "{text}"
    );
    assert!(error(&[&ids(1, 33)]).contains("length in 1..=32"));
    assert!(error(&[&ids(1, 0)]).contains("length in 1..=32"));
    assert!(error(&[&ids(2, 3).to_kind(Kind::Float)]).contains("int64"));
    assert!(error(&[&ids(2, 3).view([6])]).contains("[6]"));

    let one = ids(1, 1);
    let named = |inputs: &[(&str, &Tensor)]| model.run_named(inputs).unwrap_err().to_string();
    assert!(named(&[("ids", &one)]).contains("no input \"ids\""));
    assert!(named(&[("input_ids", &one), ("input_ids", &one)]).contains("given twice"));
    assert!(named(&[]).contains("\"input_ids\" is missing"));

    // A view is copied, not misread.
    let wide = fixture.ids().repeat([1, 2]);
    let view = wide.narrow(1, 0, 7);
    assert!(!view.is_contiguous());
    assert_eq!(logits(&model, &view), logits(&model, &fixture.ids()));
}

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn a_package_decodes_over_our_static_cache_as_our_model_does_on_python() {
    let fixture = fixture();
    let mut decoder = CompiledDecoder::load(fixture.package(), 3, &LoadOptions::default()).unwrap();
    let whole = fixture.logits_of("a");
    for _ in 0..2 {
        let first = decoder.prefill(&fixture.ids().narrow(1, 0, 4)).unwrap();
        assert!(furthest(&first, &whole.narrow(1, 3, 1)) < TOLERANCE);
        for place in 4..7 {
            let found = decoder.step(&fixture.ids().narrow(1, place, 1)).unwrap();
            let far = furthest(&found, &whole.narrow(1, place, 1));
            assert!(far < TOLERANCE, "token {place}: {far}");
        }
        decoder.reset();
    }
    // Our own model continues from the cache that the package filled.
    let _logits = decoder.prefill(&fixture.ids().narrow(1, 0, 6)).unwrap();
    let mut cache = overdrive_kv_cache::KvCache::fork(decoder.cache()).unwrap();
    let last = fixture.ids().narrow(1, 6, 1);
    let input = ForwardInput::new(&last).with_cache(&mut *cache);
    let found = tch::no_grad(|| fixture.model("a").forward(input)).unwrap();
    assert!(furthest(&found, &whole.narrow(1, 6, 1)) < TOLERANCE);

    let error = decoder.prefill(&Tensor::zeros([3, 27], (Kind::Int64, Device::Cpu)));
    assert!(matches!(error.unwrap_err(), Error::Cache(_)));
    let error = decoder.step(&Tensor::zeros([2, 1], (Kind::Int64, Device::Cpu)));
    assert!(error.unwrap_err().to_string().contains("(3, T)"));
    let error = CompiledDecoder::load(fixture.package(), 5, &LoadOptions::default());
    let mut too_wide = error.unwrap();
    let error = too_wide.step(&Tensor::zeros([5, 1], (Kind::Int64, Device::Cpu)));
    assert!(error.unwrap_err().to_string().contains("batch in 1..=4"));
}

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn a_model_whose_name_is_a_prefix_of_another_is_not_confused_with_it_on_python() {
    let fixture = fixture();
    let options = |model: &str| LoadOptions {
        allow_unknown_version: true,
        ..LoadOptions::for_model(model)
    };
    let refused = CompiledModel::load(fixture.plain(), &LoadOptions::for_model("model"));
    assert!(matches!(refused.unwrap_err(), Error::UnknownVersion { .. }));
    let refused = CompiledModel::load(fixture.plain(), &LoadOptions::default());
    assert!(matches!(refused.unwrap_err(), Error::NoSuchModel { .. }));

    let affine = CompiledModel::load(fixture.plain(), &options("model")).unwrap();
    assert_eq!(affine.input_names(), ["0", "offset"]);
    assert_eq!(affine.output_names(), ["y", "sum"]);
    let x = Tensor::from_slice(&[1f32, 2.0, 3.0]).repeat([2, 1]);
    let offset = Tensor::from_slice(&[10f32, 20.0, 30.0]);
    let found = affine.run_named(&[("offset", &offset), ("0", &x)]).unwrap();
    assert_eq!(
        Vec::<f32>::try_from(found[0].1.get(0)).unwrap(),
        [12.0, 26.0, 42.0]
    );
    assert_eq!(Vec::<f32>::try_from(&found[1].1).unwrap(), [6.0, 6.0]);

    let square = CompiledModel::load(fixture.plain(), &options("model2")).unwrap();
    let found = square
        .run(&[&Tensor::from_slice(&[1f32, 2.0, 3.0])])
        .unwrap();
    assert_eq!(Vec::<f32>::try_from(&found[0]).unwrap(), [1.0, 4.0, 9.0]);

    // The package has no manifest, so the code itself checks its inputs; its exceptions become errors.
    let wide = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
    let error = affine.run(&[&wide, &offset]).unwrap_err();
    assert!(matches!(error, Error::Sys(_)), "{error:?}");
    let error = square
        .run(&[&Tensor::from_slice(&[1i64, 2, 3])])
        .unwrap_err();
    assert!(matches!(error, Error::Sys(_)), "{error:?}");
    assert!(matches!(
        square.run(&[]).unwrap_err(),
        Error::InputCount { .. }
    ));
    // Its one runner still works after the errors.
    let found = square
        .run(&[&Tensor::from_slice(&[3f32, 3.0, 3.0])])
        .unwrap();
    assert_eq!(found[0].double_value(&[2]), 9.0);
}

#[test]
#[ignore = "needs Python with the torch of this libtorch, transformers and safetensors"]
fn a_real_package_is_refused_for_another_version_and_after_damage_on_python() {
    let fixture = fixture();
    let path = fixture.folder.path().join("other.pt2");
    let mut entries = read_archive(&fixture.package());
    for (name, bytes) in &mut entries {
        if name.ends_with("_metadata.json") {
            *bytes = String::from_utf8(bytes.clone())
                .unwrap()
                .replace(&libtorch_version(), "2.12.1")
                .into();
        }
    }
    write_archive(&path, &entries);
    let error = CompiledModel::load(&path, &LoadOptions::for_model("logits")).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains("libtorch 2.12.1")
            && text.contains(&format!("libtorch {}", libtorch_version())),
        "{text}"
    );

    let whole = std::fs::read(fixture.package()).unwrap();
    for part in [whole.len() / 3, whole.len() - 100, whole.len() - 1] {
        std::fs::write(&path, &whole[..part]).unwrap();
        let error = CompiledModel::load(&path, &LoadOptions::for_model("logits")).unwrap_err();
        assert!(matches!(error, Error::Damaged { .. }), "{part}: {error:?}");
    }
}
