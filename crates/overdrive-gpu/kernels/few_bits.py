"""Products of 1 to 64 rows of f16 or bf16 with weights of 4 or 8 bits on tensor cores. Codes become numbers in registers.

A program takes OUTPUTS rows of the weight. Each step of it takes SLICES blocks of BLOCK inputs; with several slices each warp
multiplies its own. A block of 4-bit codes is two products: of the low halves of its bytes with every second input, and of
the high halves with the others, so that no code has to move. Sums are in f32, in an order that depends on the sizes only:
with `splits` programs for the same outputs, the last one to finish adds the sums of all in their order.

FORMAT says what a code stands for, before the scale:
- INT8: an i8. FP8: a float of 8 bits, e4m3.
- INT4: a code of 4 bits minus 8, or with OFFSET the code, and the offset of its group is added. The first of two codes is in
  the low half of a byte.
- BOOK: an index of 16 numbers. The first of two codes is in the high half. The numbers are rounded; `ratio` undoes the factor
  with which they are rounded least.
GROUP inputs of an output have one scale; 0 says that all have. With NESTED a scale is an 8-bit code of a book of 256
numbers, with a scale for 256 codes, and an offset is added to it. The weight may be up to three weights with an offset each;
the outputs of the others begin at `second` and `third`.
"""

import os

import triton
import triton.language as tl

INT8 = tl.constexpr(0)
FP8 = tl.constexpr(1)
INT4 = tl.constexpr(2)
BOOK = tl.constexpr(3)

# The interpreter has no assembler: there the same numbers are made by other means.
ASSEMBLER = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")

def book_lines():
    """Returns assembler that looks up eight codes. A byte permutation looks up four codes of 3 bits in 8 bytes, and the fourth bit selects.

    Each word comes four times, for each of the bytes that are looked up together. As constants they would be moved to a
    register for each look-up.
    """
    words = [f"${5 + 4 * place}" for place in range(8)]
    lines = [".reg .b32 v, s, m<2>, p, q, a<2>;", "shl.b32 v, $4, 4;", "and.b32 s, $4, 0x77777777;"]
    # The highest bits of the codes as bytes of ones or zeros.
    lines += ["prmt.b32 m0, v, $4, 0xd9c8;", "prmt.b32 m1, v, $4, 0xfbea;"]
    for pair in range(2):
        for plane in range(2):
            four = words[4 * plane:4 * plane + 4]
            lines += [f"prmt.b32 p, {four[0]}, {four[1]}, s;", f"prmt.b32 q, {four[2]}, {four[3]}, s;"]
            lines += [f"lop3.b32 a{plane}, q, p, m{pair}, 0xe4;"]
        lines += [f"prmt.b32 ${pair}, a0, a1, 0x6240;", f"prmt.b32 ${pair + 2}, a0, a1, 0x7351;"]
        if pair == 0:
            lines += ["shr.u32 s, s, 16;"]
    return "{ " + " ".join(lines) + " }"


def int4_lines(half, centered):
    """Returns assembler that puts a code into the last bits of 1024 or 128, and subtracts that and, if centered, 8."""
    high, one, least = ("0x64646464", "0x3c003c00", 0xE400) if half else ("0x43434343", "0x3f803f80", 0xC300)
    least += 8 if centered else 0
    kind = "f16x2" if half else "bf16x2"
    lines = [".reg .b32 a, b, h, o, m, a0, a1, b2, b3;", f"mov.b32 h, {high};"]
    lines += [f"mov.b32 o, {one};", f"mov.b32 m, 0x{least:04x}{least:04x};"]
    lines += ["and.b32 a, $4, 0x0f0f0f0f;", "shr.u32 b, $4, 4;", "and.b32 b, b, 0x0f0f0f0f;"]
    for place, source in enumerate(["a", "a", "b", "b"]):
        lines += [f"prmt.b32 {source}{place}, {source}, h, {'0x4342' if place % 2 else '0x4140'};"]
        lines += [f"fma.rn.{kind} ${place}, {source}{place}, o, m;"]
    return "{ " + " ".join(lines) + " }"


