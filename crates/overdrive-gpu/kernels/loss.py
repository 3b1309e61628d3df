"""Cross-entropy of rows of logits, and its gradient in the memory of the logits."""

import triton
import triton.language as tl


@triton.jit
def capped(x, softcap, CAP: tl.constexpr):
    """Returns `softcap * tanh(x / softcap)` with CAP, else `x`."""
    if CAP:
        x = softcap * (2.0 * tl.sigmoid(2.0 * x / softcap) - 1.0)
    return x


@triton.jit
def cross_entropy(logits, labels, losses, lse, factor, classes, ignore_index, smoothing, z_loss, softcap, scale,
                  FIND: tl.constexpr, WRITE: tl.constexpr, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Computes with FIND the loss of a row, and with WRITE replaces the row by `scale` times its gradient.

    FIND alone leaves the logarithm of the sum of exponentials in `lse`, and WRITE alone reads it from there and
    multiplies the gradient by the number at `factor` as well. A row whose label is no class gets NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    base = logits + row * classes
    if label == ignore_index:
        # The row is not read: a NaN in a padding position has no influence.
        if FIND:
            tl.store(losses + row, 0.0)
            if not WRITE:
                tl.store(lse + row, 0.0)
        if WRITE:
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], dtype=logits.dtype.element_ty)
                tl.store(base + column, zeros, mask=column < classes)
    else:
        is_class = (label >= 0) & (label < classes)
        hit = 1.0 - smoothing
        if FIND:
            at_label = tl.load(base + label, mask=is_class, other=float("nan")).to(tl.float32)
            highest = -float("inf")
            sums = tl.zeros([BLOCK], dtype=tl.float32)
            total = tl.zeros([BLOCK], dtype=tl.float32)
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                mask = column < classes
                x = tl.load(base + column, mask=mask, other=-float("inf")).to(tl.float32)
                x = tl.where(mask, capped(x, softcap, CAP), -float("inf"))
                higher = tl.maximum(highest, tl.max(x, axis=0))
                # Logits may all be -inf so far, and -inf minus -inf is NaN.
                safe = tl.where(higher == -float("inf"), 0.0, higher)
                sums = sums * tl.exp(highest - safe) + tl.exp(x - safe)
                total += tl.where(mask, x, 0.0)
                highest = higher
            safe = tl.where(highest == -float("inf"), 0.0, highest)
            log_sum = safe + tl.log(tl.sum(sums, axis=0))
            loss = log_sum - hit * capped(at_label, softcap, CAP) + z_loss * log_sum * log_sum
            # Not a product with 0: the mean may be -inf.
            loss -= tl.where(smoothing > 0.0, smoothing * (tl.sum(total, axis=0) / classes), 0.0)
            tl.store(losses + row, loss)
            if not WRITE:
                tl.store(lse + row, log_sum)
            # Every logit, and the one of the label, is read before any is replaced.
            tl.debug_barrier()
        else:
            log_sum = tl.load(lse + row)
            scale *= tl.load(factor)
        if WRITE:
            scale = tl.where(is_class, scale, float("nan"))
            softmax_factor = 1.0 + 2.0 * z_loss * log_sum
            for start in range(0, classes, BLOCK):
                column = start + tl.arange(0, BLOCK)
                mask = column < classes
                x = tl.load(base + column, mask=mask, other=0.0).to(tl.float32)
                x = capped(x, softcap, CAP)
                gradient = tl.exp(x - log_sum) * softmax_factor - smoothing / classes
                gradient -= tl.where(column == label, hit, 0.0)
                if CAP:
                    ratio = x / softcap
                    gradient *= 1.0 - ratio * ratio
                tl.store(base + column, (gradient * scale).to(logits.dtype.element_ty), mask=mask)
