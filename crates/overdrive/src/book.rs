//! The guide's Rust, compiled and run: each page of `docs/src` is the documentation of an item here, and so each
//! ```` ```rust ```` block in it a doctest.
//!
//! `cargo test -p overdrive --doc book` runs them. A page that is added to the guide and holds Rust gets a line.

/// One item a page, named as the page is.
macro_rules! pages {
    ($($name:ident = $path:literal;)*) => {
        $(
            #[doc = include_str!(concat!("../../../docs/src/", $path))]
            mod $name {}
        )*
    };
}

pages! {
    setup = "setup.md";
    training = "training.md";
    finetuning = "finetuning.md";
    settings = "settings.md";
    symptoms = "symptoms.md";
    migration = "migration.md";
    architecture = "architecture.md";
    extending = "extending.md";

    accumulation = "crates/accumulation.md";
    attention = "crates/attention.md";
    autograd = "crates/autograd.md";
    build = "crates/build.md";
    checkpointing = "crates/checkpointing.md";
    core = "crates/core.md";
    datasets = "crates/datasets.md";
    distributed = "crates/distributed.md";
    fused = "crates/fused.md";
    generation = "crates/generation.md";
    graphs = "crates/graphs.md";
    hub = "crates/hub.md";
    kernels = "crates/kernels.md";
    kv_cache = "crates/kv-cache.md";
    lora = "crates/lora.md";
    nn = "crates/nn.md";
    onnx = "crates/onnx.md";
    optim = "crates/optim.md";
    packages = "crates/packages.md";
    pickle = "crates/pickle.md";
    precision = "crates/precision.md";
    profiling = "crates/profiling.md";
    quantization = "crates/quantization.md";
    safetensors = "crates/safetensors.md";
    serve = "crates/serve.md";
    snapshot = "crates/snapshot.md";
    sys = "crates/sys.md";
    tracking = "crates/tracking.md";
    trainer = "crates/trainer.md";
    transformer = "crates/transformer.md";
}
