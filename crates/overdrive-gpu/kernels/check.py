"""Runs every variant of every kernel by Triton's interpreter and compares it with numpy in f64. Needs no GPU.

The launches are those of launches.json: grids, scalars and strides as the launcher in Rust gave them to a stand-in for
the driver (`src/tests/launches.rs`). Inputs are made here. Around each output lies memory that nothing may write to.
"""

import importlib
import json
import math
import os
import sys
import tomllib
from pathlib import Path

# Before Triton is imported.
os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

from build import HERE, signature, variants

# The largest error of an element, relative to one plus the largest element: as in the tests of overdrive-fused.
TOLERANCE = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}
# Elements around each buffer.
MARGIN = 64
STORAGE = {"*fp32": np.float32, "*fp16": np.float16, "*bf16": np.uint16, "*i64": np.int64, "*i32": np.int32, "*u8": np.uint8, "*i8": np.int8}
SCALARS = {"i32": (np.int32, tl.int32), "i64": (np.int64, tl.int64), "fp32": (np.float32, tl.float32)}


def rounded(values, kind):
    """Returns values in the storage of a pointer's type: bf16 as the upper half of f32, rounded to nearest even."""
    with np.errstate(over="ignore"):
        if kind != "*bf16":
            return np.asarray(values).astype(STORAGE[kind])
        bits = np.asarray(values, dtype=np.float32).view(np.uint32)
        upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), upper)


def widened(stored, kind):
    if kind == "*bf16":
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored if kind in ("*i64", "*i32", "*u8", "*i8") else stored.astype(np.float64)


class Buffer:
    """Memory for a kernel, aligned as the launcher promises, between margins."""

    def __init__(self, kind, values=None, shape=None):
        self.kind = kind
        self.shape = np.shape(values) if shape is None else shape
        count = math.prod(self.shape)
        raw = np.full(count + 2 * MARGIN + 64, 7, dtype=STORAGE[kind])
        # The margin is a multiple of 16 bytes for every size of element.
        skip = (-raw.ctypes.data % 64) // raw.itemsize
        self.whole = raw[skip:skip + count + 2 * MARGIN]
        self.inner = self.whole[MARGIN:MARGIN + count]
        if values is not None:
            self.inner[:] = rounded(values, kind).reshape(-1)
        self.raw = raw

    def get(self):
        return widened(self.inner, self.kind).reshape(self.shape)

    def address(self, offset=0):
        return self.inner.ctypes.data + offset * self.inner.itemsize

    def intact(self):
        return (self.whole[:MARGIN] == 7).all() and (self.whole[len(self.whole) - MARGIN:] == 7).all()


def dot_of_bf16(original):
    """Returns a product of blocks in which bf16 is a number: the interpreter multiplies its bits."""
    def dot(builder, a, b, d, *options):
        wide = [TensorHandle((t.data.astype(np.uint32) << 16).view(np.float32), tl.float32) if t.dtype.scalar == tl.bfloat16 else t
                for t in (a, b)]
        return original(builder, *wide, d, *options)
    return dot


InterpreterBuilder.create_dot = dot_of_bf16(InterpreterBuilder.create_dot)
# It has no constants of bf16 either.
InterpreterBuilder.get_bf16 = lambda builder, value: TensorHandle(rounded([value], "*bf16"), tl.bfloat16)


class Executor(GridExecutor):
    """Takes arguments that are on the host already."""

    def _init_args_hst(self, args_dev, kwargs):
        return list(args_dev), kwargs

    def _restore_args_dev(self, args_dev, args_hst, kwargs, kwargs_hst):
        pass


def pointer(address, kind):
    element = tl.str_to_ty(kind, None)
    return tl.tensor(TensorHandle(np.array([address], dtype=np.uint64), element), element)


class Launch:
    """A launch of launches.json with the buffers that it is given."""

    def __init__(self, kernels, entry):
        self.entry = entry
        kernel = kernels[entry["kernel"]]
        self.kind = entry["dtype"]
        self.scalars = entry["scalars"]
        self.types = {name: type for name, type in entry["arguments"]}
        self.function = getattr(importlib.import_module(kernel["file"].removesuffix(".py")), kernel["name"])
        self.buffers = {}
        self.offsets = {}
        # The same numbers in every run, and others for each launch.
        self.random = np.random.default_rng(list(json.dumps(entry, sort_keys=True).encode()))

    def values(self, name, *shape, scale=1.0):
        """Makes an input of normal numbers and returns it as the kernel sees it."""
        return self.given(name, self.random.standard_normal(shape) * scale)

    def given(self, name, values):
        self.buffers[name] = Buffer(self.types[name], values)
        return self.buffers[name].get()

    def output(self, name, *shape):
        self.buffers[name] = Buffer(self.types[name], shape=shape)

    def within(self, name, other, offset):
        """Makes an argument an element of another one's buffer."""
        self.buffers[name] = self.buffers[other]
        self.offsets[name] = offset

    def run(self):
        arguments = dict(self.entry["constants"])
        for name in self.function.arg_names:
            kind = self.types.get(name)
            if name in arguments:
                continue
            if kind is None:
                arguments[name] = None
            elif kind.startswith("*"):
                arguments[name] = pointer(self.buffers[name].address(self.offsets.get(name, 0)), kind)
            else:
                storage, type = SCALARS[kind]
                arguments[name] = tl.tensor(TensorHandle(np.array([self.scalars[name]], dtype=storage), type), type)
        with np.errstate(all="ignore"):
            Executor(self.function.rewrite(), self.function.arg_names, tuple(self.entry["blocks"]))(**arguments)
        for name, buffer in self.buffers.items():
            assert buffer.intact(), f"{self.describe()}: memory around {name} was written"

    def close(self, name, expected, factor=1.0, kind=None, found=None):
        found = self.buffers[name].get() if found is None else found
        kind = kind or {"*fp32": "f32", "*fp16": "f16", "*bf16": "bf16"}[self.types[name]]
        assert np.array_equal(np.isnan(found), np.isnan(expected)), f"{self.describe()}: NaN in {name}"
        finite = np.isfinite(expected)
        assert np.array_equal(found[~finite], expected[~finite], equal_nan=True), f"{self.describe()}: {name}"
        scale = 1.0 + np.abs(expected[finite]).max(initial=0.0)
        worst = np.abs(found[finite] - expected[finite]).max(initial=0.0) / scale
        assert worst <= TOLERANCE[kind] * factor, f"{self.describe()}: {name} is off by {worst:.2e}"
        return worst

    def describe(self):
        entry = self.entry
        return f"{entry['kernel']} {entry['dtype']} {entry['constants']} {entry['blocks']} {entry['scalars']}"


