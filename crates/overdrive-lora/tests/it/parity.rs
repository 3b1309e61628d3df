//! One layer at a time against PEFT's `lora.Linear` (fixtures/gen_peft.py).

use crate::common::{Host, distance, fixture, read, transposed};
use overdrive_lora::{
    AddOptions, LoraConfig, MergeOptions, TargetModules, adapter_names, add_adapter, lora_adapter,
    merge_and_unload,
};
use overdrive_nn::Linear;
use overdrive_safetensors::MappedFile;
use tch::{Kind, Tensor};

/// Sums of a dozen fp32 products in another order.
const TOLERANCE: f64 = 1e-5;

fn case(file: &MappedFile, name: &str) -> Host {
    let own = |key: &str| file.tensor(&format!("{name} {key}")).is_ok();
    let get = |key: &str| read(file, &format!("{name} {key}"));
    let bias = own("bias").then(|| get("bias"));
    let layer = if name.starts_with("conv1d") {
        Linear::new(transposed(get("weight")), bias).unwrap()
    } else {
        Linear::dense(get("weight"), bias).unwrap()
    };
    let mut host = Host {
        layers: vec![("proj".to_owned(), layer)],
        ..Host::default()
    };
    let mut config = LoraConfig::from_json(&file.metadata()[name]).unwrap();
    config.target_modules = Some(TargetModules::names(["proj"]));
    add_adapter(&mut host, "default", &config, &AddOptions::default()).unwrap();
    let adapter = lora_adapter(&host.layers[0].1, "default").unwrap();
    tch::no_grad(|| {
        let set = |target: &Tensor, key: &str| {
            target
                .shallow_clone()
                .copy_(&get(&format!("base_model.model.proj.{key}")));
        };
        set(adapter.a(), "lora_A.weight");
        set(adapter.b(), "lora_B.weight");
        adapter.bias().inspect(|bias| set(bias, "lora_B.bias"));
        adapter
            .magnitude()
            .inspect(|magnitude| set(magnitude, "lora_magnitude_vector"));
    });
    host
}

fn cases(file: &MappedFile) -> Vec<String> {
    let cases: Vec<String> = file.metadata().keys().cloned().collect();
    assert_eq!(cases.len(), 8);
    cases
}

#[test]
fn results_and_gradients_are_those_of_peft() {
    let file = MappedFile::open(fixture("layers.safetensors")).unwrap();
    for name in cases(&file) {
        let get = |key: &str| read(&file, &format!("{name} {key}"));
        for fused in [true, false] {
            let host = case(&file, &name);
            let layer = &host.layers[0].1;
            let x = get("x").set_requires_grad(true);
            let y = layer.forward_with(&x, fused).unwrap();
            let apart = distance(&y, &get("y"));
            assert!(apart < TOLERANCE, "{name}: y {apart:e}");
            (&y * get("probe")).sum(Kind::Float).backward();
            let adapter = lora_adapter(layer, "default").unwrap();
            let check = |tensor: &Tensor, key: &str| {
                let apart = distance(&tensor.grad(), &get(key));
                assert!(apart < TOLERANCE, "{name}: {key} {apart:e}");
            };
            check(&x, "x.grad");
            check(adapter.a(), "grad base_model.model.proj.lora_A");
            check(adapter.b(), "grad base_model.model.proj.lora_B");
            if let Some(bias) = adapter.bias() {
                check(bias, "grad base_model.model.proj.lora_B.bias");
            }
            if let Some(magnitude) = adapter.magnitude() {
                check(
                    magnitude,
                    "grad base_model.model.proj.lora_magnitude_vector",
                );
            }
        }
    }
}

#[test]
fn merged_weights_are_those_of_peft() {
    let file = MappedFile::open(fixture("layers.safetensors")).unwrap();
    for name in cases(&file) {
        let mut host = case(&file, &name);
        let x = read(&file, &format!("{name} x"));
        let before = tch::no_grad(|| host.layers[0].1.forward(&x).unwrap());
        merge_and_unload(&mut host, &MergeOptions::default()).unwrap();
        let after = host.layers[0].1.forward(&x).unwrap();
        assert!(distance(&after, &before) < TOLERANCE, "{name}");
        let overdrive_nn::LinearWeight::Dense { weight, .. } = host.layers[0].1.weight() else {
            panic!("the base is dense");
        };
        let apart = distance(weight, &read(&file, &format!("{name} merged")));
        assert!(apart < TOLERANCE, "{name}: {apart:e}");
        assert!(adapter_names(&mut host).unwrap().is_empty());
    }
}
