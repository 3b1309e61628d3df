//! Claim: for one row, a matmul with a quantized weight takes at most as long as reading its packed weight, and
//! for any number of rows at most as long as fbgemm's (that of `torch.ao.quantization.quantize_dynamic`).
//!
//! Analysis: for few rows the weight must be read once, so each line of the table has an upper bound in bytes:
//! the weight's bytes over the bandwidth of a plain sum of as many bytes on all threads, which is printed
//! first. For many rows arithmetic decides: a core does 64 int8 multiplications per cycle with VNNI and 16 fp32
//! ones, and the dense fp32 matmul is measured beside. Weights that fit into the last-level cache are read
//! faster than from memory, so each matmul cycles through several weights that do not fit together.
//!
//! `benches/pytorch/quantized_linear.py` measures PyTorch's own modules; `fbgemm` here is the operator in
//! libtorch, with activations and weights quantized per tensor.
#![allow(
    unsafe_code,
    reason = "libtorch does not check all arguments of fbgemm's operators"
)]

use std::cell::Cell;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use overdrive_benches::{UNCACHED_BYTES, read_bandwidth};
use overdrive_quantization::{QuantizedWeight, Scheme, linear};
use overdrive_sys::op::{self, Output, Value};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The outputs and inputs of the linear layers of a Llama with 7B parameters, and of one with 100M.
const SIZES: [(i64, i64); 3] = [(4096, 4096), (11008, 4096), (2048, 768)];

const ROWS: [i64; 4] = [1, 8, 64, 512];

const SCHEMES: [&str; 7] = [
    "int8",
    "int8-weight",
    "llm-int8",
    "int4-g32",
    "int4-g128",
    "nf4",
    "fp8",
];

/// Returns a matmul with its own weight, and the bytes of the weight.
type Product = (Box<dyn Fn(&Tensor) -> Tensor>, usize);

fn of_scheme(dense: &Tensor, scheme: &str) -> Product {
    let scheme: Scheme = scheme.parse().expect("one of the names");
    let weight = QuantizedWeight::quantize(dense, scheme).expect("finite numbers");
    let bytes = weight.bytes();
    let product = move |x: &Tensor| linear(x, &weight, None).expect("the shapes fit");
    (Box::new(product), bytes)
}

fn dense(dense: &Tensor) -> Product {
    let weight = dense.copy();
    (
        Box::new(move |x| x.linear(&weight, None::<&Tensor>)),
        dense.numel() * 4,
    )
}

fn fbgemm(dense: &Tensor) -> Product {
    let call = |name: &str, arguments: &[Value<'_>]| {
        // SAFETY: the shapes and the order of the calls are those of libtorch's own `linear_int8`.
        unsafe { op::call_unchecked(name, "", arguments) }.expect("an operator of libtorch")
    };
    let parts = call(
        "aten::fbgemm_linear_quantize_weight",
        &[Value::Tensor(dense)],
    );
    let Ok(
        [
            Output::Tensor(codes),
            Output::Tensor(offsets),
            Output::Float(scale),
            Output::Int(zero),
        ],
    ) = <[Output; 4]>::try_from(parts)
    else {
        panic!("codes, their sums, a scale and a zero point");
    };
    let packed = call(
        "aten::fbgemm_pack_quantized_matrix",
        &[Value::Tensor(&codes)],
    );
    let Ok([Output::Tensor(packed)]) = <[Output; 1]>::try_from(packed) else {
        panic!("one tensor");
    };
    let bias = Tensor::zeros([dense.size()[0]], F32);
    let bytes = codes.numel();
    let product = move |x: &Tensor| {
        let arguments = [
            Value::Tensor(x),
            Value::Tensor(&codes),
            Value::Tensor(&packed),
            Value::Tensor(&offsets),
            Value::Float(scale),
            Value::Int(zero),
            Value::Tensor(&bias),
        ];
        let name = "aten::fbgemm_linear_int8_weight_fp32_activation";
        // SAFETY: `packed` and its sums were made above from these codes.
        let mut results =
            unsafe { op::call_unchecked(name, "", &arguments) }.expect("the shapes fit");
        results.remove(0).into_tensor().expect("one tensor")
    };
    (Box::new(product), bytes)
}

fn quantized_linear(criterion: &mut Criterion) {
    let _no_grad = tch::no_grad_guard();
    let bandwidth = read_bandwidth();
    println!(
        "{} threads, instructions: {}, memory is read at {:.1} GB/s",
        overdrive_sys::threads::intra_op(),
        overdrive_quantization::instruction_set(),
        bandwidth / 1e9
    );
    for (outputs, inputs) in SIZES {
        let mut group = criterion.benchmark_group(format!("quantized_linear/{outputs}x{inputs}"));
        group.sample_size(10);
        group.warm_up_time(std::time::Duration::from_millis(200));
        group.measurement_time(std::time::Duration::from_millis(800));
        let weight = Tensor::randn([outputs, inputs], F32);
        let names = ["float", "fbgemm"].into_iter().chain(SCHEMES);
        for name in names {
            let make = || match name {
                "float" => dense(&weight),
                "fbgemm" => fbgemm(&weight),
                scheme => of_scheme(&weight, scheme),
            };
            let first = make();
            let bytes = first.1;
            let count = UNCACHED_BYTES.div_ceil(bytes);
            let mut products = vec![first];
            products.resize_with(count, make);
            println!(
                "{name}: the weight is read in {:.3} ms",
                bytes as f64 / bandwidth * 1e3
            );
            for rows in ROWS {
                let x = Tensor::randn([rows, inputs], F32);
                let next = Cell::new(0);
                group.throughput(Throughput::Bytes(bytes as u64));
                group.bench_function(BenchmarkId::new(name, rows), |bencher| {
                    bencher.iter(|| {
                        next.set((next.get() + 1) % products.len());
                        (products[next.get()].0)(&x)
                    });
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, quantized_linear);
criterion_main!(benches);