def rms_norm_forward(launch):
    rows, width, eps = (launch.scalars[n] for n in ("rows", "width", "eps"))
    x, weight = launch.values("x", rows, width), launch.values("weight", width)
    launch.output("y", rows, width)
    launch.output("inverse", rows)
    if launch.entry["constants"]["ADD"]:
        total = x + launch.values("residual", rows, width)
        launch.output("total", rows, width)
    launch.run()
    if launch.entry["constants"]["ADD"]:
        launch.close("total", total)
        x = launch.buffers["total"].get()
        # Rounded to nearest as the GPU does, except in bf16, which the interpreter cuts off.
        kind = launch.types["total"]
        assert kind == "*bf16" or np.array_equal(x, widened(rounded(total, kind), kind))
    inverse = 1.0 / np.sqrt((x * x).mean(axis=1) + eps)
    worst = launch.close("y", x * inverse[:, None] * weight)
    return max(worst, launch.close("inverse", inverse))


def rms_norm_backward(launch):
    rows, width = (launch.scalars[n] for n in ("rows", "width"))
    x, weight = launch.values("x", rows, width), launch.values("weight", width)
    dy = launch.values("dy", rows, width)
    inverse = launch.given("inverse", 1.0 / np.sqrt((x * x).mean(axis=1) + 1e-6))
    extra = launch.values("extra", rows, width) if launch.entry["constants"]["ADD"] else 0.0
    launch.output("dx", rows, width)
    if launch.entry["constants"]["MIXED"]:
        launch.output("narrow", rows, width)
    programs = launch.entry["blocks"][0]
    launch.output("partial", programs, width)
    launch.run()
    normalised = x * inverse[:, None]
    gradient = dy * weight
    mean = (gradient * normalised).mean(axis=1, keepdims=True)
    dx = (gradient - normalised * mean) * inverse[:, None] + extra
    worst = launch.close("dx", dx)
    if launch.entry["constants"]["MIXED"]:
        worst = max(worst, launch.close("narrow", dx))
    partial = launch.buffers["partial"].get().sum(axis=0)
    # Sums over rows in another order.
    return max(worst, launch.close("partial", (dy * normalised).sum(axis=0), factor=4, found=partial))


def activation(x, which):
    share = 1.0 / (1.0 + np.exp(-x))
    if which == 0:
        return x * share, share * (1.0 + x * (1.0 - share))
    if which == 1:
        normal = 0.5 * (1.0 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return x * normal, normal + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    if which == 2:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x**2)
        tanh = np.tanh(inner)
        return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * slope
    return np.maximum(x, 0.0), (x > 0).astype(np.float64)


def gate_inputs(launch, joint_name, pair_name):
    """Makes gate and up, in one buffer where the stride says so."""
    rows, width, stride = launch.entry["blocks"][0], launch.scalars["width"], launch.scalars["stride"]
    # Also numbers where the exponentials overflow.
    special = np.array([0.0, -0.0, 30.0, -30.0, 100.0, -100.0])
    values = launch.random.standard_normal((rows, stride)) * 3.0
    values[0, :len(special)] = special
    joint = launch.given(joint_name, values)
    if stride == width:
        return joint, launch.values(pair_name, rows, width)
    assert stride == 2 * width
    launch.within(pair_name, joint_name, width)
    return joint[:, :width], joint[:, width:]


def glu_forward(launch):
    gate, up = gate_inputs(launch, "gate", "up")
    launch.output("y", *gate.shape)
    launch.run()
    return launch.close("y", activation(gate, launch.entry["constants"]["ACTIVATION"])[0] * up)


def glu_backward(launch):
    gate, up = gate_inputs(launch, "gate", "up")
    dy = launch.values("dy", *gate.shape)
    rows, width, stride = *gate.shape, launch.scalars["stride"]
    launch.output("d_gate", rows, stride)
    if stride == width:
        launch.output("d_up", rows, width)
    else:
        launch.within("d_up", "d_gate", width)
    launch.run()
    value, slope = activation(gate, launch.entry["constants"]["ACTIVATION"])
    expected = [dy * up * slope, dy * value]
    if stride == width:
        return max(launch.close("d_gate", expected[0]), launch.close("d_up", expected[1]))
    return launch.close("d_gate", np.concatenate(expected, axis=1))


