//! The path of CUDA on CPU tensors, with stand-ins for the two kernels.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use overdrive_sys::CallbackResult;
use overdrive_sys::dispatch_mode::{DispatchMode, OperatorCall, push_mode};
use overdrive_sys::op::Value;
use tch::{Device, Kind, Tensor};

use super::{PackedKernel, packed_kernel};
use crate::libtorch::tests::planned;
use crate::paged::PagedCall;
use crate::{
    AttentionOptions, Backend, Error, PagedLayout, Result, Window, attention_paged,
    attention_with_lse,
};

/// The stand-in of the kernels on this thread.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum StandIn {
    /// There is none: CPU tensors are computed by the CPU kernel.
    No,
    /// It computes what the kernel would.
    Computes,
    /// It returns zeros at once, so that only the other operators are counted.
    Counts,
    /// The operator itself is called, which a CPU does not have.
    Calls,
}

thread_local! {
    static STAND_IN: Cell<StandIn> = const { Cell::new(StandIn::No) };
}

pub(crate) fn is_forced() -> bool {
    STAND_IN.get() != StandIn::No
}

pub(crate) fn with<T>(stand_in: StandIn, body: impl FnOnce() -> T) -> T {
    STAND_IN.set(stand_in);
    let result = body();
    STAND_IN.set(StandIn::No);
    result
}

pub(crate) fn tensor<'a>(value: &Value<'a>) -> Option<&'a Tensor> {
    match value {
        Value::Tensor(tensor) => Some(tensor),
        _ => None,
    }
}

fn int(value: &Value<'_>) -> Option<i64> {
    match value {
        Value::Int(value) => Some(*value),
        _ => None,
    }
}

