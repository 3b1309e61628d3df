"""Attention of a few new tokens over a long cache, split along the keys, and the combination of the splits.

The keys of a sequence lie in a dense cache, in the blocks of a pool with PAGED, or with CODED as codes of 8 bits that
are followed by keys in full precision. The number of splits is that of the grid along y. Each takes an equal share of
the keys that the queries see, of which there are as many as the device says, so that one launch serves every length.
"""

import triton
import triton.language as tl


@triton.jit
def softmax_step(q, k, v, seen, scale, softcap, sums, highest, weight, PRECISE: tl.constexpr):
    """Adds the keys and values of a block to the running softmax of the rows of `q`; all of them are f32.

    Without PRECISE the products are those of tensor cores in TF32, which has the ten bits of f16 and the exponent of
    bf16: queries, keys and values that come from these are exact, and so are weights that are rounded to f16.
    """
    precision: tl.constexpr = "tf32x3" if PRECISE else "tf32"
    scores = tl.dot(q, tl.trans(k), input_precision=precision) * scale
    if softcap > 0.0:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(seen, scores, float("-inf"))
    new = tl.maximum(highest, tl.max(scores, axis=1))
    # A row that has seen no key yet: the difference of two infinities would be NaN.
    base = tl.where(new == float("-inf"), 0.0, new)
    weights = tl.exp(scores - base[:, None])
    if not PRECISE:
        weights = weights.to(tl.float16).to(tl.float32)
    factor = tl.exp(highest - base)
    weight = weight * factor + tl.sum(weights, axis=1)
    sums = sums * factor[:, None] + tl.dot(weights, v, input_precision=precision)
    return sums, new, weight


