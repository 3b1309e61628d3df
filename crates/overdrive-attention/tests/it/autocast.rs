//! Attention under autocast; a file of its own for the thread's state.

use overdrive_attention::{AttentionOptions, Backend, attention};
use overdrive_sys::autocast::{self, State};
use tch::{Device, Kind, Tensor};

#[test]
fn autocast_casts_all_three_as_pytorchs_does() {
    let x = Tensor::ones([1, 2, 5, 8], (Kind::Float, Device::Cpu));
    let half = x.to_kind(Kind::BFloat16);
    let on = State {
        enabled: true,
        dtype: Kind::BFloat16,
        fp8: false,
    };
    let before = autocast::state(Device::Cpu).unwrap();
    autocast::set_state(Device::Cpu, on).unwrap();
    for backend in [
        Backend::Auto,
        Backend::Blockwise,
        Backend::Flash,
        Backend::Math,
    ] {
        let options = AttentionOptions {
            backend,
            ..AttentionOptions::default()
        };
        // Rotary positions leave queries in f32 and values in bf16.
        let output = attention(&x, &half, &x, &options).unwrap();
        assert_eq!(output.kind(), Kind::BFloat16, "{backend}");
        let double = x.to_kind(Kind::Double);
        let output = attention(&double, &double, &double, &options).unwrap();
        assert_eq!(output.kind(), Kind::Double, "f64 is left alone");
        assert_eq!(
            autocast::state(Device::Cpu).unwrap(),
            on,
            "{backend} puts the state back"
        );
    }
    autocast::set_state(Device::Cpu, before).unwrap();
}
