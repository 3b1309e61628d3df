//! The selection of the back end, its reasons, and refused options.

use overdrive_attention::{
    Alignment, AttentionOptions, Backend, Error, Layout, Window, attention, attention_with_lse,
    explain,
};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;

fn zeros(shape: &[i64]) -> Tensor {
    Tensor::zeros(shape, (Kind::Float, CPU))
}

fn forced(backend: Backend) -> AttentionOptions<'static> {
    AttentionOptions {
        backend,
        ..AttentionOptions::default()
    }
}

/// Returns the message that refuses `options` for (1, 4, 6, 8) queries over (1, 2, 9, 8) keys.
fn refusal(options: &AttentionOptions<'_>) -> String {
    let (query, key) = (zeros(&[1, 4, 6, 8]), zeros(&[1, 2, 9, 8]));
    attention(&query, &key, &key, options)
        .unwrap_err()
        .to_string()
}

#[test]
fn a_forced_back_end_says_everything_that_stands_against_it() {
    assert_eq!(
        refusal(&forced(Backend::Efficient)),
        "the efficient back end cannot run this attention: it runs on CUDA, the query is on Cpu; \
         choose Backend::Auto or one of: Backend::Blockwise, Backend::Flash, Backend::Math"
    );
    assert!(refusal(&forced(Backend::CuDnn)).starts_with("the cuDNN back end cannot run"));
    let slopes = zeros(&[4]);
    let options = AttentionOptions {
        causal: true,
        window: Window::sliding(3),
        sink_tokens: 1,
        softcap: Some(5.0),
        alibi_slopes: Some(&slopes),
        sinks: Some(&slopes),
        dropout_p: 0.1,
        ..forced(Backend::Flash)
    };
    assert_eq!(
        refusal(&options),
        "the flash back end cannot run this attention: it has no softcap; it has no sink tokens \
         under a window; it has no window; it has no ALiBi; it has no sink logits; it has no dropout \
         on a CPU; choose Backend::Auto or one of: Backend::Blockwise, Backend::Math"
    );
    let causal = AttentionOptions {
        causal: true,
        ..forced(Backend::Flash)
    };
    assert!(refusal(&causal).contains(
        "its causal mask is aligned to the top left, which differs for 6 queries and 9 keys"
    ));
    let seeded = AttentionOptions {
        dropout_p: 0.1,
        dropout_seed: Some(1),
        ..forced(Backend::Math)
    };
    assert!(refusal(&seeded).contains("its dropout takes no seed"));
}

#[test]
fn flash_is_refused_where_its_log_sum_exp_or_gradient_would_be_wrong() {
    let x = zeros(&[1, 2, 4, 8]);
    let leaf = zeros(&[1, 2, 4, 8]).set_requires_grad(true);
    let flash = forced(Backend::Flash);
    let message = |result: Result<(Tensor, Tensor), Error>| result.unwrap_err().to_string();
    assert!(attention_with_lse(&x, &x, &x, &flash).is_ok());
    assert!(
        message(attention_with_lse(&leaf, &x, &x, &flash))
            .contains("its log-sum-exp has no gradient")
    );
    let keep = Tensor::ones([4, 4], (Kind::Bool, CPU));
    let masked = AttentionOptions {
        mask: Some(&keep),
        ..flash
    };
    assert!(
        message(attention_with_lse(&x, &x, &x, &masked))
            .contains("its log-sum-exp is 0 rather than -inf")
    );
    let learned = zeros(&[4, 4]).set_requires_grad(true);
    let learned = AttentionOptions {
        mask: Some(&learned),
        ..flash
    };
    let error = attention(&x, &x, &x, &learned).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("it has no gradient for the mask")
    );
}

#[test]
fn explain_names_the_one_that_runs_and_what_stands_against_the_others() {
    let x = zeros(&[1, 2, 4, 8]);
    let options = AttentionOptions {
        softcap: Some(20.0),
        ..AttentionOptions::default()
    };
    let explanation = explain(&x, &x, &x, &options).unwrap();
    assert_eq!(explanation.backend, Some(Backend::Blockwise));
    let text = explanation.to_string();
    assert!(text.starts_with("blockwise runs: "), "{text}");
    assert!(text.contains("  flash: it has no softcap\n"), "{text}");
    assert!(text.contains("  math: can run\n"), "{text}");
    assert!(
        text.contains("  cuDNN: it runs on CUDA, the query is on Cpu\n"),
        "{text}"
    );
    let options = AttentionOptions {
        backend: Backend::Flash,
        ..options
    };
    let explanation = explain(&x, &x, &x, &options).unwrap();
    assert_eq!(explanation.backend, None);
    assert_eq!(
        explanation.reason,
        "flash was requested but cannot run this attention"
    );
}

#[test]
fn both_alignments_of_causality_are_the_same_for_one_query_or_as_many_as_keys() {
    // A single query at the bottom right sees all, so that the flash back end may decode.
    let (query, key) = (zeros(&[1, 2, 1, 8]), zeros(&[1, 2, 9, 8]));
    let options = AttentionOptions {
        causal: true,
        ..forced(Backend::Flash)
    };
    assert!(attention(&query, &key, &key, &options).is_ok());
    assert!(attention(&key, &key, &key, &options).is_ok());
    let top_left = AttentionOptions {
        alignment: Alignment::TopLeft,
        ..options
    };
    assert!(attention(&zeros(&[1, 2, 3, 8]), &key, &key, &top_left).is_ok());
}

