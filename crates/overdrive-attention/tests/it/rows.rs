//! Attention on rows in slices against attention on tensors.

use overdrive_attention::rows::{HeadRows, RowsShape, attend};
use overdrive_attention::{AttentionOptions, Backend, Window, attention};
use tch::{Device, Kind, Tensor};

/// Returns `count` numbers in -1..1.
fn numbers(count: usize, seed: f32) -> Vec<f32> {
    (0..count)
        .map(|at| (at as f32 * 12.9898 + seed).sin())
        .collect()
}

#[test]
fn rows_give_the_same_as_tensors_for_each_shape_and_option() {
    let windowed = AttentionOptions {
        window: Window::sliding(5),
        sink_tokens: 2,
        ..AttentionOptions::causal()
    };
    let capped = AttentionOptions {
        softcap: Some(0.7),
        scale: Some(0.9),
        ..AttentionOptions::causal()
    };
    // The last shape is large enough for splits of the keys and several threads.
    let shapes = [
        (1, 4, 2, 1, 1, 16),
        (2, 6, 2, 3, 21, 20),
        (1, 2, 1, 1, 3000, 64),
    ];
    for (batch, heads, kv_heads, queries, keys, dim) in shapes {
        let logits = Tensor::from_slice(&numbers(heads, 0.4));
        let sinks = AttentionOptions {
            sinks: Some(&logits),
            ..windowed
        };
        for options in [AttentionOptions::causal(), windowed, capped, sinks] {
            let shape = RowsShape {
                batch,
                heads,
                kv_heads,
                queries,
                keys,
                head_dim: dim,
            };
            // Queries as rows of tokens, keys and values head by head with room for one more token.
            let query = numbers(batch * queries * heads * dim, 0.1);
            let [k, v] = [0.2, 0.3].map(|seed| numbers(batch * kv_heads * (keys + 1) * dim, seed));
            let held = |data| HeadRows {
                data,
                batch: kv_heads * (keys + 1) * dim,
                head: (keys + 1) * dim,
                row: dim,
            };
            let of_query = HeadRows {
                data: &query,
                batch: queries * heads * dim,
                head: dim,
                row: heads * dim,
            };
            let mut output = vec![f32::NAN; query.len()];
            assert!(attend(of_query, held(&k), held(&v), shape, &options, &mut output).unwrap());

            let size = |n: usize| n as i64;
            let tensor = |data: &[f32], tokens| {
                let sizes = [size(batch), size(kv_heads), size(keys + 1), size(dim)];
                let all = Tensor::from_slice(data).view(sizes);
                all.narrow(2, 0, tokens)
            };
            let sizes = [size(batch), size(queries), size(heads), size(dim)];
            let q = Tensor::from_slice(&query).view(sizes).transpose(1, 2);
            let blockwise = AttentionOptions {
                backend: Backend::Blockwise,
                ..options
            };
            let (k, v) = (tensor(&k, size(keys)), tensor(&v, size(keys)));
            let expected = attention(&q, &k, &v, &blockwise).unwrap();
            let expected = expected.transpose(1, 2).contiguous().view(-1);
            // The same kernel in the same order.
            assert_eq!(Tensor::from_slice(&output), expected, "{shape:?}");
        }
    }
}

#[test]
fn rows_that_do_not_fit_are_refused_and_masks_are_left_to_tensors() {
    let data = [0.0; 8];
    let rows = |len: usize| HeadRows {
        data: &data[..len],
        batch: 8,
        head: 4,
        row: 4,
    };
    let shape = RowsShape {
        batch: 1,
        heads: 2,
        kv_heads: 2,
        queries: 1,
        keys: 1,
        head_dim: 4,
    };
    let causal = AttentionOptions::causal();
    let mut output = [1.0; 8];
    for (query, keys, values) in [(7, 8, 8), (8, 7, 8), (8, 8, 7)] {
        let (query, keys, values) = (rows(query), rows(keys), rows(values));
        let error = attend(query, keys, values, shape, &causal, &mut output).unwrap_err();
        assert!(error.to_string().contains("at the strides of"), "{error}");
    }
    let all = rows(8);
    let error = attend(all, all, all, shape, &causal, &mut output[..7]).unwrap_err();
    assert!(error.to_string().contains("output"), "{error}");
    let uneven = RowsShape { heads: 3, ..shape };
    let error = attend(all, all, all, uneven, &causal, &mut output).unwrap_err();
    assert!(
        error.to_string().contains("a multiple of the key heads"),
        "{error}"
    );
    let endless = HeadRows {
        row: usize::MAX,
        ..all
    };
    let many = RowsShape { keys: 3, ..shape };
    assert!(attend(all, endless, all, many, &causal, &mut output).is_err());

    let out_of_range = [
        AttentionOptions {
            softcap: Some(0.0),
            ..causal
        },
        AttentionOptions {
            scale: Some(f64::NAN),
            ..causal
        },
        AttentionOptions {
            window: Window {
                right: Some(5),
                ..causal.window
            },
            ..causal
        },
    ];
    for (options, name) in out_of_range
        .iter()
        .zip(["softcap", "scale", "window.right"])
    {
        let error = attend(all, all, all, shape, options, &mut output).unwrap_err();
        assert!(error.to_string().contains(name), "{error}");
    }

    let three = Tensor::zeros([3], (Kind::Float, Device::Cpu));
    let sinks = AttentionOptions {
        sinks: Some(&three),
        ..causal
    };
    let error = attend(all, all, all, shape, &sinks, &mut output).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("one element for each query head"),
        "{error}"
    );

    let mask = Tensor::ones([1, 1, 1, 1], (Kind::Bool, Device::Cpu));
    let masked = AttentionOptions {
        mask: Some(&mask),
        ..AttentionOptions::default()
    };
    assert!(!attend(all, all, all, shape, &masked, &mut output).unwrap());
    assert_eq!(output, [1.0; 8]);
}
