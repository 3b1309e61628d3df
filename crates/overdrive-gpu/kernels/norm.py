"""RMSNorm, also of a sum of two tensors, with its gradients."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_forward(x, residual, weight, y, total, inverse, rows, width, eps,
                     ADD: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Normalises ROWS rows of `width` elements; with ADD those of `x + residual`, which goes to `total`.

    With MIXED `x`, `weight` and `total` are f32, whatever the dtype of `residual` and `y` is.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    at = row[:, None] * width + column[None, :]
    values = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask=mask)
        # The rounded sum is what the next block reads, so it is what is normalised.
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=1) / width + eps)
    factors = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    normalised = values * scale[:, None] * factors[None, :]
    tl.store(y + at, normalised.to(y.dtype.element_ty), mask=mask)
    tl.store(inverse + row, scale, mask=row < rows)


@triton.jit
def rms_norm_backward(x, weight, inverse, dy, extra, dx, narrow, partial, rows, width,
                      ADD: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Computes `dx`, with ADD plus `extra`, and in `partial` one row of each program's share of the weight's gradient.

    With MIXED `dy` alone is in low precision, and `narrow` gets `dx` in it: the gradient of the residual.

    Programs take blocks of rows in turn. Atomic additions would save the second sum, but not in a fixed order.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    factors = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    for block in range(program, tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & inside[None, :]
        at = row[:, None] * width + column[None, :]
        scale = tl.load(inverse + row, mask=row < rows, other=0.0)[:, None]
        normalised = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) * scale
        gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        sums += gradient * normalised
        gradient *= factors[None, :]
        mean = tl.sum(gradient * normalised, axis=1) / width
        result = (gradient - normalised * mean[:, None]) * scale
        if ADD:
            result += tl.load(extra + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dx + at, result.to(dx.dtype.element_ty), mask=mask)
        if MIXED:
            tl.store(narrow + at, result.to(narrow.dtype.element_ty), mask=mask)
    tl.store(partial + program.to(tl.int64) * width + column, tl.sum(sums, axis=0), mask=inside)