/// Returns the results of the kernel as its source has them: sequence `n` has the queries `starts[n]..starts[n + 1]`
/// and the keys from `key_starts[n]` on, as many as `counts[n]`.
pub(crate) fn stand_in(
    operator: &str,
    arguments: &[Value<'_>],
) -> Option<Result<(Tensor, Tensor)>> {
    let is_flash = operator == "aten::_flash_attention_forward";
    match STAND_IN.get() {
        StandIn::No | StandIn::Calls => return None,
        // The check of libtorch's build.
        _ if is_flash && arguments.get(14).and_then(tensor).is_some() => {
            return Some(Err(Error::Sys(overdrive_sys::Error::Torch {
                operation: operator.to_owned(),
                message: "This flash attention build does not support alibi.".to_owned(),
            })));
        }
        StandIn::Computes if operator == "aten::_scaled_dot_product_efficient_attention" => {
            return Some(dense(arguments));
        }
        StandIn::Computes if operator == "aten::_scaled_dot_product_cudnn_attention" => {
            return Some(planned(arguments));
        }
        StandIn::Counts => {
            let query = tensor(&arguments[0]).unwrap();
            let lse = Tensor::zeros(
                [query.size()[1], query.size()[0]],
                (Kind::Float, Device::Cpu),
            );
            return Some(Ok((query.shallow_clone(), lse)));
        }
        StandIn::Computes => {}
    }
    let flat = |tensor: &Tensor| match is_flash {
        true => tensor.shallow_clone(),
        false => tensor.squeeze_dim(0),
    };
    let [query, keys, values] = [0, 1, 2].map(|at| flat(tensor(&arguments[at]).unwrap()));
    // The order of the two schemas.
    let (starts, counts) = if is_flash { (3, 13) } else { (4, 12) };
    let numbers = |at: usize| {
        let tensor = tensor(&arguments[at]).unwrap();
        assert_eq!(tensor.kind(), Kind::Int);
        Vec::<i32>::try_from(tensor).unwrap()
    };
    let (starts, key_starts, counts) = (numbers(starts), numbers(starts + 1), numbers(counts));
    let longest = int(&arguments[if is_flash { 5 } else { 6 }]).unwrap();
    let scale = match arguments[if is_flash { 10 } else { 11 }] {
        Value::Float(scale) => scale,
        _ => panic!("no scale"),
    };
    let causal = match is_flash {
        true => matches!(arguments[8], Value::Bool(true)),
        false => int(&arguments[9]) == Some(2),
    };
    let limit = |value: Option<i64>| value.and_then(|value| usize::try_from(value).ok());
    let left = match is_flash {
        true => limit(int(&arguments[11])),
        false => limit(int(&arguments[13])).map(|size| size - 1),
    };
    let right = is_flash.then(|| limit(int(&arguments[12]))).flatten();
    let single = starts.windows(2).all(|pair| pair[1] - pair[0] == 1);
    if is_flash && single && left.is_none() {
        let given = (causal, int(&arguments[11]), int(&arguments[12]));
        let wanted = (false, Some(-1), Some(-1));
        assert_eq!(given, wanted, "the keys of single queries are not split");
    }
    let (mut outputs, mut lses) = (Vec::new(), Vec::new());
    for (sequence, count) in counts.iter().enumerate() {
        let (start, end) = (i64::from(starts[sequence]), i64::from(starts[sequence + 1]));
        assert!(end - start <= longest && i64::from(*count) <= keys.size()[0]);
        let part = |tensor: &Tensor, start: i64, count: i64| {
            let part = tensor.narrow(0, start, count).transpose(0, 1);
            part.unsqueeze(0).to_kind(Kind::Double)
        };
        let key_start = i64::from(key_starts[sequence]);
        let options = AttentionOptions {
            causal,
            window: Window {
                left,
                right: if causal { None } else { right },
            },
            scale: Some(scale),
            backend: Backend::Math,
            ..AttentionOptions::default()
        };
        let (output, lse) = attention_with_lse(
            &part(&query, start, end - start),
            &part(&keys, key_start, i64::from(*count)),
            &part(&values, key_start, i64::from(*count)),
            &options,
        )
        .unwrap();
        outputs.push(output.squeeze_dim(0).transpose(0, 1).to_kind(query.kind()));
        let lse = lse.squeeze_dim(0).to_kind(Kind::Float);
        let unseen = lse.eq(f64::NEG_INFINITY);
        let lse = lse.masked_fill(&unseen, f64::INFINITY);
        lses.push(match is_flash {
            true => lse,
            // Padded to a multiple of 32 queries.
            false => {
                let room = (longest + 31) / 32 * 32;
                lse.constant_pad_nd([0, room - (end - start)]).unsqueeze(0)
            }
        });
    }
    let output = Tensor::cat(&outputs, 0);
    Some(Ok(match is_flash {
        true => (output, Tensor::cat(&lses, 1)),
        false => (output.unsqueeze(0), Tensor::cat(&lses, 0)),
    }))
}

/// Returns the results of `_scaled_dot_product_efficient_attention`, which has as many key heads as query heads and
/// pads its log-sum-exp to a multiple of 32 queries.
fn dense(arguments: &[Value<'_>]) -> Result<(Tensor, Tensor)> {
    let [query, keys, values] = [0, 1, 2].map(|at| tensor(&arguments[at]).unwrap());
    let size = query.size();
    assert_eq!(size[..2], keys.size()[..2], "it has no grouped heads");
    let mask = tensor(&arguments[3]);
    if let Some(mask) = mask {
        assert_eq!(mask.size(), [size[0], size[1], size[2], keys.size()[2]]);
        let aligned = |dim: usize| mask.size()[dim] == 1 || mask.stride()[dim] % 16 == 0;
        assert!((0..3).all(aligned), "{:?}", mask.stride());
    }
    let Value::Float(scale) = arguments[7] else {
        panic!("no scale")
    };
    let options = AttentionOptions {
        mask,
        causal: matches!(arguments[6], Value::Bool(true)),
        alignment: crate::Alignment::TopLeft,
        scale: Some(scale),
        backend: Backend::Math,
        ..AttentionOptions::default()
    };
    let (output, lse) = attention_with_lse(query, keys, values, &options)?;
    let room = (size[2] + 31) / 32 * 32;
    Ok((output, lse.constant_pad_nd([0, room - size[2]])))
}

/// A pool with scattered blocks whose rows without a key are NaN.
struct Pool {
    keys: Tensor,
    values: Tensor,
    query: Tensor,
    tables: Vec<Vec<u32>>,
    queries: Vec<usize>,
    lengths: Vec<usize>,
    block_size: usize,
}

impl Pool {
    fn new(texts: &[(usize, usize)], (kv_heads, group): (i64, i64), kind: Kind) -> Pool {
        let (block_size, dim) = (16, 24);
        let (queries, lengths): (Vec<_>, Vec<_>) = texts.iter().copied().unzip();
        let used: Vec<usize> = lengths
            .iter()
            .map(|keys| keys.div_ceil(block_size))
            .collect();
        let blocks = used.iter().sum::<usize>() as u32 + 3;
        let mut order = (0..blocks).rev();
        // A table may be longer than its keys need.
        let tables: Vec<Vec<u32>> = used
            .iter()
            .map(|count| order.by_ref().take(*count).chain([99_999]).collect())
            .collect();
        let numbers = |shape: &[i64], seed: f64| {
            let count: i64 = shape.iter().product();
            let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + seed;
            ((at.sin() * 43_758.545_3).frac() * 2.0).reshape(shape)
        };
        let pool = |seed: f64| {
            let size = block_size as i64;
            let all = numbers(&[i64::from(blocks), kv_heads, size, dim], seed);
            let filled = Tensor::zeros([i64::from(blocks), 1, size, 1], (Kind::Bool, Device::Cpu));
            for (table, keys) in tables.iter().zip(&lengths) {
                for key in 0..*keys {
                    let block = i64::from(table[key / block_size]);
                    let _one = filled
                        .get(block)
                        .get(0)
                        .get((key % block_size) as i64)
                        .fill_(1);
                }
            }
            all.masked_fill(&filled.logical_not(), f64::NAN)
                .to_kind(kind)
        };
        let total = queries.iter().sum::<usize>() as i64;
        // As the heads of a joint projection lie.
        let query = numbers(&[kv_heads * group, total, dim], 0.3).to_kind(kind);
        Pool {
            keys: pool(0.1),
            values: pool(0.2),
            query: query.transpose(0, 1),
            tables,
            queries,
            lengths,
            block_size,
        }
    }

    fn layout(&self, on_device: bool) -> PagedLayout {
        let (queries, lengths) = (self.queries.clone(), self.lengths.clone());
        let tables = self.tables.clone();
        let mut layout =
            PagedLayout::new(tables, queries, lengths, self.block_size, Device::Cpu).unwrap();
        if on_device {
            layout.on_device = Some(layout.tables(Device::Cpu).unwrap());
        }
        layout
    }

    fn run(&self, layout: &PagedLayout, options: &AttentionOptions<'_>) -> (Tensor, Tensor) {
        attention_paged(&self.query, &self.keys, &self.values, layout, options).unwrap()
    }
}

pub(crate) fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f64, name: &str) {
    assert_eq!(
        (got.size(), got.kind()),
        (expected.size(), expected.kind()),
        "{name}"
    );
    let (got, expected) = (got.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    let off = (&got - &expected)
        .abs()
        .masked_fill(&got.eq_tensor(&expected), 0.0);
    let off = off.max().double_value(&[]);
    assert!(off < tolerance, "{name} is off by {off}");
}

#[test]
fn one_call_for_all_sequences_equals_the_kernel_that_reads_blocks_in_place() {
    let slopes = Tensor::from_slice(&[0.5_f32, 0.25, 0.1, 0.05]);
    let causal = AttentionOptions::causal();
    let windowed = AttentionOptions {
        window: Window::sliding(7),
        ..causal
    };
    let all = AttentionOptions::default();
    let alibi = AttentionOptions {
        alibi_slopes: Some(&slopes),
        ..causal
    };
    // Decoding, chunks of prompts beside it, a sequence without new tokens, more queries than keys.
    let mixes: [&[(usize, usize)]; 4] = [
        &[(1, 40), (1, 3), (1, 16)],
        &[(1, 33), (20, 20), (5, 40)],
        &[(0, 12), (2, 30), (0, 0), (1, 1)],
        &[(3, 2), (2, 17)],
    ];
    for texts in mixes {
        for (kind, tolerance) in [
            (Kind::Float, 2e-5),
            (Kind::Half, 5e-3),
            (Kind::BFloat16, 4e-2),
        ] {
            for (name, options) in [
                ("causal", causal),
                ("windowed", windowed),
                ("all", all),
                ("alibi", alibi),
            ] {
                let pool = Pool::new(texts, (2, 2), kind);
                let (expected, expected_lse) = pool.run(&pool.layout(false), &options);
                let layout = pool.layout(true);
                let (output, lse) = with(StandIn::Computes, || pool.run(&layout, &options));
                let name = format!("{name} {kind:?} {texts:?}");
                assert_close(&output, &expected, tolerance, &name);
                assert_close(&lse, &expected_lse, tolerance, &name);
            }
        }
    }
}

#[test]
fn each_kernel_takes_the_options_that_it_has() {
    let of = |kind, options: &AttentionOptions<'_>| {
        let pool = Pool::new(&[(1, 20)], (2, 2), kind);
        let layout = pool.layout(true);
        let call = PagedCall::new(&pool.query, &pool.keys, &pool.values, &layout, options);
        packed_kernel(&call.unwrap())
    };
    let causal = AttentionOptions::causal();
    let (flash, efficient) = (Some(PackedKernel::Flash), Some(PackedKernel::Efficient));
    assert_eq!(of(Kind::BFloat16, &causal), flash);
    assert_eq!(of(Kind::Float, &causal), efficient);
    assert_eq!(of(Kind::Double, &causal), None);
    let forced = |backend| AttentionOptions { backend, ..causal };
    assert_eq!(of(Kind::Half, &forced(Backend::Efficient)), efficient);
    assert_eq!(of(Kind::Half, &forced(Backend::Math)), None);
    let capped = AttentionOptions {
        softcap: Some(30.0),
        ..causal
    };
    assert_eq!(of(Kind::Half, &capped), None);
    let sinks = AttentionOptions {
        window: Window::sliding(8),
        sink_tokens: 4,
        ..causal
    };
    assert_eq!(of(Kind::Half, &sinks), None);
    let slopes = Tensor::from_slice(&[0.5_f32, 0.25, 0.1, 0.05]);
    let alibi = AttentionOptions {
        alibi_slopes: Some(&slopes),
        ..causal
    };
    assert_eq!(
        [Kind::Half, Kind::Float].map(|kind| of(kind, &alibi)),
        [None, None]
    );
}

/// No GPU is needed to see that the operators take these arguments: libtorch checks them against their schemas
/// before it looks for the device.
#[test]
fn the_arguments_fit_the_schemas() {
    for (kind, operator) in [
        (Kind::Half, "aten::_flash_attention_forward"),
        (Kind::Float, "aten::_efficient_attention_forward"),
    ] {
        let pool = Pool::new(&[(1, 20), (2, 5)], (2, 2), kind);
        let layout = pool.layout(true);
        let options = AttentionOptions {
            window: Window::sliding(7),
            ..AttentionOptions::causal()
        };
        let (query, keys) = (&pool.query, &pool.keys);
        let error = with(StandIn::Calls, || {
            attention_paged(query, keys, &pool.values, &layout, &options).unwrap_err()
        })
        .to_string();
        assert!(
            error.contains("Could not run") && error.contains(operator),
            "{error}"
        );
    }
}

/// Counts the operators that are not views.
#[derive(Default)]
struct Counter(RefCell<Vec<String>>);

impl DispatchMode for Counter {
    fn after(&self, call: &OperatorCall) -> CallbackResult<()> {
        let name = call.full_name();
        if (!call.aliases()? || call.mutates()?) && !name.starts_with("aten::empty") {
            self.0.borrow_mut().push(name);
        }
        Ok(())
    }
}

#[test]
fn the_launches_of_a_layer_do_not_grow_with_the_sequences() {
    let counted = |texts: usize, backend| {
        let pool = Pool::new(&vec![(1, 40); texts], (2, 2), Kind::BFloat16);
        let layout = pool.layout(true);
        let options = AttentionOptions {
            backend,
            ..AttentionOptions::causal()
        };
        with(StandIn::Counts, || {
            let counter = Rc::new(Counter::default());
            let mode = push_mode(Rc::clone(&counter) as Rc<dyn DispatchMode>);
            let _results = pool.run(&layout, &options);
            drop(mode);
            counter.0.take()
        })
    };
    // The stand-in's own operator counts for the kernel.
    let packed = counted(64, Backend::Auto);
    assert_eq!(
        packed,
        ["aten::index_select", "aten::index_select", "aten::zeros"]
    );
    assert_eq!(counted(1, Backend::Auto), packed);
    let one_by_one = counted(64, Backend::Math).len();
    println!(
        "a layer of 64 sequences: {} launches, one by one {one_by_one}",
        packed.len()
    );
    assert!(one_by_one > 64 * 8, "{one_by_one}");
}