def tables(launch, tokens):
    """Makes the angles of each token; returns (tokens, 1, pairs)."""
    length, pairs, stride = (launch.scalars[n] for n in ("length", "pairs", "table_stride"))
    sequences = tokens // length
    angle = launch.random.uniform(-4, 4, (sequences if stride else 1, length, pairs))
    cos, sin = launch.given("cos", np.cos(angle)), launch.given("sin", np.sin(angle))
    shape = (sequences, length, pairs)
    return [np.broadcast_to(t, shape).reshape(tokens, 1, pairs) for t in (cos, sin)]


def turned(x, cos, sin, pairs, interleaved):
    """Rotates heads (tokens, heads, dim)."""
    result = x.copy()
    first = slice(0, 2 * pairs, 2) if interleaved else slice(0, pairs)
    second = slice(1, 2 * pairs, 2) if interleaved else slice(pairs, 2 * pairs)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


def rotary_split(launch):
    tokens = launch.entry["blocks"][0]
    q_heads, kv_heads, dim, pairs = (launch.scalars[n] for n in ("q_heads", "kv_heads", "dim", "pairs"))
    x = launch.random.standard_normal((tokens, q_heads + 2 * kv_heads, dim))
    # Values are copied as they are.
    x[0, -1, :2] = [np.inf, -np.inf]
    x = launch.given("x", x)
    cos, sin = tables(launch, tokens)
    launch.output("q", tokens, q_heads, dim)
    launch.output("k", tokens, kv_heads, dim)
    launch.output("v", tokens, kv_heads, dim)
    launch.run()
    rotated = turned(x[:, :q_heads + kv_heads], cos, sin, pairs, launch.entry["constants"]["INTERLEAVED"])
    assert np.array_equal(launch.buffers["v"].get(), x[:, q_heads + kv_heads:]), launch.describe()
    return max(launch.close("q", rotated[:, :q_heads]), launch.close("k", rotated[:, q_heads:]))


def rotary_join(launch):
    tokens = launch.entry["blocks"][0]
    s = launch.scalars
    length, dim, pairs = s["length"], s["dim"], s["pairs"]
    counts = {"q": s["q_heads"], "k": s["kv_heads"], "v": s["v_heads"]}
    parts = []
    for name, heads in counts.items():
        strides = [s[f"{name}_{axis}"] for axis in ("sequence", "token", "head")]
        shape = (tokens // length, length, heads, dim)
        if heads == 0:
            launch.buffers[name] = launch.buffers["q"]
            continue
        # An array that holds the heads at these strides.
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides + [1]))
        flat = launch.given(name, launch.random.standard_normal(extent))
        view = np.lib.stride_tricks.as_strided(flat, shape, [8 * stride for stride in strides + [1]])
        parts.append(view.reshape(tokens, heads, dim))
    cos, sin = tables(launch, tokens)
    launch.output("y", tokens, sum(counts.values()), dim)
    launch.run()
    joined = np.concatenate(parts, axis=1)
    rotated = counts["q"] + counts["k"]
    interleaved = launch.entry["constants"]["INTERLEAVED"]
    expected = joined.copy()
    expected[:, :rotated] = turned(joined[:, :rotated], cos, s["sign"] * sin, pairs, interleaved)
    found = launch.buffers["y"].get()
    assert np.array_equal(found[:, rotated:], joined[:, rotated:]), launch.describe()
    return launch.close("y", expected)


def cross_entropy(launch):
    s, constants = launch.scalars, launch.entry["constants"]
    rows, classes = launch.entry["blocks"][0], s["classes"]
    logits = launch.random.standard_normal((rows, classes)) * 4.0
    labels = launch.random.integers(0, classes, rows)
    # A row that does not count, with NaN; one with -inf in whole blocks; one of large numbers; one with a label that is
    # no class.
    labels[1] = s["ignore_index"]
    logits[1] = np.nan
    # The mean of a row with -inf, which smoothing asks for, is -inf.
    logits[2, :max(1, classes - 3)] = -np.inf
    labels[2] = classes - 1
    logits[3] *= 1000.0 if launch.kind != "f16" else 100.0
    if rows > 4:
        labels[4] = classes
    logits = launch.given("logits", logits)
    launch.given("labels", labels)
    counts = labels != s["ignore_index"]
    is_class = (labels >= 0) & (labels < classes)
    smoothing, z_loss, cap = s["smoothing"], s["z_loss"], s["softcap"]
    with np.errstate(all="ignore"):
        x = cap * np.tanh(logits / cap) if constants["CAP"] else logits
        highest = x.max(axis=1, keepdims=True)
        lse = (highest + np.log(np.exp(x - highest).sum(axis=1, keepdims=True)))[:, 0]
        target = np.where(is_class, labels, 0)
        losses = lse - (1 - smoothing) * x[np.arange(rows), target] + z_loss * lse**2
        if smoothing > 0:
            losses -= smoothing * x.mean(axis=1)
        losses = np.where(is_class, losses, np.nan)
        gradient = np.exp(x - lse[:, None]) * (1 + 2 * z_loss * lse[:, None]) - smoothing / classes
        gradient[np.arange(rows), target] -= 1 - smoothing
        if constants["CAP"]:
            gradient *= 1 - (x / cap) ** 2
    lse, losses = np.where(counts, lse, 0.0), np.where(counts, losses, 0.0)
    scale = s["scale"]
    worst = 0.0
    if constants["FIND"]:
        launch.output("losses", rows)
        if not constants["WRITE"]:
            launch.output("lse", rows)
    else:
        launch.given("lse", lse)
        scale *= launch.given("factor", np.array([-0.75]))[0]
    launch.run()
    if constants["FIND"]:
        worst = launch.close("losses", losses, factor=4)
        if not constants["WRITE"]:
            worst = max(worst, launch.close("lse", lse))
    expected = logits
    if constants["WRITE"]:
        expected = np.where(counts[:, None], np.where(is_class[:, None], gradient * scale, np.nan), 0.0)
    return max(worst, launch.close("logits", expected, factor=4 if launch.kind == "f32" else 1))