#[test]
fn shapes_that_do_not_fit_are_named_in_the_callers_layout() {
    let text = |query: &Tensor, key: &Tensor, value: &Tensor, layout| {
        let options = AttentionOptions {
            layout,
            ..AttentionOptions::default()
        };
        attention(query, key, value, &options)
            .unwrap_err()
            .to_string()
    };
    let x = zeros(&[2, 4, 6, 8]);
    assert_eq!(
        text(&zeros(&[4, 6, 8]), &x, &x, Layout::Bhtd),
        "`query` has shape [4, 6, 8]; it must be four dimensions (batch, heads, length, dim)"
    );
    assert_eq!(
        text(&x, &zeros(&[2, 3, 6, 8]), &x, Layout::Bhtd),
        "`key` has shape [2, 3, 6, 8]; it must be a tensor whose number of heads divides the 4 of the query"
    );
    assert_eq!(
        text(&x, &zeros(&[2, 9, 6, 7]), &x, Layout::Bthd),
        "`key` has shape [2, 9, 6, 7]; it must be [2, 9, 6, 8], with the batch and dim of the query"
    );
    assert_eq!(
        text(&x, &x, &zeros(&[2, 5, 6, 8]), Layout::Bthd),
        "`value` has shape [2, 5, 6, 8]; it must be [2, 4, 6, 8], with the batch, heads and length of the key"
    );
    assert_eq!(
        text(&x, &x.to_kind(Kind::Double), &x, Layout::Bhtd),
        "`key` is Double; it must be Float, as the query is"
    );
    let integers = x.to_kind(Kind::Int64);
    assert_eq!(
        text(&integers, &integers, &integers, Layout::Bhtd),
        "`query` is Int64; it must be Float, Double, Half or BFloat16"
    );
}

#[test]
fn options_out_of_range_are_named_with_what_they_may_be() {
    assert_eq!(
        refusal(&AttentionOptions {
            dropout_p: 1.0,
            ..AttentionOptions::default()
        }),
        "`dropout_p` is 1; it must be at least 0 and less than 1"
    );
    assert_eq!(
        refusal(&AttentionOptions {
            softcap: Some(0.0),
            ..AttentionOptions::default()
        }),
        "`softcap` is 0; it must be a finite number above 0 (None for no cap)"
    );
    assert_eq!(
        refusal(&AttentionOptions {
            scale: Some(f64::NAN),
            ..AttentionOptions::default()
        }),
        "`scale` is NaN; it must be a finite number"
    );
    let window = Window {
        left: None,
        right: Some(2),
    };
    assert_eq!(
        refusal(&AttentionOptions {
            causal: true,
            window,
            ..AttentionOptions::default()
        }),
        "`window.right` is Some(2) with causal; it must be Some(0) or None under a causal mask, which \
         hides later keys"
    );
    let mask = zeros(&[5, 9]);
    assert_eq!(
        refusal(&AttentionOptions {
            mask: Some(&mask),
            ..AttentionOptions::default()
        }),
        "`mask` has shape [5, 9]; it must be at most four dimensions that broadcast to [1, 4, 6, 9] (B, H, T, S)"
    );
    let slopes = zeros(&[2]);
    assert_eq!(
        refusal(&AttentionOptions {
            alibi_slopes: Some(&slopes),
            ..AttentionOptions::default()
        }),
        "`alibi_slopes` has shape [2]; it must be [4] or [1, 4]: one element for each query head"
    );
    let learned = zeros(&[4]).set_requires_grad(true);
    let learned = AttentionOptions {
        alibi_slopes: Some(&learned),
        ..AttentionOptions::default()
    };
    assert!(refusal(&learned).starts_with("`alibi_slopes` is a tensor that requires a gradient"));
}

#[test]
fn differentiating_the_blockwise_kernel_twice_is_an_error_and_math_can() {
    let leaf = Tensor::ones([1, 1, 3, 4], (Kind::Double, CPU)).set_requires_grad(true);
    let value = Tensor::arange(12, (Kind::Double, CPU)).reshape([1, 1, 3, 4]);
    for (backend, possible) in [(Backend::Math, true), (Backend::Blockwise, false)] {
        let output = attention(&leaf, &leaf, &value, &forced(backend)).unwrap();
        let create = overdrive_autograd::GradOptions {
            create_graph: true,
            ..Default::default()
        };
        let once =
            overdrive_autograd::grad(&[&output.square().sum(Kind::Double)], &[&leaf], &create);
        let twice = once.and_then(|once| {
            let loss = once[0].as_ref().unwrap().square().sum(Kind::Double);
            overdrive_autograd::grad(&[&loss], &[&leaf], &Default::default())
        });
        assert_eq!(twice.is_ok(), possible, "{backend}: {twice:?}");
    }
}
