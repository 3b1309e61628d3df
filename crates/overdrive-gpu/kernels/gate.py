"""Gated activations, `activation(gate) * up`, with their gradients."""

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
RELU = tl.constexpr(3)


@triton.jit
def gelu_tanh_share(x):
    """Returns `(1 + tanh(u)) / 2`, which is `sigmoid(2u)`, for the u of GPT-2's GELU."""
    return tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        result = x * tl.sigmoid(x)
    elif ACTIVATION == GELU:
        result = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        result = x * gelu_tanh_share(x)
    else:
        # Written so that a NaN stays one.
        result = tl.where(x <= 0.0, 0.0, x)
    return result


@triton.jit
def slope(x, ACTIVATION: tl.constexpr):
    """Returns the derivative of `activate`."""
    if ACTIVATION == SILU:
        share = tl.sigmoid(x)
        result = share * (1.0 + x * (1.0 - share))
    elif ACTIVATION == GELU:
        density = tl.exp(-0.5 * x * x) * 0.3989422804014327
        result = 0.5 + 0.5 * tl.erf(x * 0.7071067811865476) + x * density
    elif ACTIVATION == GELU_TANH:
        share = gelu_tanh_share(x)
        # Beyond the range where the share is 0 or 1 the factor may overflow, and 0 times infinity is NaN.
        rest = share * (1.0 - share)
        inner = x * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        result = share + tl.where(rest == 0.0, 0.0, rest * inner)
    else:
        result = tl.where(x <= 0.0, 0.0, 1.0)
    return result


@triton.jit
def glu_forward(gate, up, y, width, stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Computes a block of a row. Rows of `gate` and `up` begin every `stride` elements, those of `y` every `width`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = row * stride + column
    a = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    result = activate(a, ACTIVATION) * b
    tl.store(y + row * width + column, result.to(y.dtype.element_ty), mask=mask)


@triton.jit
def glu_backward(gate, up, dy, d_gate, d_up, width, stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Computes both gradients of a block of a row, in the layout of `gate` and `up`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    at = row * stride + column
    a = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    gradient = tl.load(dy + row * width + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(d_gate + at, (gradient * b * slope(a, ACTIVATION)).to(d_gate.dtype.element_ty), mask=mask)
    tl.store(d_up + at, (gradient * activate(a, ACTIVATION)).to(d_up.dtype.element_ty), mask=mask)
