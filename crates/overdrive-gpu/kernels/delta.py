"""The layers of the gated delta rule, token by token: the short convolution, and the rule.

A plan has the first token of each sequence and the end of the last one, then the slots that the states are read from
(-1: a state of zeros), then those they are written to.
"""

import triton
import triton.language as tl


@triton.jit
def normalized(x):
    """Divides a row by its length, as flash-linear-attention does."""
    return x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6))


@triton.jit
def delta_rule(query, key, value, decay, beta, states, plan, y, sequences, heads, group, key_dim, value_dim, q_token,
               q_head, k_token, k_head, v_token, v_head, scale, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
               NORM: tl.constexpr):
    """Advances COLUMNS columns of the state of a head through the tokens of a sequence.

    The columns of a state do not depend on each other, so a program keeps its own in registers from the first token to
    the last; COLUMNS divides `value_dim`.
    """
    sequence = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    key_head = head // group
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, KEYS)
    first = tl.load(plan + sequence).to(tl.int64)
    end = tl.load(plan + sequence + 1).to(tl.int64)
    source = tl.load(plan + sequences + 1 + sequence)
    target = tl.load(plan + 2 * sequences + 1 + sequence)
    used = row < key_dim
    inside = used[:, None]
    at = head.to(tl.int64) * key_dim * value_dim + row[:, None] * value_dim + column[None, :]
    size = heads.to(tl.int64) * key_dim * value_dim
    state = tl.load(states + source.to(tl.int64) * size + at, mask=inside & (source >= 0), other=0.0)
    for token in range(first, end):
        k = tl.load(key + token * k_token + key_head * k_head + row, mask=used, other=0.0).to(tl.float32)
        q = tl.load(query + token * q_token + key_head * q_head + row, mask=used, other=0.0).to(tl.float32)
        v = tl.load(value + token * v_token + head * v_head + column).to(tl.float32)
        number = token * heads + head
        if NORM:
            k = normalized(k)
            q = normalized(q)
        q = q * scale
        state = state * tl.exp(tl.load(decay + number))
        change = (v - tl.sum(state * k[:, None], axis=0)) * tl.load(beta + number)
        state = state + k[:, None] * change[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(y + number * value_dim + column, out.to(y.dtype.element_ty))
    tl.store(states + target.to(tl.int64) * size + at, state, mask=inside)


@triton.jit
def earlier(x, states, first, at, channel, inside, x_token, state, has_state, WIDTH: tl.constexpr):
    """Returns the inputs at a token, which may be one of the last before the sequence's first."""
    new = tl.load(x + at * x_token + channel, mask=inside & (at >= first), other=0.0)
    old = tl.load(states + state + (at - first + WIDTH - 1), mask=inside & (at < first) & has_state, other=0.0)
    return tl.where(at >= first, new, old)


@triton.jit
def causal_conv1d(x, weight, states, plan, y, sequences, channels, x_token, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Convolves BLOCK channels of a sequence with their own filters of WIDTH taps, and applies SiLU.

    A state has the last WIDTH - 1 inputs of each channel.
    """
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    first = tl.load(plan + sequence).to(tl.int64)
    end = tl.load(plan + sequence + 1).to(tl.int64)
    source = tl.load(plan + sequences + 1 + sequence).to(tl.int64)
    target = tl.load(plan + 2 * sequences + 1 + sequence).to(tl.int64)
    before = (source * channels + channel) * (WIDTH - 1)
    after = (target * channels + channel) * (WIDTH - 1)
    for token in range(first, end):
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for tap in tl.static_range(WIDTH):
            at = token + (tap + 1 - WIDTH)
            value = earlier(x, states, first, at, channel, inside, x_token, before, source >= 0, WIDTH)
            factor = tl.load(weight + channel * WIDTH + tap, mask=inside, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)
        out = total / (1.0 + tl.exp(-total))
        tl.store(y + token * channels + channel, out.to(y.dtype.element_ty), mask=inside)
    # In ascending order, so that a state that keeps its slot is read before it is overwritten.
    for tap in tl.static_range(WIDTH - 1):
        at = end + (tap + 1 - WIDTH)
        value = earlier(x, states, first, at, channel, inside, x_token, before, source >= 0, WIDTH)
        tl.store(states + after + tap, value, mask=inside)
