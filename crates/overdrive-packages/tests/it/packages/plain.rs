//! Packages without a manifest: the checks of overdrive-sys, which need no model of transformers.

use overdrive_sys::compiled::{Package, PackageOptions};

use super::*;

/// A package of `plain_package.py`, made once.
fn plain() -> PathBuf {
    static MADE: OnceLock<tempfile::TempDir> = OnceLock::new();
    let made = MADE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("plain.pt2").into_os_string();
        let script = "tests/python/plain_package.py";
        run_script(&python(&[]), folder.path(), script, &[output]);
        folder
    });
    made.path().join("plain.pt2")
}

fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

#[test]
#[ignore = "needs Python with the torch of this libtorch"]
fn another_number_of_inputs_than_the_code_takes_is_refused_before_it_runs_on_python() {
    let path = plain();
    let square = Package::open(&path, "model2/", PackageOptions::default()).unwrap();
    let x = floats(&[1.0, 2.0, 3.0]);
    for given in [vec![], vec![&x, &x]] {
        let error = square.run(&given).unwrap_err();
        assert!(
            matches!(error, overdrive_sys::Error::BadArgument { .. }),
            "{error}"
        );
        let expected = format!("takes 1 inputs, but {} were given", given.len());
        assert!(error.to_string().contains(&expected), "{error}");
    }
    // Its code computes addresses from contiguous sizes.
    let one = floats(&[2.0]).expand([3], false);
    let error = square.run(&[&one]).unwrap_err().to_string();
    assert!(
        error.contains("input 0") && error.contains("strides [0]"),
        "{error}"
    );
    let error = square.run(&[&Tensor::new()]).unwrap_err().to_string();
    assert!(error.contains("input 0 is undefined"), "{error}");
    let found = square.run(&[&x]).unwrap();
    assert_eq!(Vec::<f32>::try_from(&found[0]).unwrap(), [1.0, 4.0, 9.0]);
}

#[test]
#[ignore = "needs Python with the torch of this libtorch"]
fn a_shared_constant_whose_storage_was_resized_is_refused_until_it_is_replaced_on_python() {
    let path = plain();
    let options = LoadOptions {
        allow_unknown_version: true,
        ..LoadOptions::for_model("model3")
    };
    let model = CompiledModel::load(path, &options).unwrap();
    let x = Tensor::ones([16], (Kind::Float, Device::Cpu));
    // The first elements of the result, which are those of the constant.
    let scaled = || -> Result<Vec<f32>, Error> {
        let outputs = model.run(&[&x])?;
        Ok(Vec::<f32>::try_from(outputs[0].narrow(0, 0, 3)).unwrap())
    };
    let weight = |first: f32| Tensor::arange(16, (Kind::Float, Device::Cpu)) + f64::from(first);
    assert_eq!(scaled().unwrap(), [2.0, 3.0, 4.0]);
    let share = ReplaceOptions {
        share: true,
        ..ReplaceOptions::default()
    };
    let name = model.constants().unwrap()[0].name.clone();
    let replace =
        |tensor: &Tensor| model.replace_constants(&[(name.clone(), tensor.shallow_clone())], share);
    let shared = weight(5.0);
    replace(&shared).unwrap();
    assert_eq!(scaled().unwrap(), [5.0, 6.0, 7.0]);
    // The handle of the caller may go, or be given other memory: the package keeps its own.
    let mut other = shared.shallow_clone();
    other.set_data(&weight(0.0));
    assert_eq!(scaled().unwrap(), [5.0, 6.0, 7.0]);

    let mut shared_again = weight(8.0);
    replace(&shared_again).unwrap();
    // The storage moves, and the memory that the code would read is free.
    let _grown = shared_again.resize_([1 << 20]);
    for error in [
        scaled().unwrap_err().to_string(),
        model.constant(&name).unwrap_err().to_string(),
    ] {
        assert!(
            error.contains(&name) && error.contains("resized"),
            "{error}"
        );
    }
    replace(&weight(1.0)).unwrap();
    assert_eq!(scaled().unwrap(), [1.0, 2.0, 3.0]);
    assert_eq!(model.constant(&name).unwrap().unwrap(), weight(1.0));
}