def fp8_lines(half):
    """Returns assembler that puts the exponent of 4 bits where the wider one is, and multiplies with the ratio of their biases."""
    kind, shift, mask, ratio = ("f16x2", 1, "0x3f803f80", "0x5c005c00") if half else ("bf16x2", 4, "0x07f007f0", "0x7b807b80")
    lines = [".reg .b32 v, s, r, z;", f"mov.b32 r, {ratio};", "mov.b32 z, 0x80008000;"]
    for place, selector in enumerate(["0x1404", "0x3424"]):
        lines += [f"prmt.b32 v, $2, 0, {selector};", f"shr.u32 s, v, {shift};", f"and.b32 s, s, {mask};"]
        lines += ["lop3.b32 v, v, z, s, 0xea;", f"fma.rn.{kind} ${place}, v, r, z;"]
    return "{ " + " ".join(lines) + " }"


BOOK_LINES = tl.constexpr(book_lines())
BOOK_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r" + ",r" * 32)
CODES_HALF = tl.constexpr(int4_lines(True, False))
CODES_BRAIN = tl.constexpr(int4_lines(False, False))
CENTERED_HALF = tl.constexpr(int4_lines(True, True))
CENTERED_BRAIN = tl.constexpr(int4_lines(False, True))
FP8_HALF = tl.constexpr(fp8_lines(True))
FP8_BRAIN = tl.constexpr(fp8_lines(False))


@triton.jit
def byte_of(code, w0, w1, w2, w3):
    word = tl.where(code < 8, tl.where(code < 4, w0, w1), tl.where(code < 12, w2, w3))
    return (word >> (8 * (code & 3))) & 255


@triton.jit
def interpreted_4bit(code, w0, w1, w2, w3, w4, w5, w6, w7, FORMAT: tl.constexpr, OFFSET: tl.constexpr, T: tl.constexpr):
    """Returns the numbers of codes as the assembler does."""
    code = code.to(tl.int32)
    if FORMAT == INT4:
        value = (code if OFFSET else code - 8).to(tl.float32).to(T)
    else:
        value = byte_of(code, w0, w1, w2, w3) + 256 * byte_of(code, w4, w5, w6, w7)
        value = value.to(tl.uint16).to(T, bitcast=True)
    return value