def adam8(launch):
    s = launch.scalars
    count = s["count"]
    blocks = -(-count // 256)
    p, g = launch.values("parameter", count), launch.values("gradient", count, scale=1e-3)
    # A block of no gradient and an empty state stays empty.
    g[:256] = 0
    g = launch.given("gradient", g)
    state = []
    for index, lowest in ((1, -1.0), (2, 0.0)):
        book = np.sort(launch.random.uniform(lowest, 1.0, 256))
        book[[0, 255]] = max(lowest, -0.99), 1.0
        book[np.abs(book).argmin()] = 0.0
        book = launch.given(f"book{index}", book)
        bounds = launch.given(f"bounds{index}", (book[1:] + book[:-1]) / 2)
        codes = launch.given(f"codes{index}", launch.random.integers(0, 256, count))
        scales = launch.random.uniform(1e-4, 1e-2, blocks) ** index
        scales[0] = 0.0
        scales = launch.given(f"scales{index}", scales)
        state.append((book, bounds, book[codes] * np.repeat(scales, 256)[:count]))
    launch.run()
    m = state[0][2] * s["beta1"] + s["rest1"] * g
    v = state[1][2] * s["beta2"] + s["rest2"] * g * g
    expected = p * s["decay"] - s["step_size"] * m / (np.sqrt(v) * s["correction2"] + s["eps"])
    worst = launch.close("parameter", expected)
    for index, values in ((1, m), (2, v)):
        book, bounds, _ = state[index - 1]
        padded = np.pad(np.abs(values), (0, blocks * 256 - count)).reshape(blocks, 256)
        largest = padded.max(axis=1)
        launch.close(f"scales{index}", largest, kind="f32")
        inverse = np.divide(1.0, largest, out=np.zeros(blocks), where=largest > 0)
        scaled = values * np.repeat(inverse, 256)[:count]
        found = launch.buffers[f"codes{index}"].get()
        expected = np.searchsorted(bounds, scaled, side="left")
        # Only a value at a bound may have the code beside it.
        apart = np.abs(found.astype(np.int64) - expected)
        near = np.abs(bounds[np.minimum(np.minimum(found, expected), 254)] - scaled) < 1e-6
        assert (apart <= near).all(), f"{launch.describe()}: codes{index} {apart.max()}"
    return worst


def four_bit(launch, count, group):
    """Makes `count` groups of codes; returns their numbers."""
    constants = launch.entry["constants"]
    codes = launch.given("codes", launch.random.integers(0, 256, (count, group // 2)))
    scales = launch.given("scales", launch.random.uniform(0.01, 0.1, (count, 1)))
    pair = [codes >> 4, codes & 15] if constants["HIGH_FIRST"] else [codes & 15, codes >> 4]
    numbers = np.stack(pair, axis=-1).reshape(count, group)
    if constants["BOOK"]:
        return launch.given("book", np.linspace(-1, 1, 16) ** 3)[numbers] * scales
    if constants["OFFSET"]:
        return numbers * scales + launch.given("offsets", launch.random.uniform(-0.8, 0.0, (count, 1)))
    return (numbers - 8.0) * scales


def few_rows_4bit(launch):
    rows, outputs, groups = (launch.scalars[n] for n in ("rows", "outputs", "groups"))
    group = launch.entry["constants"]["GROUP"]
    weight = four_bit(launch, outputs * groups, group).reshape(outputs, groups * group)
    x = launch.values("x", rows, groups * group)
    launch.output("y", rows, outputs)
    launch.run()
    return launch.close("y", x @ weight.T)


def dequantize_4bit(launch):
    count, group = launch.scalars["count"], launch.entry["constants"]["GROUP"]
    numbers = four_bit(launch, count, group)
    launch.output("y", count, group)
    launch.run()
    return launch.close("y", numbers)


def eight_bit(launch, outputs, inputs):
    codes = launch.given("codes", launch.random.integers(-128, 128, (outputs, inputs)))
    return codes * launch.given("scales", launch.random.uniform(1e-3, 1e-2, (outputs, 1)))


def few_rows_8bit(launch):
    rows, outputs, inputs = (launch.scalars[n] for n in ("rows", "outputs", "inputs"))
    weight = eight_bit(launch, outputs, inputs)
    x = launch.values("x", rows, inputs)
    launch.output("y", rows, outputs)
    launch.run()
    return launch.close("y", x @ weight.T)


def dequantize_8bit(launch):
    outputs, inputs = launch.entry["blocks"][0], launch.scalars["inputs"]
    numbers = eight_bit(launch, outputs, inputs)
    launch.output("y", outputs, inputs)
    launch.run()
    return launch.close("y", numbers)


def few_bits_scales(launch, outputs, groups):
    """Makes the scales of groups; returns them."""
    if not launch.entry["constants"]["NESTED"]:
        return launch.given("scales", launch.random.uniform(0.01, 0.1, (outputs, groups)))
    codes = launch.given("scales", launch.random.integers(0, 256, outputs * groups))
    book = launch.given("inner_book", launch.random.uniform(-1.0, 1.0, 256))
    outer = launch.given("inner_scales", launch.random.uniform(0.01, 0.1, -(-outputs * groups // 256)))
    scales = book[codes] * outer[np.arange(outputs * groups) >> 8]
    offsets = np.full(outputs, launch.scalars["inner_offset"])
    for name in ("second", "third"):
        offsets[launch.scalars[name]:] = launch.scalars[f"{name}_offset"]
    return scales.reshape(outputs, groups) + offsets[:, None]


def few_bits_numbers(launch, outputs, inputs):
    """Makes the codes; returns the numbers that they stand for, before the scale."""
    constants, half = launch.entry["constants"], launch.kind == "f16"
    if constants["FORMAT"] == 0:
        return launch.given("codes", launch.random.integers(-128, 128, (outputs, inputs)))
    if constants["FORMAT"] == 1:
        # Without the two NaN.
        codes = launch.given("codes", launch.random.integers(0, 127, (outputs, inputs)) + 128 * launch.random.integers(0, 2, (outputs, inputs)))
        exponent, mantissa = codes >> 3 & 15, codes & 7
        size = np.where(exponent == 0, mantissa * 2.0**-9, (8.0 + mantissa) * 2.0 ** (exponent - 10.0))
        return np.where(codes >> 7, -size, size)
    codes = launch.given("codes", launch.random.integers(0, 256, (outputs, inputs // 2)))
    pair = [codes & 15, codes >> 4]
    if constants["FORMAT"] == 2:
        return np.stack(pair, axis=-1).reshape(outputs, inputs) - (0.0 if constants["OFFSET"] else 8.0)
    # Numbers of the dtype, as the words that the kernel takes.
    stored = rounded(np.linspace(-1.5, 1.5, 16) ** 3, launch.types["x"])
    bits = stored.view(np.uint16)
    plane = np.concatenate([bits & 255, bits >> 8]).astype(np.uint8)
    launch.given("book", plane.view(np.int32))
    numbers = widened(stored, launch.types["x"]) * launch.scalars["ratio"]
    return numbers[np.stack(pair[::-1], axis=-1).reshape(outputs, inputs)]


def few_bits(launch):
    rows, outputs, inputs, splits = (launch.scalars[n] for n in ("rows", "outputs", "inputs", "splits"))
    constants = launch.entry["constants"]
    group = constants["GROUP"] or inputs
    weight = few_bits_numbers(launch, outputs, inputs)
    weight = weight * np.repeat(few_bits_scales(launch, outputs, inputs // group), group, axis=1)
    if constants["OFFSET"]:
        weight = weight + np.repeat(launch.given("offsets", launch.random.uniform(-0.8, 0.0, (outputs, inputs // group))), group, axis=1)
    x = launch.values("x", rows, inputs)
    launch.output("y", rows, outputs)
    launch.output("partial", splits, constants["ROWS"], outputs)
    launch.given("counters", np.zeros(launch.entry["blocks"][0]))
    launch.run()
    assert not launch.buffers["counters"].get().any(), f"{launch.describe()}: the counters are not zero again"
    return launch.close("y", x @ weight.T)


def decode_lengths(launch, sequences):
    """Makes the numbers of queries and of keys of each sequence; returns them."""
    s, constants = launch.scalars, launch.entry["constants"]
    queries = np.full(sequences, s["queries"])
    if constants["PAGED"]:
        # As many as there are rows: the longest of all, none, and some. The launcher has left out those without queries.
        queries = np.maximum(np.arange(s["queries"], s["queries"] - sequences, -1), 1)
        assert queries.sum() == s["total"], launch.describe()
        launch.given("query_starts", np.concatenate([[0], np.cumsum(queries)]))
    if constants["CODED"]:
        return queries, np.full(sequences, s["room"])
    # No key, fewer keys than queries, a block and one more or less, all.
    block = constants["BLOCK"]
    keys = np.minimum([s["room"], 1, block, block + 1, block - 1, 0, 7][:sequences], s["room"])
    launch.given("counts", keys)
    return queries, keys


def decode_keys(launch, sequences, keys):
    """Makes the memory of keys and values; returns those of each sequence, (heads, keys, dim)."""
    s, constants = launch.scalars, launch.entry["constants"]
    heads, dim = s["kv_heads"], s["dim"]
    if constants["PAGED"]:
        size = s["block_size"]
        used = -(-keys // size)
        starts = np.concatenate([[0], np.cumsum(used)])
        launch.given("key_starts", starts * size)
        # The blocks of the pool lie in another order, and one of them is of no sequence.
        table = launch.given("table", launch.random.permutation(starts[-1] + 1)[:starts[-1]])
        shape = (starts[-1] + 1, heads, size, dim)
    else:
        tail = s["room"] - s.get("coded", 0)
        shape = (sequences, heads, tail, dim)
    both = []
    for name in ("keys", "values"):
        strides = [s[f"{name[0]}_{axis}"] for axis in ("sequence", "head", "token")] + [1]
        extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))
        # Memory that no key was written to holds anything.
        whole = np.full(extent, np.nan)
        view = np.lib.stride_tricks.as_strided(whole, shape, [8 * stride for stride in strides])
        values = rounded(launch.random.standard_normal(shape), launch.types["keys"])
        values = widened(values, launch.types["keys"])
        if constants["PAGED"]:
            parts = []
            for sequence, count in enumerate(keys):
                blocks = table[starts[sequence]:starts[sequence + 1]]
                for number, block in enumerate(blocks):
                    rows = min(count - number * size, size)
                    view[block, :, :rows] = values[block, :, :rows]
                parts.append(values[blocks].transpose(1, 0, 2, 3).reshape(heads, -1, dim)[:, :count])
        else:
            parts = []
            for sequence, count in enumerate(keys - s.get("coded", 0)):
                view[sequence, :, :count] = values[sequence, :, :count]
                parts.append(values[sequence, :, :count])
        launch.given(name, whole)
        both.append(parts)
    if constants["CODED"]:
        both = [decode_codes(launch, name, sequences, parts) for name, parts in zip(("key", "value"), both)]
    return both


def decode_codes(launch, name, sequences, tails):
    """Makes the codes of keys or values; returns what they stand for, and the tails behind them."""
    s, group = launch.scalars, launch.entry["constants"]["GROUP"]
    heads, dim, capacity, coded = s["kv_heads"], s["dim"], s["capacity"], s["coded"]
    codes = launch.random.integers(0, 256, (sequences, heads, capacity, dim))
    # Keys have a line of scales and least numbers for a block of tokens, values one for each token.
    lines, width = (capacity // group, dim) if name == "key" else (capacity, dim // group)
    scales = launch.random.uniform(1e-3, 2e-2, (sequences, heads, lines, 2 * width))
    scales[..., width:] *= -100.0
    scales[:, :, -(-coded // (capacity // lines)):] = np.nan
    codes = launch.given(f"{name}_codes", codes)
    scales = launch.given(f"{name}_lines", scales)
    wide = [np.repeat(np.repeat(part, capacity // lines, axis=2), dim // width, axis=3)
            for part in (scales[..., :width], scales[..., width:])]
    numbers = (codes * wide[0] + wide[1])[:, :, :coded]
    numbers = widened(rounded(numbers, launch.types["keys"]), launch.types["keys"])
    return [np.concatenate([numbers[n], tail], axis=1) for n, tail in enumerate(tails)]


def decode_attention(launch):
    s, constants = launch.scalars, launch.entry["constants"]
    (programs, splits), rows = launch.entry["blocks"], constants["ROWS"]
    heads, group, dim, total = s["kv_heads"], s["group"], s["dim"], s["total"]
    sequences = programs // heads // -(-s["queries"] * group // rows)
    queries, counts = decode_lengths(launch, sequences)
    keys, values = decode_keys(launch, sequences, counts)
    extent = 1 + (total - 1) * s["q_row"] + (heads * group - 1) * s["q_head"] + dim - 1
    flat = launch.given("query", launch.random.standard_normal(extent))
    steps = [8 * s["q_row"], 8 * s["q_head"], 8]
    query = np.lib.stride_tricks.as_strided(flat, (total, heads * group, dim), steps)
    if constants["DIRECT"]:
        assert splits == 1, launch.describe()
        launch.output("y", total, heads * group, dim)
        launch.output("y_lse", heads * group, total)
    else:
        launch.output("partial", splits, total, heads * group, dim)
        launch.output("lse", splits, total, heads * group)
    launch.run()
    if constants["DIRECT"]:
        means, lse = launch.buffers["y"].get()[None], launch.buffers["y_lse"].get().T[None]
    else:
        means, lse = launch.buffers["partial"].get(), launch.buffers["lse"].get()
    assert not np.isnan(means).any() and not np.isnan(lse).any(), launch.describe()
    # Without the second kernel: the splits by their weights.
    highest = lse.max(axis=0)
    base = np.where(np.isinf(highest), 0.0, highest)
    weights = np.exp(lse - base)
    whole = weights.sum(axis=0)
    mean = (means * weights[..., None]).sum(axis=0) / np.where(whole == 0, 1, whole)[..., None]
    found = np.where(whole == 0, -np.inf, base + np.log(np.where(whole == 0, 1, whole)))
    expected, expected_lse = np.zeros_like(mean), np.full_like(found, -np.inf)
    first = 0
    for n in range(sequences):
        for t in range(queries[n]):
            position = counts[n] - queries[n] + t
            at = np.arange(counts[n])
            seen = (at >= position - s["left"]) & (at <= position + s["right"])
            for head in range(heads * group if seen.any() else 0):
                k, v = keys[n][head // group][seen], values[n][head // group][seen]
                scores = k @ query[first + t, head] * s["scale"]
                if s["softcap"] > 0:
                    scores = s["softcap"] * np.tanh(scores / s["softcap"])
                exponentials = np.exp(scores - scores.max())
                expected[first + t, head] = exponentials @ v / exponentials.sum()
                expected_lse[first + t, head] = scores.max() + np.log(exponentials.sum())
        first += queries[n]
    # Weights are rounded to f16 for the tensor cores. What codes stand for is rounded to the dtype of the cache, where the
    # interpreter cuts bf16 off: keys and values lose up to twice the error of rounding.
    kind = "f16" if launch.kind == "bf16" and not constants["CODED"] else launch.kind
    factor = 2 if constants["CODED"] and kind == "bf16" else 1
    worst = launch.close("lse", expected_lse, factor=factor, found=found, kind=kind)
    # Results of one split are rounded to the dtype of the queries.
    name, kind = ("y", launch.kind) if constants["DIRECT"] else ("partial", kind)
    return max(worst, launch.close(name, expected, factor=factor, found=mean, kind=kind))


def paged_write(launch):
    s = launch.scalars
    tokens, heads = launch.entry["blocks"]
    dim, rows = s["dim"], s["kp_head"] // s["kp_row"]
    # Tokens in any order, no two in one place; the other places keep what they have.
    slots = launch.random.permutation((tokens + 1) * rows)[:tokens]
    blocks, places = launch.given("blocks", slots // rows), launch.given("places", slots % rows)
    expected = {}
    for name in ("key", "value"):
        extent = 1 + (tokens - 1) * s[f"{name[0]}_token"] + (heads - 1) * s[f"{name[0]}_head"] + dim - 1
        flat = launch.given(f"{name}s", launch.random.standard_normal(extent))
        strides = [8 * s[f"{name[0]}_token"], 8 * s[f"{name[0]}_head"], 8]
        given = np.lib.stride_tricks.as_strided(flat, (tokens, heads, dim), strides)
        before = launch.values(f"{name}_pool", tokens + 1, heads, rows, dim).copy()
        before[blocks.astype(int), :, places.astype(int)] = given
        expected[f"{name}_pool"] = before
    launch.run()
    for name, values in expected.items():
        assert np.array_equal(launch.buffers[name].get(), values), f"{launch.describe()}: {name}"
    return 0.0


def delta_rows(launch, name, tokens, heads, dim):
    """Makes rows of heads with the strides of the launch; returns them (tokens, heads, dim)."""
    token, head = (launch.scalars[f"{name[0]}_{axis}"] for axis in ("token", "head"))
    extent = 1 + (tokens - 1) * token + (heads - 1) * head + dim - 1
    flat = launch.given(name, launch.random.standard_normal(extent))
    return np.lib.stride_tricks.as_strided(flat, (tokens, heads, dim), [8 * token, 8 * head, 8])


def delta_plan(launch, sequences):
    """Makes the plan of sequences of some tokens, of none and of one; returns offsets, and the slots before and after."""
    offsets = np.concatenate([[0], np.cumsum([3, 0, 1][:sequences])])
    slots = launch.random.permutation(2 * sequences)
    source, target = slots[:sequences].copy(), slots[sequences:].copy()
    # The first one starts from zeros, the last one keeps its slot.
    source[0], target[-1] = -1, source[-1]
    launch.given("plan", np.concatenate([offsets, source, target]))
    return offsets, source, target


def delta_rule(launch):
    s = launch.scalars
    sequences, heads, group, key_dim, value_dim = (
        s[n] for n in ("sequences", "heads", "group", "key_dim", "value_dim"))
    offsets, source, target = delta_plan(launch, sequences)
    tokens = offsets[-1]
    query, key = (delta_rows(launch, name, tokens, heads // group, key_dim) for name in ("query", "key"))
    value = delta_rows(launch, "value", tokens, heads, value_dim)
    decay = launch.given("decay", -np.abs(launch.random.standard_normal((tokens, heads))))
    beta = launch.given("beta", launch.random.uniform(0, 1, (tokens, heads)))
    states = launch.values("states", 2 * sequences, heads, key_dim, value_dim).copy()
    launch.output("y", tokens, heads, value_dim)
    launch.run()
    if launch.entry["constants"]["NORM"]:
        query, key = (x / np.sqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6) for x in (query, key))
    serving = np.arange(heads) // group
    query, key = query[:, serving] * s["scale"], key[:, serving]
    y = np.zeros((tokens, heads, value_dim))
    for sequence in range(sequences):
        state = states[source[sequence]] if source[sequence] >= 0 else np.zeros_like(states[0])
        for token in range(offsets[sequence], offsets[sequence + 1]):
            state = state * np.exp(decay[token])[:, None, None]
            change = (value[token] - np.einsum("hkv,hk->hv", state, key[token])) * beta[token][:, None]
            state = state + key[token][:, :, None] * change[:, None, :]
            y[token] = np.einsum("hkv,hk->hv", state, query[token])
        states[target[sequence]] = state
    # Sums of three tokens, in another order.
    return max(launch.close("y", y), launch.close("states", states, factor=4))


def causal_conv1d(launch):
    sequences, channels, stride = (launch.scalars[n] for n in ("sequences", "channels", "x_token"))
    width = launch.entry["constants"]["WIDTH"]
    offsets, source, target = delta_plan(launch, sequences)
    x = launch.values("x", offsets[-1], stride)[:, :channels]
    weight = launch.values("weight", channels, width)
    states = launch.values("states", 2 * sequences, channels, width - 1).copy()
    launch.output("y", offsets[-1], channels)
    launch.run()
    y = np.zeros(x.shape)
    for sequence in range(sequences):
        first, end = offsets[sequence], offsets[sequence + 1]
        past = states[source[sequence]].T if source[sequence] >= 0 else np.zeros((width - 1, channels))
        inputs = np.concatenate([past, x[first:end]])
        for token in range(end - first):
            total = (inputs[token:token + width].T * weight).sum(axis=1)
            y[first + token] = total / (1.0 + np.exp(-total))
        states[target[sequence]] = inputs[end - first:].T
    assert np.array_equal(launch.buffers["states"].get(), states), launch.describe()
    return launch.close("y", y)


def largest(launch, *shape):
    """Makes an input with numbers of every size, some of which are 0, subnormal, or round to the next power of two."""
    values = launch.random.standard_normal(shape) * 2.0 ** launch.random.integers(-24, 3, shape)
    values.flat[:3] = [0.0, -0.0, 3.9999]
    return launch.given("x", values)


def fp8_amax(launch):
    x = largest(launch, launch.scalars["count"])
    programs, size = launch.entry["blocks"][0], launch.scalars["blocks"] * launch.entry["constants"]["BLOCK"]
    launch.output("partial", programs)
    launch.run()
    expected = [np.abs(x[n * size:(n + 1) * size]).max(initial=0.0) for n in range(programs)]
    assert np.array_equal(launch.buffers["partial"].get(), expected), launch.describe()
    return 0.0


def numbers_of_fp8(mantissa, bias):
    """Returns the numbers of the codes without the sign; the last ones of E5M2 are infinity and NaN."""
    code = np.arange(128)
    exponent, digits = code >> mantissa, (code & ((1 << mantissa) - 1)) / (1 << mantissa)
    return np.where(exponent == 0, digits * 2.0 ** (1 - bias), (1 + digits) * 2.0 ** (exponent - bias))


def fp8_cast(launch):
    rows, width, partials = (launch.scalars[n] for n in ("rows", "width", "partials"))
    e5m2 = launch.entry["constants"]["E5M2"]
    most, numbers = (57344.0, numbers_of_fp8(2, 15)) if e5m2 else (448.0, numbers_of_fp8(3, 7))
    x = largest(launch, rows, width)
    x[-1, -1] = np.nan
    launch.given("x", x)
    partial = launch.random.uniform(0.0, 1.0, partials)
    partial[-1] = np.nanmax(np.abs(x))
    launch.given("partial", partial)
    launch.output("codes", rows, width)
    launch.output("inverse", 1)
    if launch.entry["constants"]["COLUMNS"]:
        launch.output("columns", width, launch.scalars["padded"])
    launch.run()
    scale = np.float32(most) / np.float32(partial[-1])
    assert launch.buffers["inverse"].get()[0] == np.float32(1.0) / scale, launch.describe()
    scaled = np.clip(np.float32(x) * scale, -most, most)
    # The nearest number; of two, the one with the even code.
    finite = numbers[numbers <= most]
    size = np.abs(scaled).astype(np.float64)
    above = np.searchsorted(finite, np.nan_to_num(size)).clip(1, len(finite) - 1)
    low, high = size - finite[above - 1], finite[above] - size
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    code = np.where(np.isnan(size), 0x7F, code) | np.where(np.signbit(scaled) & ~np.isnan(size), 0x80, 0)
    found = launch.buffers["codes"].get()
    found = np.where(np.isnan(size), found & 0x7F, found)
    assert np.array_equal(found, code), launch.describe()
    if launch.entry["constants"]["COLUMNS"]:
        expected = np.zeros((width, launch.scalars["padded"]), dtype=np.int64)
        expected[:, :rows] = launch.buffers["codes"].get().T
        assert np.array_equal(launch.buffers["columns"].get(), expected), launch.describe()
    return 0.0


def decode_combine(launch):
    s = launch.scalars
    total, heads = launch.entry["blocks"]
    splits, dim = s["splits"], s["dim"]
    each = launch.random.standard_normal((splits, total, heads)) * 8.0
    # A split that saw no key, and a row of which no split did.
    each[0, 0, :] = -np.inf
    each[:, total - 1, heads - 1] = -np.inf
    each = launch.given("partial_lse", each)
    means = launch.values("partial", splits, total, heads, dim)
    if launch.entry["constants"]["SINKS"]:
        sinks = launch.values("sinks", heads)
    else:
        sinks = np.full(heads, -np.inf)
    launch.output("y", total, heads, dim)
    launch.output("lse", heads, total)
    launch.run()
    highest = np.maximum(each.max(axis=0), sinks)
    base = np.where(np.isinf(highest), 0.0, highest)
    weights = np.exp(each - base)
    whole = weights.sum(axis=0) + np.exp(sinks - base)
    mean = (means * weights[..., None]).sum(axis=0) / np.where(whole == 0, 1, whole)[..., None]
    lse = np.where(whole == 0, -np.inf, base + np.log(np.where(whole == 0, 1, whole)))
    return max(launch.close("y", mean), launch.close("lse", lse.T))


def main():
    manifest = tomllib.loads((HERE / "manifest.toml").read_text())
    kernels = {kernel["name"]: kernel for kernel in manifest["kernel"]}
    missing = set()
    for kernel in manifest["kernel"]:
        for v in variants(kernel):
            missing.add(key(v))
    worst = {}
    launches = json.loads((HERE / "launches.json").read_text())
    for entry in launches:
        kernel = kernels[entry["kernel"]]
        missing.discard(key(entry))
        variant = next(v for v in variants(kernel) if key(v) == key(entry))
        entry["arguments"] = list(signature(kernel, variant).items())
        error = globals()[entry["kernel"]](Launch(kernels, entry))
        slot = (entry["kernel"], entry["dtype"])
        worst[slot] = max(worst.get(slot, 0.0), error)
    # There is no attention of f32 with heads of 256, so that nothing launches the combination of its splits.
    missing = {key for key in missing if key[:2] != ("decode_combine", "f32") or ("DIM", 256) not in key[3]}
    # A copy of 16 bits is the same code for both dtypes, so that its launches count as those of one.
    missing = {key for key in missing if key[:2] != ("paged_write", "f16")}
    assert not missing, f"no launch of {sorted(missing)}"
    for (kernel, dtype), error in worst.items():
        print(f"{kernel:18} {dtype:5} {error:.1e}")
    print(f"{len(launches)} launches of {sum(1 for k in kernels.values() for _ in variants(k))} variants agree with f64")


def key(variant):
    return (variant["kernel"], variant["dtype"], variant["aligned"], tuple(sorted(variant["constants"].items())))


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    main()
