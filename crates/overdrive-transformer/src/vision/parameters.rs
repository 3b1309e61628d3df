use crate::Init;
use crate::config::VisionConfig;
use crate::parameters::{ParameterRole, ParameterSpec};

/// The name of the tower in a checkpoint.
pub(super) const TOWER: &str = "model.visual";

/// Returns the parameters of a tower in the order of transformers' `named_parameters`. They are never quantized.
pub(crate) fn parameters(config: &VisionConfig) -> Vec<ParameterSpec> {
    let (hidden, patch) = (config.hidden_size, config.patch_size);
    let merged = hidden * config.spatial_merge_size.pow(2);
    let mut specs = Specs {
        normal: Init::Normal {
            std: config.initializer_range,
        },
        all: Vec::new(),
    };
    let frames = config.temporal_patch_size;
    let kernel = [hidden, config.in_channels, frames, patch, patch];
    specs.layer("patch_embed.proj", &kernel);
    let positions = [config.num_position_embeddings, hidden];
    specs.add("pos_embed.weight".to_owned(), &positions, specs.normal);
    for layer in 0..config.depth {
        let name = |part: &str| format!("blocks.{layer}.{part}");
        specs.norm(&name("norm1"), hidden);
        specs.norm(&name("norm2"), hidden);
        specs.layer(&name("attn.qkv"), &[3 * hidden, hidden]);
        specs.layer(&name("attn.proj"), &[hidden, hidden]);
        let inner = config.intermediate_size;
        specs.layer(&name("mlp.linear_fc1"), &[inner, hidden]);
        specs.layer(&name("mlp.linear_fc2"), &[hidden, inner]);
    }
    let mut merger = |name: &str, norm| {
        specs.norm(&format!("{name}.norm"), norm);
        specs.layer(&format!("{name}.linear_fc1"), &[merged, merged]);
        specs.layer(
            &format!("{name}.linear_fc2"),
            &[config.out_hidden_size, merged],
        );
    };
    merger("merger", hidden);
    for index in 0..config.deepstack_visual_indexes.len() {
        merger(&format!("deepstack_merger_list.{index}"), merged);
    }
    specs.all
}

struct Specs {
    normal: Init,
    all: Vec<ParameterSpec>,
}

impl Specs {
    fn add(&mut self, name: String, shape: &[i64], init: Init) {
        let name = format!("{TOWER}.{name}");
        self.all
            .push(ParameterSpec::new(name, shape, init, ParameterRole::Other));
    }

    fn layer(&mut self, name: &str, shape: &[i64]) {
        self.add(format!("{name}.weight"), shape, self.normal);
        self.add(format!("{name}.bias"), &shape[..1], Init::Zeros);
    }

    fn norm(&mut self, name: &str, width: i64) {
        self.add(format!("{name}.weight"), &[width], Init::Ones);
        self.add(format!("{name}.bias"), &[width], Init::Zeros);
    }
}
