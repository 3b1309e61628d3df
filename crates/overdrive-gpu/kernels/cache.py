"""The keys and values of new tokens, written to their rows in the blocks of a pool."""

import triton
import triton.language as tl


@triton.jit
def paged_write(keys, values, key_pool, value_pool, blocks, places, dim, k_token, k_head, v_token, v_head, kp_block,
                kp_head, kp_row, vp_block, vp_head, vp_row, DIM: tl.constexpr):
    """Copies a head of a token: key and value go to row `places[token]` of block `blocks[token]`."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + token)
    place = tl.load(places + token)
    channel = tl.arange(0, DIM)
    inside = channel < dim
    key = tl.load(keys + token * k_token + head * k_head + channel, mask=inside)
    value = tl.load(values + token * v_token + head * v_head + channel, mask=inside)
    tl.store(key_pool + block * kp_block + head * kp_head + place * kp_row + channel, key, mask=inside)
    tl.store(value_pool + block * vp_block + head * vp_head + place * vp_row + channel, value, mask=inside)
