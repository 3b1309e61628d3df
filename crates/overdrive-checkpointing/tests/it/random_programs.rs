//! A property: the gradients of a random program equal those without checkpoints bit for bit, for every division into
//! checkpoints and every policy.

use overdrive_autograd::{GradOptions, grad};
use overdrive_checkpointing::{
    CheckpointOptions, OffloadOptions, RegionResult, SavePolicy, SavedTo, checkpoint_with,
    offload_saved_tensors,
};
use proptest::prelude::*;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const SIDE: i64 = 6;

#[derive(Debug, Clone, Copy)]
enum Step {
    Sin,
    Exp,
    Square,
    Gelu,
    Softmax,
    Matmul,
    Batched,
    Dropout,
    Noise,
    Transpose,
    SwapHalves,
    InPlace,
    ThroughBf16,
    Normalise,
    ByItsOwnSum,
}

const STEPS: [Step; 15] = [
    Step::Sin,
    Step::Exp,
    Step::Square,
    Step::Gelu,
    Step::Softmax,
    Step::Matmul,
    Step::Batched,
    Step::Dropout,
    Step::Noise,
    Step::Transpose,
    Step::SwapHalves,
    Step::InPlace,
    Step::ThroughBf16,
    Step::Normalise,
    Step::ByItsOwnSum,
];

/// One step on a matrix of `SIDE` × `SIDE`.
fn run(step: Step, x: &Tensor, weight: &Tensor) -> Result<Tensor, tch::TchError> {
    match step {
        Step::Sin => x.f_sin(),
        Step::Exp => x.f_tanh()?.f_exp(),
        Step::Square => x.f_tanh()?.f_square(),
        Step::Gelu => x.f_gelu("tanh"),
        Step::Softmax => x.f_softmax(-1, Kind::Float),
        Step::Matmul => x.f_matmul(weight),
        Step::Batched => {
            let halves = x.f_view([2, SIDE / 2, SIDE])?;
            halves.f_matmul(weight)?.f_reshape([SIDE, SIDE])
        }
        Step::Dropout => x.f_dropout(0.3, true),
        Step::Noise => x.f_mul(&x.f_rand_like()?),
        Step::Transpose => x.f_transpose(0, 1),
        Step::SwapHalves => {
            let parts = x.f_chunk(2, 1)?;
            Tensor::f_cat(&[&parts[1], &parts[0]], 1)
        }
        Step::InPlace => {
            let mut y = x.f_mul_scalar(0.5)?;
            let _ = y.f_add_scalar_(1.0)?;
            let _ = y.f_relu_()?;
            Ok(y)
        }
        Step::ThroughBf16 => x
            .f_to_kind(Kind::BFloat16)?
            .f_sigmoid()?
            .f_to_kind(Kind::Float),
        Step::Normalise => x.f_layer_norm([SIDE], None::<&Tensor>, None::<&Tensor>, 1e-5, false),
        Step::ByItsOwnSum => x.f_div(&x.f_abs()?.f_sum(Kind::Float)?.f_add_scalar(1.0)?),
    }
}

fn run_all(steps: &[Step], x: &Tensor, weight: &Tensor) -> RegionResult<Tensor> {
    let mut x = x.shallow_clone();
    for step in steps {
        x = run(*step, &x, weight)?;
    }
    Ok(x)
}

/// A stretch of the program, and how it is run.
#[derive(Debug, Clone)]
struct Section {
    steps: Vec<Step>,
    checkpointed: bool,
    nested: bool,
    options: CheckpointOptions,
}

fn run_section(part: &Section, x: &Tensor, weight: &Tensor) -> Tensor {
    if !part.checkpointed {
        return run_all(&part.steps, x, weight).unwrap();
    }
    let (part, captured) = (part.clone(), weight.shallow_clone());
    checkpoint_with(&[x], &part.options.clone(), move |inputs| {
        if !part.nested {
            return run_all(&part.steps, &inputs[0], &captured);
        }
        let (first, second) = part.steps.split_at(part.steps.len() / 2);
        let middle = run_all(first, &inputs[0], &captured)?;
        let (second, captured) = (second.to_vec(), captured.shallow_clone());
        Ok(checkpoint_with(&[&middle], &part.options, move |inputs| {
            run_all(&second, &inputs[0], &captured)
        })?)
    })
    .unwrap()
}

fn sections() -> impl Strategy<Value = Vec<Section>> {
    let policy = prop_oneof![
        Just(SavePolicy::Nothing),
        Just(SavePolicy::Matmuls),
        Just(SavePolicy::MatmulsAndAttention),
        // Random operators too: the generator must stand where it would.
        Just(SavePolicy::Operators(vec![
            "aten::rand_like".to_owned(),
            "aten::tanh".to_owned()
        ])),
        // Not what `InPlace` writes to: that is refused.
        Just(SavePolicy::custom(|call| {
            call.operator.name() != "aten::mul" && call.occurrence % 2 == 1
        })),
    ];
    let steps = proptest::collection::vec(proptest::sample::select(STEPS.to_vec()), 1..7);
    let part = (steps, any::<[bool; 4]>(), policy).prop_map(|(steps, flags, policy)| Section {
        steps,
        checkpointed: flags[0],
        nested: flags[1],
        options: CheckpointOptions {
            early_stop: flags[2],
            debug: flags[3],
            policy,
            ..CheckpointOptions::default()
        },
    });
    proptest::collection::vec(part, 1..5)
}

fn gradients(make: impl FnOnce(&Tensor, &Tensor) -> Tensor) -> Vec<Option<Tensor>> {
    tch::manual_seed(17);
    let x = Tensor::randn([SIDE, SIDE], F32).set_requires_grad(true);
    let weight = Tensor::randn([SIDE, SIDE], F32).set_requires_grad(true);
    let y = make(&x, &weight);
    let options = GradOptions {
        allow_unused: true,
        ..GradOptions::default()
    };
    grad(&[&y.square().sum(Kind::Float)], &[&x, &weight], &options).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn gradients_do_not_depend_on_how_a_program_is_checkpointed(parts in sections(), offload in any::<bool>()) {
        let _generator = crate::generator();
        let plain = gradients(|x, weight| {
            parts.iter().fold(x.shallow_clone(), |x, part| run_all(&part.steps, &x, weight).unwrap())
        });
        let checkpointed = gradients(|x, weight| {
            let to_disk = OffloadOptions {
                to: SavedTo::Disk { folder: None },
                min_bytes: 16,
                prefetch: 1,
            };
            let _offload = offload.then(|| offload_saved_tensors(&to_disk, &[]).unwrap());
            parts.iter().fold(x.shallow_clone(), |x, part| run_section(part, &x, weight))
        });
        prop_assert_eq!(checkpointed, plain);
    }
}
