//! Peak memory as a function of depth. One test, because the statistics are those of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use overdrive_checkpointing::{
    CheckpointOptions, OffloadOptions, Plan, SavePolicy, SavedTo, Schedule, measure_blocks,
    offload_saved_tensors, scope,
};
use overdrive_sys::memory;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const DIM: i64 = 64;

/// One block's weights; all blocks share them, so that their gradients do not grow with depth.
struct Block {
    up: Tensor,
    down: Tensor,
}

fn forward(block: &Block, x: &Tensor) -> Result<Tensor, Box<dyn std::error::Error + Send + Sync>> {
    let none = None::<&Tensor>;
    let normed = x.f_layer_norm([DIM], none, none, 1e-5, false)?;
    let hidden = normed
        .f_matmul(&block.up)?
        .f_gelu("none")?
        .f_dropout(0.1, true)?;
    Ok(x.f_add(&hidden.f_matmul(&block.down)?)?)
}

/// Peak bytes over what there was before, of a forward and a backward.
fn peak(run: impl FnOnce() -> Tensor) -> u64 {
    let before = memory::stats(Device::Cpu).unwrap().allocated_bytes;
    memory::reset_peak(Device::Cpu).unwrap();
    run().square().mean(Kind::Float).backward();
    memory::stats(Device::Cpu).unwrap().peak_allocated_bytes - before
}

#[test]
fn memory_grows_with_the_root_of_depth_under_sqrt_segments_and_by_inputs_alone_per_block() {
    let weight = |rows, columns| {
        (Tensor::randn([rows, columns], F32) * 0.05)
            .detach()
            .set_requires_grad(true)
    };
    let block = || Block {
        up: weight(DIM, 4 * DIM),
        down: weight(4 * DIM, DIM),
    };
    let shared = block();
    let blocks: Vec<Block> = (0..64)
        .map(|_| Block {
            up: shared.up.shallow_clone(),
            down: shared.down.shallow_clone(),
        })
        .collect();
    let x = Tensor::randn([256, DIM], F32);
    let options = CheckpointOptions::default();
    let keeping = CheckpointOptions::keeping(SavePolicy::Matmuls);
    let with = |depth: usize, schedule: &Schedule, options: &CheckpointOptions| {
        scope(|scope| {
            peak(|| {
                scope
                    .scheduled(&blocks[..depth], schedule, &x, options, forward)
                    .unwrap()
            })
        })
    };
    // Gradients are there from the first run on.
    with(4, &Schedule::Never, &options);

    let input = 256 * DIM as u64 * 4;
    let plain = [16, 64].map(|depth| with(depth, &Schedule::Never, &options));
    let every = [16, 64].map(|depth| with(depth, &Schedule::EveryBlock, &options));
    let sqrt = [16, 64].map(|depth| with(depth, &Schedule::SqrtSegments, &options));
    let selective = [16, 64].map(|depth| with(depth, &Schedule::EveryBlock, &keeping));
    println!(
        "inputs of {input} bytes; plain {plain:?}, every block {every:?}, sqrt {sqrt:?}, selective {selective:?}"
    );

    let growth = |peaks: [u64; 2]| peaks[1] as f64 / peaks[0] as f64;
    assert!(growth(plain) > 3.5, "plain is linear: {plain:?}");
    assert!(
        growth(sqrt) < 2.3,
        "four times the depth, about twice the memory: {sqrt:?}"
    );
    // Per block more, one input more, of 13 that a block saves.
    let slope = (every[1] - every[0]) / 48;
    assert!(
        (slope as f64) < 1.15 * input as f64,
        "{slope} bytes a block: {every:?}"
    );
    assert!(every[1] * 4 < plain[1], "{every:?} against {plain:?}");
    // Products are 5 inputs' worth of a block's activations.
    assert!(
        selective[1] < plain[1] && selective[1] > every[1],
        "{selective:?}"
    );

    // A plan keeps its budget, within what backward itself takes.
    let costs = measure_blocks(16, &x, |index, x| forward(&blocks[index], x)).unwrap();
    let gradients = plain[0] - Plan::for_budget(&costs, u64::MAX).unwrap().plain_peak_bytes;
    let plan = Plan::for_budget(&costs, plain[0] / 2).unwrap();
    let planned = with(16, &plan.schedule(), &options);
    println!(
        "planned {} of {}, found {planned}; beside them {gradients}",
        plan.predicted_peak_bytes, plain[0]
    );
    assert!(planned <= plan.predicted_peak_bytes + 2 * gradients);
    assert!(planned < plain[0] * 7 / 10);

    // Offloading to a file leaves weights and what is being computed.
    let to_disk = OffloadOptions {
        to: SavedTo::Disk { folder: None },
        min_bytes: 1024,
        prefetch: 0,
    };
    let offloaded = peak(|| {
        let _offload = offload_saved_tensors(&to_disk, &[]).unwrap();
        blocks
            .iter()
            .fold(x.shallow_clone(), |x, block| forward(block, &x).unwrap())
    });
    println!("offloaded {offloaded}");
    assert!(offloaded * 8 < plain[1], "{offloaded} against {}", plain[1]);

    // Everything is given back.
    let before = memory::stats(Device::Cpu).unwrap().allocated_bytes;
    with(16, &Schedule::SqrtSegments, &keeping);
    assert_eq!(memory::stats(Device::Cpu).unwrap().allocated_bytes, before);
}
