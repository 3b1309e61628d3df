//! Rows of embeddings and heads for single tokens (`trainable_token_indices`), against PEFT's.

use overdrive_lora::{
    AddOptions, LoadAdapterOptions, add_adapter, load_adapter, load_adapter_for_rows, read_config,
    save_adapter,
};
use overdrive_nn::Linear;
use overdrive_safetensors::MappedFile;
use tch::{Kind, Tensor};

use crate::common::{Host, fixture, read};

fn weight(name: &str, which: &str) -> Tensor {
    let file = MappedFile::open(fixture("peft_tokens/expected.safetensors")).unwrap();
    read(&file, &format!("{name} {which}"))
}

fn model() -> Host {
    let mut host = Host::default();
    for name in ["q_proj", "lm_head"] {
        let linear = Linear::dense(weight(name, "base"), None).unwrap();
        host.layers.push((name.to_owned(), linear));
    }
    let embedding = (
        "embed_tokens.weight".to_owned(),
        weight("embed_tokens", "base"),
    );
    host.parameters.push(embedding);
    host
}

#[test]
fn rows_of_tokens_replace_those_of_the_model_and_are_saved_again() {
    let mut host = model();
    let folder = fixture("peft_tokens");
    load_adapter(&mut host, &folder, "mine", &LoadAdapterOptions::default()).unwrap();
    assert_eq!(host.parameters[0].1, weight("embed_tokens", "merged"));
    assert_ne!(host.parameters[0].1, weight("embed_tokens", "base"));
    let head = host
        .layer("lm_head")
        .weight()
        .to_dense(Kind::Float)
        .unwrap();
    assert_eq!(head, weight("lm_head", "merged"));

    let again = tempfile::tempdir().unwrap();
    save_adapter(&mut host, again.path(), "mine").unwrap();
    let file = "adapter_model.safetensors";
    let theirs = MappedFile::open(folder.join(file)).unwrap();
    let ours = MappedFile::open(again.path().join(file)).unwrap();
    assert_eq!(ours.tensors().len(), theirs.tensors().len());
    for tensor in theirs.tensors() {
        assert_eq!(read(&ours, tensor.name()), read(&theirs, tensor.name()));
    }
    let (ours, theirs) = (
        read_config(again.path()).unwrap(),
        read_config(&folder).unwrap(),
    );
    assert_eq!(ours.trainable_token_indices, theirs.trainable_token_indices);
}

#[test]
fn rows_of_tokens_are_refused_where_they_cannot_be_trained_or_would_change_other_adapters() {
    let mut host = model();
    let folder = fixture("peft_tokens");
    let trainable = LoadAdapterOptions {
        trainable: true,
        ..Default::default()
    };
    let config = read_config(&folder).unwrap();
    let errors = [
        load_adapter(&mut host, &folder, "mine", &trainable).unwrap_err(),
        add_adapter(&mut host, "mine", &config, &AddOptions::default()).unwrap_err(),
        load_adapter_for_rows(&mut host, &folder, "mine", &LoadAdapterOptions::default())
            .unwrap_err(),
    ];
    for error in errors {
        assert!(
            error
                .to_string()
                .starts_with("`trainable_token_indices` is set; it must be unset"),
            "{error}"
        );
    }
    assert_eq!(host.parameters[0].1, weight("embed_tokens", "base"));

    // A model with a smaller vocabulary.
    host.parameters[0].1 = weight("embed_tokens", "base").narrow(0, 0, 7).copy();
    let error =
        load_adapter(&mut host, &folder, "mine", &LoadAdapterOptions::default()).unwrap_err();
    assert!(
        error.to_string().contains("6 features and 7 tokens"),
        "{error}"
    );
}
