//! Claim: a decode step of one sequence takes the time of reading the weights once, a step of eight sequences
//! less than twice that, and sampling takes almost no time.
//!
//! The 100M-parameter Llama of the claims, fp32, 128 tokens in a dynamic cache. The throughput of
//! `decode_step` is in bytes of weights: compare it with the memory bandwidth of the machine
//! (`pytorch/compare_generation.py` prints both). That of `prefill` is in tokens.
//!
//! Analysis: twelve layers and the head are 400 MB; everything else is some tens of microseconds per layer:
//! calls into libtorch, norms, rotary embeddings, attention over a few hundred keys. `sampler` processes a row
//! of 32,000 logits; `scheduler` is a step of the engine with a minimal model.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use overdrive::generation::{
    CacheShape, Engine, EngineConfig, EngineModel, GenerationConfig, RaggedStep, Request, Sampler,
};
use overdrive::kv_cache::{AttendOptions, DynamicCache, KvCache};
use overdrive::transformer::{ForwardInput, Logits};
use overdrive_benches::generation;
use tch::{Device, Kind, Tensor};

const PAST: usize = 128;

fn ids(prompts: &[Vec<i64>]) -> Tensor {
    Tensor::from_slice(&prompts.concat()).view([prompts.len() as i64, -1])
}

fn decode_step(criterion: &mut Criterion) {
    let _no_grad = tch::no_grad_guard();
    let mut group = criterion.benchmark_group("decode_step");
    group.sample_size(20);
    for kind in [Kind::Float, Kind::BFloat16] {
        let model = generation::model(kind).expect("memory for 100M parameters");
        let bytes = model.num_parameters() as u64 * kind.elt_size_in_bytes() as u64;
        group.throughput(Throughput::Bytes(bytes));
        for rows in [1, 8] {
            let mut cache = DynamicCache::with_capacity(model.num_layers(), PAST as i64 + 1);
            let prompts = generation::prompts(rows, PAST, 32_000);
            let input = ids(&prompts);
            let input = ForwardInput::new(&input).with_cache(&mut cache);
            let _logits = model
                .forward(input.with_logits(Logits::Last))
                .expect("the prompts");
            let token = Tensor::full([rows as i64, 1], 7, (Kind::Int64, Device::Cpu));
            let name = BenchmarkId::new(format!("{kind:?}"), rows);
            group.bench_function(name, |bench| {
                bench.iter(|| {
                    let input = ForwardInput::new(&token).with_cache(&mut cache);
                    let logits = model.forward(input.with_logits(Logits::Last));
                    cache.truncate(PAST as i64).expect("one was added");
                    logits.expect("a step")
                });
            });
        }
    }
}

fn prefill(criterion: &mut Criterion) {
    let _no_grad = tch::no_grad_guard();
    let mut group = criterion.benchmark_group("prefill");
    group.sample_size(10);
    let model = generation::model(Kind::Float).expect("memory for 100M parameters");
    for tokens in [128, 512] {
        group.throughput(Throughput::Elements(tokens as u64));
        let input = ids(&generation::prompts(1, tokens, 32_000));
        group.bench_function(BenchmarkId::from_parameter(tokens), |bench| {
            bench.iter(|| {
                let mut cache = DynamicCache::with_capacity(model.num_layers(), tokens as i64);
                let input = ForwardInput::new(&input).with_cache(&mut cache);
                model
                    .forward(input.with_logits(Logits::Last))
                    .expect("a prompt")
            });
        });
    }
}

fn sampler(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sampler");
    let logits = Vec::<f32>::try_from(Tensor::randn([32_000], (Kind::Float, Device::Cpu)) * 4.0)
        .expect("a vector");
    let sampling = |top_k, top_p| GenerationConfig {
        do_sample: true,
        top_k,
        top_p,
        seed: Some(1),
        ..GenerationConfig::default()
    };
    let penalty = GenerationConfig {
        repetition_penalty: 1.1,
        ..GenerationConfig::default()
    };
    for (name, config) in [
        ("greedy", GenerationConfig::default()),
        ("repetition_penalty", penalty),
        ("top_k", sampling(50, 1.0)),
        ("top_p", sampling(0, 0.9)),
        ("all", sampling(0, 1.0)),
    ] {
        let mut sampler = Sampler::new(&config, 0, 0).expect("a valid configuration");
        let (mut scores, present) = (logits.clone(), vec![5; 200]);
        group.bench_function(name, |bench| {
            bench.iter(|| {
                scores.copy_from_slice(&logits);
                sampler
                    .next_token(&mut scores, &present, 100)
                    .expect("finite logits")
            });
        });
    }
}

/// A minimal model, one layer with one head of two channels, so that the engine's own work is measured.
struct Idle {
    logits: Tensor,
}

impl EngineModel for Idle {
    fn cache_shape(&self) -> overdrive::generation::Result<CacheShape> {
        Ok(CacheShape {
            windows: vec![None],
            kv_heads: 1,
            head_dim: 2,
            ..CacheShape::default()
        })
    }

    fn vocab_size(&self) -> usize {
        64
    }

    fn context(&self) -> usize {
        1 << 30
    }

    fn forward(&self, step: RaggedStep<'_, '_>) -> overdrive::generation::Result<Tensor> {
        let tokens = step.input_ids.size()[1];
        let entries = Tensor::zeros([1, 1, tokens, 2], (Kind::Float, Device::Cpu));
        let options = AttendOptions::default();
        let _mixed = step
            .cache
            .attend(0, &entries, &entries, &entries, &options)?;
        Ok(self.logits.narrow(0, 0, step.logits_indices.size()[0]))
    }
}

fn scheduler(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("scheduler");
    for texts in [8, 64, 256] {
        let model = Idle {
            logits: Tensor::randn([256, 64], (Kind::Float, Device::Cpu)),
        };
        let config = EngineConfig {
            num_blocks: Some(1 << 20),
            ..EngineConfig::default()
        };
        let mut engine = Engine::new(model, config).expect("an engine");
        let request = GenerationConfig {
            max_new_tokens: Some(1 << 22),
            ..GenerationConfig::default()
        };
        for text in 0..texts {
            engine
                .submit(Request::new(vec![text % 64; 32], request.clone()))
                .expect("room");
        }
        for _ in 0..100 {
            engine.step().expect("the prompts are read");
        }
        group.throughput(Throughput::Elements(texts as u64));
        group.bench_function(BenchmarkId::from_parameter(texts), |bench| {
            bench.iter(|| engine.step().expect("a step"));
        });
    }
}

criterion_group!(benches, decode_step, prefill, sampler, scheduler);
criterion_main!(benches);
