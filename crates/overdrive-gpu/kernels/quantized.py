"""Products of a few rows with quantized weights, and weights dequantized for products of more.

Codes of 4 bits share a byte; `HIGH_FIRST` says which of the two comes first. A group of GROUP inputs of an output has one
scale. With BOOK a code is an index of 16 numbers, otherwise a number itself, counted from 8 or, with OFFSET, from 0, and
the offset of the group is added. HALF_SCALES says that scales and offsets are f16, else f32; the types say it too.
"""

import triton
import triton.language as tl


@triton.jit
def value_of(code, book, BOOK: tl.constexpr, OFFSET: tl.constexpr):
    if BOOK:
        value = tl.load(book + code.to(tl.int32))
    elif OFFSET:
        value = code.to(tl.float32)
    else:
        value = code.to(tl.float32) - 8.0
    return value


@triton.jit
def pair_of(byte, book, HIGH_FIRST: tl.constexpr, BOOK: tl.constexpr, OFFSET: tl.constexpr):
    """Returns the two values of a byte, in their order."""
    high = value_of(byte >> 4, book, BOOK, OFFSET)
    low = value_of(byte & 15, book, BOOK, OFFSET)
    if HIGH_FIRST:
        first, second = high, low
    else:
        first, second = low, high
    return first, second


@triton.jit
def add_row(sums, x, first, second, scale, offset, column, mask, OFFSET: tl.constexpr):
    """Adds the products of a row of `x`."""
    a = tl.load(x + column, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + column + 1, mask=mask, other=0.0).to(tl.float32)
    sums += (first * a + second * b) * scale
    if OFFSET:
        sums += (a + b) * offset
    return sums


@triton.jit
def store_row(y, sums, output, outputs):
    total = tl.sum(tl.sum(sums, axis=2), axis=1)
    tl.store(y + output, total.to(y.dtype.element_ty), mask=output < outputs)