@triton.jit
def numbers_4bit(byte, w0, w1, w2, w3, w4, w5, w6, w7, FORMAT: tl.constexpr, OFFSET: tl.constexpr, T: tl.constexpr):
    """Returns the numbers of the low and of the high halves of bytes."""
    if not ASSEMBLER:
        low = interpreted_4bit(byte & 15, w0, w1, w2, w3, w4, w5, w6, w7, FORMAT, OFFSET, T)
        high = interpreted_4bit(byte >> 4, w0, w1, w2, w3, w4, w5, w6, w7, FORMAT, OFFSET, T)
    elif FORMAT == INT4:
        if T == tl.float16:
            LINES: tl.constexpr = CODES_HALF if OFFSET else CENTERED_HALF
            low, high = tl.inline_asm_elementwise(LINES, "=r,=r,=r,=r,r", [byte], dtype=(tl.float16, tl.float16), is_pure=True, pack=4)
        else:
            LINES: tl.constexpr = CODES_BRAIN if OFFSET else CENTERED_BRAIN
            low, high = tl.inline_asm_elementwise(LINES, "=r,=r,=r,=r,r", [byte], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    elif T == tl.float16:
        low, high = tl.inline_asm_elementwise(BOOK_LINES, BOOK_CONSTRAINTS, [byte, w0, w1, w2, w3, w4, w5, w6, w7],
                                              dtype=(tl.float16, tl.float16), is_pure=True, pack=4)
    else:
        low, high = tl.inline_asm_elementwise(BOOK_LINES, BOOK_CONSTRAINTS, [byte, w0, w1, w2, w3, w4, w5, w6, w7],
                                              dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    return low, high


@triton.jit
def numbers_8bit(code, FORMAT: tl.constexpr, T: tl.constexpr):
    if FORMAT == INT8:
        value = code.to(T) if ASSEMBLER else code.to(tl.float32).to(T)
    elif ASSEMBLER:
        LINES: tl.constexpr = FP8_HALF if T == tl.float16 else FP8_BRAIN
        value = tl.inline_asm_elementwise(LINES, "=r,=r,r", [code], dtype=tl.float16 if T == tl.float16 else tl.bfloat16, is_pure=True, pack=4)
    else:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32).to(T)
    return value


@triton.jit
def scales_at(scales, inner_book, inner_scales, added, ratio, at, used, FORMAT: tl.constexpr, NESTED: tl.constexpr):
    """Returns the scales of groups in f32."""
    scale = tl.load(scales + at, mask=used, other=0)
    if NESTED:
        outer = tl.load(inner_scales + (at >> 8), mask=used, other=0.0)
        scale = tl.load(inner_book + scale.to(tl.int32)) * outer + added
    scale = scale.to(tl.float32)
    if FORMAT == BOOK:
        scale *= ratio
    return scale


@triton.jit
def flat(tensor, SLICES: tl.constexpr):
    """Drops the dimension of slices if there is one slice."""
    if SLICES == 1:
        tensor = tl.reshape(tensor, [tensor.shape[1], tensor.shape[2]])
    return tensor


@triton.jit
def low_rows(words, T: tl.constexpr):
    return (words & 0xFFFF).to(tl.int16).to(T, bitcast=True)


@triton.jit
def high_rows(words, T: tl.constexpr):
    return (words >> 16).to(tl.int16).to(T, bitcast=True)


@triton.jit
def few_bits(x, codes, scales, offsets, book, inner_book, inner_scales, y, partial, counters, rows, outputs, inputs, splits,
             inner_offset, second_offset, third_offset, second, third, ratio, FORMAT: tl.constexpr, OFFSET: tl.constexpr,
             NESTED: tl.constexpr, HALF_SCALES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
             SLICES: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Computes `y (rows, outputs) = x (rows, inputs) · weightᵀ` for at most ROWS rows of f16 or bf16.

    The weight is `codes (outputs, inputs)`, with a scale and an offset for each group of an output, in their order. `book` is
    i32 (8,): the 16 numbers as the products take them, the low bytes of all in four words and then the high ones. `partial`
    is f32 (splits, ROWS, outputs), and `counters` has a zero for each block of outputs, and has it again afterwards.
    BLOCK divides GROUP, and `inputs` is a multiple of it, or of 16 where all inputs of an output have one scale.
    """
    T: tl.constexpr = x.dtype.element_ty
    HALVES: tl.constexpr = 1 if FORMAT < INT4 else 2
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    split = tl.program_id(1)
    row = tl.arange(0, ROWS)
    slice = tl.arange(0, SLICES)
    byte = tl.arange(0, BLOCK // HALVES)
    # The last program may have outputs that are not there. It reads the last one for them and does not store them.
    wide = tl.minimum(output, outputs - 1).to(tl.int64)
    steps = tl.cdiv(tl.cdiv(inputs, BLOCK), SLICES)
    each = tl.cdiv(steps, splits)
    begin = split * each
    end = tl.minimum(begin + each, steps)
    code_lines = codes + (wide * (inputs // HALVES))[None, :, None] + byte[None, None, :]
    if HALVES == 2:
        x_lines = x.to(tl.pointer_type(tl.int32), bitcast=True) + (row * (inputs // 2))[None, None, :] + byte[None, :, None]
    else:
        x_lines = x + (row * inputs)[None, None, :] + byte[None, :, None]
    added = 0
    if NESTED:
        added = tl.where(output < second, inner_offset, tl.where(output < third, second_offset, third_offset))[None, :]
    w0, w1, w2, w3, w4, w5, w6, w7 = 0, 0, 0, 0, 0, 0, 0, 0
    if FORMAT == BOOK:
        first = book + (tl.zeros([1, 1], tl.int32) if SLICES == 1 else tl.zeros([1, 1, 1], tl.int32))
        w0, w1, w2, w3 = tl.load(first), tl.load(first + 1), tl.load(first + 2), tl.load(first + 3)
        w4, w5, w6, w7 = tl.load(first + 4), tl.load(first + 5), tl.load(first + 6), tl.load(first + 7)
    if SLICES == 1:
        sums = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
    else:
        sums = tl.zeros([SLICES, OUTPUTS, ROWS], dtype=tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        block = step * SLICES + slice
        if GROUP == 0:
            # The last block may be shorter.
            real = block[:, None] * BLOCK + byte[None, :] < inputs
            code = tl.load(code_lines + (block * BLOCK)[:, None, None], mask=real[:, None, :], other=0)
            values = tl.load(x_lines + (block * BLOCK)[:, None, None], mask=real[:, :, None] & (row < rows)[None, None, :], other=0.0)
        else:
            # Where a step has several blocks, the last step may have fewer.
            real = tl.full([1], True, tl.int1) if SLICES == 1 else block * BLOCK < inputs
            code = tl.load(code_lines + (block * (BLOCK // HALVES))[:, None, None], mask=real[:, None, None], other=0)
            values = tl.load(x_lines + (block * (BLOCK // HALVES))[:, None, None], mask=real[:, None, None] & (row < rows)[None, None, :], other=0)
            at = wide[None, :] * (inputs // GROUP) + (block * BLOCK // GROUP)[:, None]
            used = real[:, None]
            scale = scales_at(scales, inner_book, inner_scales, added, ratio, at, used, FORMAT, NESTED)
            scale = flat(scale[:, :, None], SLICES)
        code = flat(code, SLICES)
        values = flat(values, SLICES)
        if HALVES == 1:
            numbers = numbers_8bit(code, FORMAT, T)
            if GROUP == 0:
                sums = tl.dot(numbers, values, sums)
            else:
                sums += tl.dot(numbers, values) * scale
        else:
            low, high = numbers_4bit(code, w0, w1, w2, w3, w4, w5, w6, w7, FORMAT, OFFSET, T)
            if FORMAT == BOOK:
                part = tl.dot(high, low_rows(values, T))
                part = tl.dot(low, high_rows(values, T), part)
            else:
                part = tl.dot(low, low_rows(values, T))
                part = tl.dot(high, high_rows(values, T), part)
            sums += part * scale
            if OFFSET:
                ones = tl.full(low.shape, 1.0, T)
                part = tl.dot(ones, low_rows(values, T))
                part = tl.dot(ones, high_rows(values, T), part)
                offset = tl.load(offsets + at, mask=used, other=0).to(tl.float32)
                sums += part * flat(offset[:, :, None], SLICES)
    if SLICES > 1:
        sums = tl.sum(sums, axis=0)
    valid = output < outputs
    if GROUP == 0:
        sums *= tl.load(scales + output, mask=valid, other=0.0).to(tl.float32)[:, None]
    place = (row * outputs)[None, :] + output[:, None]
    stored = (row < rows)[None, :] & valid[:, None]
    if splits == 1:
        tl.store(y + place, sums.to(T), mask=stored)
    else:
        size = ROWS * outputs
        tl.store(partial + split * size + place, sums, mask=stored)
        tl.debug_barrier()
        before = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel")
        if before == splits - 1:
            tl.debug_barrier()
            total = tl.zeros([OUTPUTS, ROWS], dtype=tl.float32)
            for other in range(0, splits):
                total += tl.load(partial + other * size + place, mask=stored, other=0.0, cache_modifier=".cg")
            tl.store(y + place, total.to(T), mask=stored)
            tl.store(counters + tl.program_id(0), 0)
