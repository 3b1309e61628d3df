"""Tensors as 8-bit floats with one scale, for the products of training: the largest magnitude, then the codes."""

import triton
import triton.language as tl


@triton.jit
def encode(x, LARGEST: tl.constexpr, MANTISSA: tl.constexpr, LEAST: tl.constexpr, BIAS: tl.constexpr):
    """Returns the codes of f32 numbers of at most LARGEST, rounded to nearest, ties to even.

    By integers, because an 8-bit float is a type of compute capability 8.9 and later only. LEAST is the smallest normal
    number; below it, the codes count multiples of its MANTISSA-th binary fraction, to which the addition of a number
    with such a last digit rounds.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    SHIFT: tl.constexpr = 23 - MANTISSA
    odd = (size >> SHIFT) & 1
    normal = ((size + ((1 << (SHIFT - 1)) - 1) + odd) >> SHIFT) - ((127 - BIAS) << MANTISSA)
    ROUNDS: tl.constexpr = LEAST * (1 << SHIFT)
    magnitude = size.to(tl.float32, bitcast=True)
    rounded = (magnitude + ROUNDS).to(tl.uint32, bitcast=True)
    base = tl.full(x.shape, ROUNDS, tl.float32).to(tl.uint32, bitcast=True)
    code = tl.where(magnitude < LEAST, rounded - base, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def fp8_amax(x, partial, count, blocks, BLOCK: tl.constexpr):
    """Writes the largest magnitude of `blocks` blocks, one for each program. NaN counts as nothing."""
    most = tl.zeros([BLOCK], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * blocks
    for block in range(blocks):
        at = (first + block) * BLOCK + tl.arange(0, BLOCK)
        size = tl.abs(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32))
        # A comparison with NaN is false.
        most = tl.where(size > most, size, most)
    tl.store(partial + tl.program_id(0), tl.max(most, axis=0))


@triton.jit
def fp8_cast(x, partial, codes, columns, inverse, rows, width, padded, partials, E5M2: tl.constexpr, COLUMNS: tl.constexpr,
             TILE: tl.constexpr, PARTIALS: tl.constexpr):
    """Writes the codes of a tile of a matrix, and with COLUMNS also those of its transpose, whose rows are `padded` with 0.

    Every program reads all of the partial maxima; the first one writes the factor from codes to numbers.
    """
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    some = tl.arange(0, PARTIALS)
    most = tl.max(tl.load(partial + some, mask=some < partials, other=0.0), axis=0)
    # As in torchao: no scale is above LARGEST / 1e-12.
    scale = tl.div_rn(LARGEST, tl.maximum(most, 1e-12))
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(inverse, tl.div_rn(1.0, scale))
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    inside = (row < rows) & (column < width)
    scaled = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32) * scale
    # A NaN is kept: both comparisons are false.
    scaled = tl.where(scaled > LARGEST, LARGEST, tl.where(scaled < -LARGEST, -LARGEST, scaled))
    if E5M2:
        code = encode(scaled, 57344.0, 2, 6.103515625e-05, 15)
    else:
        code = encode(scaled, 448.0, 3, 0.015625, 7)
    tl.store(codes + row * width + column, code, mask=inside)
    if COLUMNS:
        place = columns + column.to(tl.int64) * padded + row
        tl.store(tl.trans(place), tl.trans(code), mask=tl.trans((row < padded) & (column < width)))
