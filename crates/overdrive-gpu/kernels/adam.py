"""AdamW whose averages are 8-bit codes, with one scale for each block of elements."""

import triton
import triton.language as tl


@triton.jit
def nearest(values, bounds):
    """Returns the number of the 255 ascending `bounds` that are less than a value, which is the nearest code."""
    code = tl.zeros(values.shape, dtype=tl.int32)
    for exponent in tl.static_range(8):
        step = 128 >> exponent
        code += tl.where(tl.load(bounds + code + (step - 1)) < values, step, 0)
    return code


@triton.jit
def quantized(values, bounds):
    """Returns the codes of blocks, and their scales: the largest magnitudes."""
    scale = tl.max(tl.abs(values), axis=1)
    # The reciprocal of a subnormal scale would be infinite; such blocks become 0.
    inverse = tl.where(scale >= 1.1754943508222875e-38, 1.0 / scale, 0.0)
    return nearest(values * inverse[:, None], bounds), scale


@triton.jit
def adam8(parameter, gradient, codes1, codes2, scales1, scales2, book1, bounds1, book2, bounds2, count, beta1, beta2,
          rest1, rest2, decay, step_size, correction2, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Updates ROWS blocks of a parameter and of its state, in place."""
    block = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = at < count
    used = block < tl.cdiv(count, BLOCK)
    code1 = tl.load(codes1 + at, mask=mask, other=0).to(tl.int32)
    code2 = tl.load(codes2 + at, mask=mask, other=0).to(tl.int32)
    scale1 = tl.load(scales1 + block, mask=used, other=0.0)[:, None]
    scale2 = tl.load(scales2 + block, mask=used, other=0.0)[:, None]
    g = tl.load(gradient + at, mask=mask, other=0.0).to(tl.float32)
    p = tl.load(parameter + at, mask=mask, other=0.0).to(tl.float32)
    # Beyond the end the averages are 0, which no scale depends on.
    m = tl.where(mask, tl.load(book1 + code1) * scale1 * beta1 + rest1 * g, 0.0)
    v = tl.where(mask, tl.load(book2 + code2) * scale2 * beta2 + rest2 * g * g, 0.0)
    p = p * decay - step_size * (m / (tl.sqrt(v) * correction2 + eps))
    tl.store(parameter + at, p.to(parameter.dtype.element_ty), mask=mask)
    code1, new1 = quantized(m, bounds1)
    code2, new2 = quantized(v, bounds2)
    tl.store(codes1 + at, code1.to(tl.uint8), mask=mask)
    tl.store(codes2 + at, code2.to(tl.uint8), mask=mask)
    tl.store(scales1 + block, new1, mask=used)
    tl.store(scales2 + block, new2, mask=used)