@triton.jit
def spread(x, BLOCK: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Returns the numbers (BLOCK, DIM / GROUP) of groups for each of their channels."""
    wide = tl.broadcast_to(x[:, :, None], (BLOCK, DIM // GROUP, GROUP))
    return tl.reshape(wide, (BLOCK, DIM))


@triton.jit
def decode_attention(query, keys, values, partial, lse, y, y_lse, counts, table, key_starts, query_starts, key_codes,
                     value_codes, key_lines, value_lines, queries, total, room, coded, capacity, kv_heads, group, dim,
                     block_size, q_row, q_head, k_sequence, k_head, k_token, v_sequence, v_head, v_token, left, right,
                     scale, softcap, PAGED: tl.constexpr, CODED: tl.constexpr, DIRECT: tl.constexpr, GROUP: tl.constexpr,
                     ROWS: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Computes for a split and ROWS rows the mean of the values, and the logarithm of its denominator.

    Rows are the queries of a sequence, at most `queries`, times the `group` of heads that share a head of keys.
    `partial` is (splits, total, heads, dim), `lse` without the last. A row that sees no key gets zeros and -inf. With
    DIRECT there is one split, whose results go to `y` (total, heads, dim) and `y_lse` (heads, total) instead.
    """
    parts = tl.cdiv(queries * group, ROWS)
    program = tl.program_id(0)
    part = program % parts
    head = program // parts % kv_heads
    sequence = program // parts // kv_heads
    first = sequence * queries
    here = queries
    count = room
    if PAGED:
        first = tl.load(query_starts + sequence)
        here = tl.load(query_starts + sequence + 1) - first
    if not CODED:
        count = tl.minimum(tl.load(counts + sequence), room)
        coded = 0

    index = part * ROWS + tl.arange(0, ROWS)
    token = index // group
    used = token < here
    row = (first + token).to(tl.int64)
    query_head = head * group + index % group
    channel = tl.arange(0, DIM)
    inside = channel < dim
    mask = used[:, None] & inside[None, :]
    at_query = row[:, None] * q_row + query_head[:, None] * q_head + channel[None, :]
    q = tl.load(query + at_query, mask=mask, other=0.0).to(tl.float32)

    # The keys that the first to the last query see, and the blocks of this split among them.
    position = count - here + token
    low = tl.maximum(count - here - left, 0)
    high = tl.minimum(count, count + right)
    blocks = tl.maximum(tl.cdiv(high, BLOCK) - low // BLOCK, 0)
    each = tl.cdiv(blocks, tl.num_programs(1))
    start = (low // BLOCK + tl.program_id(1) * each) * BLOCK
    end = tl.minimum(start + each * BLOCK, high)
    # A sequence with fewer queries than another has rows that are not used.
    end = tl.where(part * ROWS < here * group, end, start)

    PRECISE: tl.constexpr = query.dtype.element_ty == tl.float32
    sums = tl.zeros([ROWS, DIM], dtype=tl.float32)
    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    weight = tl.zeros([ROWS], dtype=tl.float32)
    if CODED:
        line = (sequence * kv_heads + head).to(tl.int64) * capacity
        number = tl.arange(0, DIM // GROUP)
        for block in range(start, tl.minimum(end, coded), BLOCK):
            at = block + tl.arange(0, BLOCK)
            loaded = (at >= low) & (at < end)
            seen = loaded[None, :] & (at[None, :] >= position[:, None] - left)
            seen &= at[None, :] <= position[:, None] + right
            at_code = (line + at)[:, None] * DIM + channel[None, :]
            at_key_line = (line + block) // GROUP * (2 * DIM) + channel
            at_value_line = (line + at)[:, None] * (2 * (DIM // GROUP)) + number[None, :]
            k = tl.load(key_codes + at_code, mask=loaded[:, None], other=0).to(tl.float32)
            k = k * tl.load(key_lines + at_key_line)[None, :] + tl.load(key_lines + at_key_line + DIM)[None, :]
            v = tl.load(value_codes + at_code, mask=loaded[:, None], other=0).to(tl.float32)
            factors = tl.load(value_lines + at_value_line, mask=loaded[:, None], other=0.0)
            least = tl.load(value_lines + at_value_line + DIM // GROUP, mask=loaded[:, None], other=0.0)
            v = v * spread(factors, BLOCK, GROUP, DIM) + spread(least, BLOCK, GROUP, DIM)
            # In the precision of the cache.
            k = k.to(query.dtype.element_ty).to(tl.float32)
            v = v.to(query.dtype.element_ty).to(tl.float32)
            sums, highest, weight = softmax_step(q, k, v, seen, scale, softcap, sums, highest, weight, PRECISE)

    for block in range(tl.maximum(start, coded), end, BLOCK):
        at = block + tl.arange(0, BLOCK)
        loaded = (at >= low) & (at < end)
        seen = loaded[None, :] & (at[None, :] >= position[:, None] - left)
        seen &= at[None, :] <= position[:, None] + right
        if PAGED:
            slot = tl.load(key_starts + sequence) + at
            page = tl.load(table + slot // block_size, mask=loaded, other=0).to(tl.int64)
            at_key = page * k_sequence + head * k_head + slot % block_size * k_token
            at_value = page * v_sequence + head * v_head + slot % block_size * v_token
        else:
            at_key = sequence * k_sequence + head * k_head + (at - coded) * k_token
            at_value = sequence * v_sequence + head * v_head + (at - coded) * v_token
        # Memory that no key was written to is not read: zero times a NaN would be one.
        valid = loaded[:, None] & inside[None, :]
        k = tl.load(keys + at_key[:, None] + channel[None, :], mask=valid, other=0.0).to(tl.float32)
        v = tl.load(values + at_value[:, None] + channel[None, :], mask=valid, other=0.0).to(tl.float32)
        sums, highest, weight = softmax_step(q, k, v, seen, scale, softcap, sums, highest, weight, PRECISE)

    seen_any = weight > 0.0
    denominator = tl.where(seen_any | (weight != weight), weight, 1.0)
    at_row = (tl.program_id(1) * total + row) * (kv_heads * group) + query_head
    mean = sums / denominator[:, None]
    logarithm = tl.where(weight == 0.0, float("-inf"), highest + tl.log(denominator))
    if DIRECT:
        tl.store(y_lse + query_head.to(tl.int64) * total + row, logarithm, mask=used)
        tl.store(y + at_row[:, None] * dim + channel[None, :], mean.to(y.dtype.element_ty), mask=mask)
    else:
        tl.store(lse + at_row, logarithm, mask=used)
        tl.store(partial + at_row[:, None] * dim + channel[None, :], mean, mask=mask)


@triton.jit
def decode_combine(partial, partial_lse, sinks, y, lse, splits, dim, SINKS: tl.constexpr, SPLITS: tl.constexpr,
                   DIM: tl.constexpr):
    """Writes the mean of a row over its splits, and the logarithm of its denominator to `lse` (heads, total).

    With SINKS a logit of each head is part of the denominator.
    """
    total = tl.num_programs(0)
    row = tl.program_id(0)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    split = tl.arange(0, SPLITS)
    channel = tl.arange(0, DIM)
    at = (split.to(tl.int64) * total + row) * heads + head
    each = tl.load(partial_lse + at, mask=split < splits, other=float("-inf"))
    mask = (split < splits)[:, None] & (channel < dim)[None, :]
    means = tl.load(partial + at[:, None] * dim + channel[None, :], mask=mask, other=0.0)
    highest = tl.max(each, axis=0)
    if SINKS:
        sink = tl.load(sinks + head)
        highest = tl.maximum(highest, sink)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp(each - base)
    weight = tl.sum(weights, axis=0)
    if SINKS:
        weight += tl.exp(sink - base)
    denominator = tl.where(weight == 0.0, 1.0, weight)
    mean = tl.sum(means * weights[:, None], axis=0) / denominator
    at_row = row.to(tl.int64) * heads + head
    tl.store(y + at_row * dim + channel, mean.to(y.dtype.element_ty), mask=channel < dim)
    tl.store(lse + head.to(tl.int64) * total + row, tl.where(weight == 0.0, float("-inf"), base + tl.log(denominator)))
