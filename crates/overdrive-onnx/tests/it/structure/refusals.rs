//! Models and options that an export refuses.

use super::*;

#[test]
fn an_adapter_that_is_not_merged_is_refused_by_name() {
    let mut model = model();
    let lora = LoraConfig {
        r: 2,
        target_modules: Some(TargetModules::AllLinear),
        ..LoraConfig::default()
    };
    overdrive_lora::add_adapter(&mut model, "taught", &lora, &AddOptions::default()).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.onnx");
    let error = export(&mut model, &path, &ExportOptions::default()).unwrap_err();
    assert!(matches!(error, Error::Adapters { .. }));
    assert_eq!(
        error.to_string(),
        "the layer `model.layers.0.self_attn.q_proj` has unmerged adapters (taught), which an ONNX graph \
         cannot hold; merge them with `overdrive_lora::merge_and_unload`, or remove them with `unload`"
    );
    assert!(names(dir.path()).is_empty());
    // A merged adapter is part of the weights, even while the layer still holds it.
    overdrive_lora::merge_adapters(&mut model, None, &Default::default()).unwrap();
    export(&mut model, &path, &ExportOptions::default()).unwrap();
}

#[test]
fn invalid_options_are_refused_with_the_allowed_values() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |options: ExportOptions| {
        let error = export(&mut model(), dir.path().join("m.onnx"), &options).unwrap_err();
        assert!(names(dir.path()).is_empty());
        error.to_string()
    };
    let default = ExportOptions::default;
    assert_eq!(
        refused(ExportOptions {
            opset: 17,
            ..default()
        }),
        "`opset` is 17; it must be from 18 to 26"
    );
    let standard = ExportOptions {
        attention: Attention::Standard,
        ..default()
    };
    assert_eq!(
        refused(standard),
        "`attention` is standard with opset 21; it must be composed with an opset below 23; standard needs opset 23"
    );
    let metadata = vec![("overdrive.x".to_owned(), String::new())];
    assert_eq!(
        refused(ExportOptions {
            metadata,
            ..default()
        }),
        "`metadata` is `overdrive.x`; it must be without keys that begin with `overdrive.`"
    );
    let old = ExportOptions {
        opset: 18,
        ..default()
    };
    let error = export(&mut quantized("fp8"), dir.path().join("m.onnx"), &old).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`model.layers.0.self_attn.q_proj.weight` is of 8-bit floats with opset 18, which cannot be \
         written as ONNX; set `opset` to 19 or more"
    );
}

#[test]
fn heads_that_group_query_attention_does_not_take_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let options = ExportOptions {
        attention: Attention::GroupQuery,
        ..ExportOptions::default()
    };
    let path = dir.path().join("m.onnx");
    let error = export(&mut fixture("mistral"), &path, &options).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the head size with `GroupQueryAttention` is 12 instead of a multiple of 8, which cannot be \
         written as ONNX; choose another `attention`"
    );
}
