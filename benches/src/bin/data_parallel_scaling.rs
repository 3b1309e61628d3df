//! The samples per second of data parallel training, which `compare_ddp.py` compares with PyTorch's.
//!
//! ```text
//! python3 benches/pytorch/compare_ddp.py
//! ```
//!
//! A perceptron of 512–1024–1024–1024–10 (2.6 million parameters, 10.6 MB of gradients), SGD, one thread per
//! process; the median of 30 steps after 5. Its argument is the number of samples per rank (32).

use std::time::Instant;

use overdrive::distributed::{
    DdpConfig, DistributedDataParallel, Error, GroupConfig, init_process_group,
};
use overdrive::optim::{Optimizer, ParamGroup, Sgd, SgdConfig};
use overdrive_benches::median;
use tch::nn::Module;
use tch::{Kind, Tensor, nn};

const SIZES: [i64; 5] = [512, 1024, 1024, 1024, 10];

fn main() -> anyhow::Result<()> {
    let batch: i64 = std::env::args()
        .nth(1)
        .map_or(Ok(32), |text| text.parse())?;
    tch::set_num_threads(1);
    tch::manual_seed(0);
    let group = init_process_group(GroupConfig::default())?;
    let store = nn::VarStore::new(group.device());
    let mut model = nn::seq();
    for (layer, size) in SIZES.windows(2).enumerate() {
        let path = store.root() / format!("layer{layer}");
        model = model.add(nn::linear(path, size[0], size[1], Default::default()));
        if layer + 2 < SIZES.len() {
            model = model.add_fn(Tensor::relu);
        }
    }
    let ddp = DistributedDataParallel::from_var_store(&group, &store, DdpConfig::default())?;
    let groups = vec![ParamGroup::new(
        "all",
        store.variables().into_iter().collect(),
    )];
    let config = SgdConfig {
        learning_rate: 0.01,
        ..SgdConfig::default()
    };
    let mut optimizer = Sgd::new(groups, config)?;
    let input = Tensor::randn([batch, SIZES[0]], (Kind::Float, group.device()));
    let target = Tensor::randint(10, [batch], (Kind::Int64, group.device()));
    let mut times = Vec::new();
    for step in 0..35 {
        group.barrier()?;
        let start = Instant::now();
        let loss = ddp
            .forward(|| Ok::<_, Error>(model.forward(&input).cross_entropy_for_logits(&target)))?;
        ddp.backward(&loss)?;
        optimizer.step()?;
        optimizer.zero_grad()?;
        if step >= 5 {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    if group.is_main() {
        let samples = batch as f64 * group.world_size() as f64;
        println!("samples_per_second {:.1}", samples / median(times));
    }
    Ok(())
}