@triton.jit
def few_rows_4bit(x, codes, scales, offsets, book, y, rows, outputs, groups, HIGH_FIRST: tl.constexpr, BOOK: tl.constexpr,
                  OFFSET: tl.constexpr, HALF_SCALES: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, GROUPS: tl.constexpr,
                  GROUP: tl.constexpr):
    """Multiplies up to ROWS rows of `x` with OUTPUTS rows of the weight. ROWS is 1 or 4."""
    # Programs that read the same codes are next to each other, so that the second finds them in a cache.
    row_blocks = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_blocks * ROWS
    output = tl.program_id(0) // row_blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = groups * GROUP
    byte = tl.arange(0, GROUP // 2)[None, None, :]
    x += row.to(tl.int64) * inputs
    sums0 = tl.zeros([OUTPUTS, GROUPS, GROUP // 2], dtype=tl.float32)
    if ROWS > 1:
        sums1 = tl.zeros([OUTPUTS, GROUPS, GROUP // 2], dtype=tl.float32)
        sums2 = tl.zeros([OUTPUTS, GROUPS, GROUP // 2], dtype=tl.float32)
        sums3 = tl.zeros([OUTPUTS, GROUPS, GROUP // 2], dtype=tl.float32)
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        inside = (group < groups)[None, :]
        used = inside & (output < outputs)[:, None]
        at = output.to(tl.int64)[:, None] * groups + group[None, :]
        scale = tl.load(scales + at, mask=used, other=0.0).to(tl.float32)[:, :, None]
        offset = scale
        if OFFSET:
            offset = tl.load(offsets + at, mask=used, other=0.0).to(tl.float32)[:, :, None]
        code = tl.load(codes + at[:, :, None] * (GROUP // 2) + byte, mask=used[:, :, None], other=0)
        first, second = pair_of(code, book, HIGH_FIRST, BOOK, OFFSET)
        column = group[None, :, None] * GROUP + 2 * byte
        mask = inside[:, :, None]
        sums0 = add_row(sums0, x, first, second, scale, offset, column, mask, OFFSET)
        if ROWS > 1:
            sums1 = add_row(sums1, x + inputs, first, second, scale, offset, column, mask & (row + 1 < rows), OFFSET)
            sums2 = add_row(sums2, x + 2 * inputs, first, second, scale, offset, column, mask & (row + 2 < rows), OFFSET)
            sums3 = add_row(sums3, x + 3 * inputs, first, second, scale, offset, column, mask & (row + 3 < rows), OFFSET)
    y += row.to(tl.int64) * outputs
    store_row(y, sums0, output, outputs)
    if ROWS > 1:
        if row + 1 < rows:
            store_row(y + outputs, sums1, output, outputs)
        if row + 2 < rows:
            store_row(y + 2 * outputs, sums2, output, outputs)
        if row + 3 < rows:
            store_row(y + 3 * outputs, sums3, output, outputs)


@triton.jit
def dequantize_4bit(codes, scales, offsets, book, y, count, HIGH_FIRST: tl.constexpr, BOOK: tl.constexpr,
                    OFFSET: tl.constexpr, HALF_SCALES: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """Writes the numbers of GROUPS of `count` groups, which lie one after another."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    used = group < count
    scale = tl.load(scales + group, mask=used, other=0.0).to(tl.float32)[:, None]
    byte = tl.arange(0, GROUP // 2)[None, :]
    at = group[:, None] * (GROUP // 2) + byte
    code = tl.load(codes + at, mask=used[:, None], other=0)
    first, second = pair_of(code, book, HIGH_FIRST, BOOK, OFFSET)
    first *= scale
    second *= scale
    if OFFSET:
        offset = tl.load(offsets + group, mask=used, other=0.0).to(tl.float32)[:, None]
        first += offset
        second += offset
    # Side by side in registers, so that stores are wide.
    numbers = tl.reshape(tl.join(first, second), [GROUPS, GROUP])
    to = y + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    tl.store(to, numbers.to(y.dtype.element_ty), mask=used[:, None])


@triton.jit
def store_scaled(y, sums, scale, output, outputs):
    total = tl.sum(sums, axis=1) * scale
    tl.store(y + output, total.to(y.dtype.element_ty), mask=output < outputs)


@triton.jit
def few_rows_8bit(x, codes, scales, y, rows, outputs, inputs, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
                  BLOCK: tl.constexpr):
    """As few_rows_4bit with codes of 8 bits and one scale for each output."""
    row_blocks = tl.cdiv(rows, ROWS)
    row = tl.program_id(0) % row_blocks * ROWS
    output = tl.program_id(0) // row_blocks * OUTPUTS + tl.arange(0, OUTPUTS)
    x += row.to(tl.int64) * inputs
    begin = output.to(tl.int64)[:, None] * inputs
    sums0 = tl.zeros([OUTPUTS, BLOCK], dtype=tl.float32)
    if ROWS > 1:
        sums1 = tl.zeros([OUTPUTS, BLOCK], dtype=tl.float32)
        sums2 = tl.zeros([OUTPUTS, BLOCK], dtype=tl.float32)
        sums3 = tl.zeros([OUTPUTS, BLOCK], dtype=tl.float32)
    for start in range(0, inputs, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = column < inputs
        code = tl.load(codes + begin + column, mask=inside & (output < outputs)[:, None], other=0).to(tl.float32)
        sums0 += code * tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
        if ROWS > 1:
            sums1 += code * tl.load(x + inputs + column, mask=inside & (row + 1 < rows), other=0.0).to(tl.float32)
            sums2 += code * tl.load(x + 2 * inputs + column, mask=inside & (row + 2 < rows), other=0.0).to(tl.float32)
            sums3 += code * tl.load(x + 3 * inputs + column, mask=inside & (row + 3 < rows), other=0.0).to(tl.float32)
    scale = tl.load(scales + output, mask=output < outputs, other=0.0)
    y += row.to(tl.int64) * outputs
    store_scaled(y, sums0, scale, output, outputs)
    if ROWS > 1:
        if row + 1 < rows:
            store_scaled(y + outputs, sums1, scale, output, outputs)
        if row + 2 < rows:
            store_scaled(y + 2 * outputs, sums2, scale, output, outputs)
        if row + 3 < rows:
            store_scaled(y + 3 * outputs, sums3, scale, output, outputs)


@triton.jit
def dequantize_8bit(codes, scales, y, inputs, BLOCK: tl.constexpr):
    """Writes a block of the numbers of an output."""
    output = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + output * inputs + column, mask=column < inputs, other=0).to(tl.float32)
    numbers = code * tl.load(scales + output)
    tl.store(y + output * inputs + column, numbers.to(y.dtype.element_ty), mask=column < inputs)
