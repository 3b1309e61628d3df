"""Rotary position embedding, with the split of a joint projection and its gradient.

Tokens are rows, `length` of them a sequence. The first two channels of a pair are `pairs` apart, or with INTERLEAVED
side by side. Channels beyond the pairs are copied, and so are the heads from `rotated` on, which are values.
"""

import triton
import triton.language as tl


@triton.jit
def angles(cos, sin, sequence, position, table_stride, pairs, sign, PAIRS: tl.constexpr):
    """Returns the cosines and sines of a token as rows of one head."""
    pair = tl.arange(0, PAIRS)
    at = sequence * table_stride + position * pairs + pair
    c = tl.load(cos + at, mask=pair < pairs, other=1.0)
    s = tl.load(sin + at, mask=pair < pairs, other=0.0) * sign
    return c[None, :], s[None, :]


@triton.jit
def rotary_split(x, q, k, v, cos, sin, length, q_heads, kv_heads, dim, pairs, table_stride,
                 INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Copies the heads of rows `x` (tokens, q_heads + 2 kv_heads, dim) to three tensors and rotates `q` and `k`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    rotated = q_heads + kv_heads
    heads = rotated + kv_heads
    c, s = angles(cos, sin, token // length, token % length, table_stride, pairs, 1.0, PAIRS)
    source = x + token * heads * dim + head[:, None] * dim
    to_q = q + (token * q_heads + head[:, None]) * dim
    to_k = k + (token * kv_heads + head[:, None] - q_heads) * dim
    to_v = v + (token * kv_heads + head[:, None] - rotated) * dim
    is_q = (head < q_heads)[:, None]
    is_k = ((head >= q_heads) & (head < rotated))[:, None]
    is_v = ((head >= rotated) & (head < heads))[:, None]
    if INTERLEAVED:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    else:
        first, second = pair[None, :], pair[None, :] + pairs
    inside = (pair < pairs)[None, :]
    a = tl.load(source + first, mask=inside & (head < heads)[:, None], other=0.0)
    b = tl.load(source + second, mask=inside & (head < heads)[:, None], other=0.0)
    # Values are copied, not multiplied by one and zero: an infinity would become NaN.
    turned = (head < rotated)[:, None]
    wide_a, wide_b = a.to(tl.float32), b.to(tl.float32)
    out_a = tl.where(turned, (wide_a * c - wide_b * s).to(a.dtype), a)
    out_b = tl.where(turned, (wide_b * c + wide_a * s).to(a.dtype), b)
    tl.store(to_q + first, out_a, mask=inside & is_q)
    tl.store(to_q + second, out_b, mask=inside & is_q)
    tl.store(to_k + first, out_a, mask=inside & is_k)
    tl.store(to_k + second, out_b, mask=inside & is_k)
    tl.store(to_v + first, out_a, mask=inside & is_v)
    tl.store(to_v + second, out_b, mask=inside & is_v)
    for start in range(2 * pairs, dim, PAIRS):
        channel = start + pair[None, :]
        rest = tl.load(source + channel, mask=(channel < dim) & (head < heads)[:, None], other=0.0)
        tl.store(to_q + channel, rest, mask=(channel < dim) & is_q)
        tl.store(to_k + channel, rest, mask=(channel < dim) & is_k)
        tl.store(to_v + channel, rest, mask=(channel < dim) & is_v)


@triton.jit
def rotary_join(q, k, v, y, cos, sin, length, q_heads, kv_heads, v_heads, dim, pairs, table_stride,
                q_sequence, q_token, q_head, k_sequence, k_token, k_head, v_sequence, v_token, v_head, sign,
                INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Rotates heads of tensors with strides and copies them to rows `y` (tokens, q_heads + kv_heads + v_heads, dim).

    With a `sign` of -1 it rotates back, which is the gradient. One tensor alone has no heads of the other two.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, PAIRS)
    rotated = q_heads + kv_heads
    heads = rotated + v_heads
    sequence = token // length
    position = token % length
    c, s = angles(cos, sin, sequence, position, table_stride, pairs, sign, PAIRS)
    of_q = q + sequence * q_sequence + position * q_token + head[:, None] * q_head
    of_k = k + sequence * k_sequence + position * k_token + (head - q_heads)[:, None] * k_head
    of_v = v + sequence * v_sequence + position * v_token + (head - rotated)[:, None] * v_head
    is_q = (head < q_heads)[:, None]
    is_k = ((head >= q_heads) & (head < rotated))[:, None]
    is_v = ((head >= rotated) & (head < heads))[:, None]
    to = y + (token * heads + head[:, None]) * dim
    if INTERLEAVED:
        first, second = 2 * pair[None, :], 2 * pair[None, :] + 1
    else:
        first, second = pair[None, :], pair[None, :] + pairs
    inside = (pair < pairs)[None, :]
    # A head lies in one of the three; the masked loads of the others read nothing and give zero.
    a_q = tl.load(of_q + first, mask=inside & is_q, other=0.0)
    b_q = tl.load(of_q + second, mask=inside & is_q, other=0.0)
    a_k = tl.load(of_k + first, mask=inside & is_k, other=0.0)
    b_k = tl.load(of_k + second, mask=inside & is_k, other=0.0)
    a_v = tl.load(of_v + first, mask=inside & is_v, other=0.0)
    b_v = tl.load(of_v + second, mask=inside & is_v, other=0.0)
    a = tl.where(is_q, a_q, a_k).to(tl.float32)
    b = tl.where(is_q, b_q, b_k).to(tl.float32)
    out_a = tl.where(is_v, a_v, (a * c - b * s).to(a_v.dtype))
    out_b = tl.where(is_v, b_v, (b * c + a * s).to(a_v.dtype))
    within = inside & (head < heads)[:, None]
    tl.store(to + first, out_a, mask=within)
    tl.store(to + second, out_b, mask=within)
    for start in range(2 * pairs, dim, PAIRS):
        channel = start + pair[None, :]
        inner = channel < dim
        rest_q = tl.load(of_q + channel, mask=inner & is_q, other=0.0)
        rest_k = tl.load(of_k + channel, mask=inner & is_k, other=0.0)
        rest_v = tl.load(of_v + channel, mask=inner & is_v, other=0.0)
        rest = tl.where(is_q, rest_q, tl.where(is_k, rest_k, rest_v))
        tl.store(to + channel, rest, mask=inner & (head < heads)[:, None])
