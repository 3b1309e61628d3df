//! Models with random weights that are made where they are used.

use overdrive::transformer::{CausalLm, Init, InitOptions, ModelConfig};
use tch::{Device, Kind};

use crate::StepResult;

/// Returns a model with random weights. On a GPU they are drawn there, because drawing a billion values on the host takes
/// twenty seconds; they differ from those of a CPU.
///
/// # Errors
/// An error if memory runs out.
pub fn random_model(config: &ModelConfig, device: Device, kind: Kind) -> StepResult<CausalLm> {
    if device == Device::Cpu {
        let options = InitOptions {
            kind,
            ..InitOptions::default()
        };
        return Ok(CausalLm::new(config, &options)?);
    }
    let model = CausalLm::empty(config, device, kind)?;
    fill(&model, config)?;
    Ok(model)
}

/// Draws the parameters of a model on its device.
fn fill(model: &CausalLm, config: &ModelConfig) -> StepResult<()> {
    let parameters = model.named_parameters();
    for ((name, parameter), spec) in parameters.iter().zip(config.parameters()) {
        if *name != spec.name {
            return Err(format!("found {name} where {} is expected", spec.name).into());
        }
        let mut values = parameter.f_detach()?;
        let _same = match spec.init {
            Init::Normal { std } | Init::TruncatedNormal { std, .. } => {
                values.f_normal_(0.0, std)?
            }
            Init::Zeros => values.f_zero_()?,
            Init::Ones => values.f_fill_(1)?,
            other => return Err(format!("unknown value {other:?} of {name}").into()),
        };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tch::Tensor;

    use super::*;
    use crate::Shape;

    #[test]
    fn every_parameter_is_drawn_as_the_configuration_says() {
        let config = Shape {
            vocab: 1000,
            dim: 64,
            layers: 1,
            heads: 4,
            kv_heads: 2,
            hidden: 128,
            context: 16,
            batch: 1,
        };
        let config = ModelConfig::from(config.config());
        let model = CausalLm::empty(&config, Device::Cpu, Kind::Float).unwrap();
        let parameters = model.named_parameters();
        for (_, parameter) in &parameters {
            let _same = parameter.f_detach().unwrap().f_fill_(f64::NAN).unwrap();
        }
        tch::manual_seed(0);
        fill(&model, &config).unwrap();
        for ((name, parameter), spec) in parameters.iter().zip(config.parameters()) {
            let std = |tensor: &Tensor| tensor.std(false).double_value(&[]);
            match spec.init {
                // A tenth is six standard errors of the smallest matrix.
                Init::Normal { std: wanted } => {
                    assert!((std(parameter) / wanted - 1.0).abs() < 0.1, "{name}");
                }
                Init::Ones => assert_eq!(parameter, &parameter.ones_like(), "{name}"),
                other => panic!("{name} has {other:?}"),
            }
        }
    }
}
