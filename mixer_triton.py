"""The mixer's passes over memory on a GPU: Triton kernels, forward and backward (eq. 4).

Run:      not a script: hydra_ssm.py imports it for CUDA tensors. `python tests/compile_kernels.py`
          says what the kernels compile to.

Between in_proj and the scan, and between the scan and out_proj, every number is read once and
written once; all arithmetic is float32.

    a_i  = bias + sum_k w_k x_{i+k-3}       the two-sided convolution; a pad counts as 0   conv_fwd
    out  = scale silu(a) + shift            eq. 4 on the channels of B and C, 1 and 0 on x's
    out  = norm(y) weight silu(z)           norm(y) = y / sqrt(mean y^2 + eps)             gate_fwd
    ce   = log sum exp(v) - v_target        of a row v of logits (cart.py)                   ce_fwd

Backward, from g, the gradient of what was written, with s = sigmoid(a):

    da_i   = scale g_i s (1 + a (1 - s))                                                   conv_bwd
    dx_j   = sum_k w_k da_{j+3-k},  0 at pads
    dscale = sum_i g_i silu(a_i),  dshift = sum_i g_i
    dz     = g norm(y) weight s (1 + z (1 - s))                                            gate_bwd
    dy     = (v - norm(y) mean(v norm(y))) / sqrt(mean y^2 + eps),  v = g weight silu(z)
    dv     = g (softmax(v) - 1 at the target)                                                ce_bwd

The convolution's kernels walk down a strip of rows and hold the seven that a position sees in
registers: each is loaded and converted once. Weights are frozen where these kernels run, and get no
gradient. The gradients of in_proj's output lie in one buffer: `gate_bwd` makes it around dz,
`conv_bwd` adds its part, and nothing is concatenated.

Symbols:  chunk_scan.py's and hydra_ssm.py's. In a kernel X, M, W are the channels of x, of one of
          B and C (g n), and of all that is convolved; c are the channels of a program, i counts
          rows of its strip, b is its sample. NAME_b, NAME_l are the strides of NAME along b and l.
Differs from the paper: nothing beyond hydra_ssm.py.
"""
from __future__ import annotations  # so that tl.constexpr below need not exist without triton

import torch
from einops import rearrange

from chunk_scan_triton import jit, takes, tl, triton

TAPS = 7       # of the widest convolution; a narrower one is padded with zeros
STEP = 8       # rows of one turn of a loop
STRIP = 64     # rows of a program, forward; backward it also visits 6 rows of its neighbours
LOGITS = 2048  # of one row at a time
CHANNELS = {"conv_fwd": 256, "conv_bwd": 128}  # of a program, which is one warp


# ---- convolution, SiLU and modulation ------------------------------------------------------------

@jit
def tap(weight, c, k: tl.constexpr, K: tl.constexpr, W: tl.constexpr):
    """w_k of each channel: (w, K) weights in the middle of seven."""
    j: tl.constexpr = k - (7 - K) // 2
    w_k = tl.zeros(c.shape, tl.float32)
    if j >= 0 and j < K:
        w_k = tl.load(weight + c * K + j, mask=c < W, other=0.0).to(tl.float32)
    return w_k


@jit
def taps(weight, c, K: tl.constexpr, W: tl.constexpr):
    """The seven weights of each channel."""
    return (tap(weight, c, 0, K, W), tap(weight, c, 1, K, W), tap(weight, c, 2, K, W),
            tap(weight, c, 3, K, W), tap(weight, c, 4, K, W), tap(weight, c, 5, K, W),
            tap(weight, c, 6, K, W))


@jit
def row(x, real, i, x_l, first, L, c, W: tl.constexpr, MASKED: tl.constexpr):
    """Row i of the strip that begins at row `first`, float32; 0 where there is none and at pads."""
    there = (first + i >= 0) & (first + i < L)
    x_i = tl.load(x + i * x_l + c, mask=there & (c < W), other=0.0).to(tl.float32)
    if MASKED:
        x_i = tl.where(tl.load(real + first + i, mask=there, other=0) != 0, x_i, 0.0)
    return x_i


@jit
def rows(x, real, i, x_l, first, L, c, W: tl.constexpr, MASKED: tl.constexpr):
    """Six rows of the strip from row i on."""
    return (row(x, real, i, x_l, first, L, c, W, MASKED),
            row(x, real, i + 1, x_l, first, L, c, W, MASKED),
            row(x, real, i + 2, x_l, first, L, c, W, MASKED),
            row(x, real, i + 3, x_l, first, L, c, W, MASKED),
            row(x, real, i + 4, x_l, first, L, c, W, MASKED),
            row(x, real, i + 5, x_l, first, L, c, W, MASKED))


@jit
def conv_fwd(x, weight, bias, real, modulation, out, x_b, x_l, L,
             X: tl.constexpr, M: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr,
             C: tl.constexpr, STRIP: tl.constexpr, STEP: tl.constexpr):
    """silu of the convolution of x, B, C, and eq. 4 on B and C: one strip of one block of channels.

    In:  x (b l w), weight (w K), bias (w,), real (b l), modulation (b 4 gn).
    Out: out (b l w).  Grid: blocks of channels, strips, b.
    """
    W: tl.constexpr = X + 4 * M
    c = tl.program_id(0) * C + tl.arange(0, C)
    first = tl.program_id(1) * STRIP
    b = tl.program_id(2).to(tl.int64)
    x += b * x_b + first.to(tl.int64) * x_l
    real += b * L
    out += (b * L + first) * W
    # Channels are x, then B, C of one direction, then B, C of the other.
    is_C = (c - X) // M % 2
    at = (b * 4 + 2 * is_C) * M + (c - X) % M
    modulated = (c >= X) & (c < W)
    scale = tl.load(modulation + at, mask=modulated, other=1.0)
    shift = tl.load(modulation + at + M, mask=modulated, other=0.0)
    bias_c = tl.load(bias + c, mask=c < W, other=0.0).to(tl.float32)
    w0, w1, w2, w3, w4, w5, w6 = taps(weight, c, K, W)
    x0, x1, x2, x3, x4, x5 = rows(x, real, -3, x_l, first, L, c, W, MASKED)
    for start in range(0, STRIP, STEP):
        for k in tl.static_range(STEP):
            i = start + k
            x6 = row(x, real, i + 3, x_l, first, L, c, W, MASKED)
            a = bias_c + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + w4 * x4 + w5 * x5 + w6 * x6
            v = a * tl.sigmoid(a) * scale + shift
            tl.store(out + i * W + c, v.to(out.dtype.element_ty),
                     mask=(first + i < L) & (c < W))
            x0, x1, x2, x3, x4, x5 = x1, x2, x3, x4, x5, x6


@jit
def conv_bwd(x, weight, bias, real, modulation, gx, gB, gC, dx, sums, x_b, x_l, dx_b, dx_l, L,
             X: tl.constexpr, M: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr,
             C: tl.constexpr, STRIP: tl.constexpr, STEP: tl.constexpr):
    """The gradient of conv_fwd's x, and the sums over a strip that those of scale and shift want.

    Each turn finds da of row i and then dx of row i - 3, of which da_{i-6} ... da_i are the parts.

    In:  as conv_fwd, and gx (b l X), gB, gC (b l d gn).
    Out: dx (b l w); sums of g silu(a) and of g (b strips 2 4gn).
    Grid: blocks of channels, strips, b. A strip has STRIP - 6 rows of its own.
    """
    W: tl.constexpr = X + 4 * M
    OWN: tl.constexpr = STRIP - 6
    c = tl.program_id(0) * C + tl.arange(0, C)
    first = tl.program_id(1) * OWN
    b = tl.program_id(2).to(tl.int64)
    at_first = b * L + first
    x += b * x_b + first.to(tl.int64) * x_l
    real += b * L
    dx += b * dx_b + first.to(tl.int64) * dx_l
    is_C = (c - X) // M % 2
    at = (b * 4 + 2 * is_C) * M + (c - X) % M
    modulated = (c >= X) & (c < W)
    scale = tl.load(modulation + at, mask=modulated, other=1.0)
    # A channel's g is in one of three tensors.
    gx += at_first * X
    gB += at_first * 2 * M
    gC += at_first * 2 * M
    at = (c - X) // (2 * M) * M + (c - X) % M
    of_B = modulated & (is_C == 0)
    of_C = modulated & (is_C == 1)
    bias_c = tl.load(bias + c, mask=c < W, other=0.0).to(tl.float32)
    w0, w1, w2, w3, w4, w5, w6 = taps(weight, c, K, W)
    x0, x1, x2, x3, x4, x5 = rows(x, real, -6, x_l, first, L, c, W, MASKED)
    zero = tl.zeros((C,), tl.float32)
    e0, e1, e2, e3, e4, e5 = zero, zero, zero, zero, zero, zero
    sum_gv = zero
    sum_g = zero
    for start in range(-3, STRIP - 3, STEP):
        for k in tl.static_range(STEP):
            i = start + k
            x6 = row(x, real, i + 3, x_l, first, L, c, W, MASKED)
            a = bias_c + w0 * x0 + w1 * x1 + w2 * x2 + w3 * x3 + w4 * x4 + w5 * x5 + w6 * x6
            s = tl.sigmoid(a)
            r = first + i
            there = (r >= 0) & (r < L)
            g_i = tl.load(gx + i * X + c, mask=there & (c < X), other=0.0).to(tl.float32)
            g_i += tl.load(gB + i * 2 * M + at, mask=there & of_B, other=0.0).to(tl.float32)
            g_i += tl.load(gC + i * 2 * M + at, mask=there & of_C, other=0.0).to(tl.float32)
            e6 = scale * g_i * s * (1 + a * (1 - s))                      # da_i
            own = tl.where((r >= first) & (r < first + OWN), g_i, 0.0)
            sum_gv += own * a * s
            sum_g += own

            j = i - 3
            own_j = (r - 3 >= first) & (r - 3 < L)
            dx_j = w0 * e6 + w1 * e5 + w2 * e4 + w3 * e3 + w4 * e2 + w5 * e1 + w6 * e0
            if MASKED:
                is_real = tl.load(real + r - 3, mask=own_j, other=0)
                dx_j = tl.where(is_real != 0, dx_j, 0.0)
            tl.store(dx + j * dx_l + c, dx_j.to(dx.dtype.element_ty),
                     mask=own_j & (c < W))
            x0, x1, x2, x3, x4, x5 = x1, x2, x3, x4, x5, x6
            e0, e1, e2, e3, e4, e5 = e1, e2, e3, e4, e5, e6
    sums += (b * tl.num_programs(1) + tl.program_id(1)) * 8 * M + c - X
    tl.store(sums, sum_gv, mask=modulated)
    tl.store(sums + 4 * M, sum_g, mask=modulated)


# ---- norm and gate -------------------------------------------------------------------------------

@jit
def gate_fwd(y, z, weight, out, y_b, y_l, z_b, z_l, L, eps, W: tl.constexpr, WIDE: tl.constexpr):
    """norm(y) weight silu(z), one row.

    In: y, z (b l w), weight (w,).  Out: out (b l w).  Grid: l, b.  WIDE: the power of 2 from w on.
    """
    i = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDE)
    there = c < W
    y_i = tl.load(y + b * y_b + i * y_l + c, mask=there, other=0.0).to(tl.float32)
    z_i = tl.load(z + b * z_b + i * z_l + c, mask=there, other=0.0).to(tl.float32)
    w = tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    normed = y_i * tl.rsqrt(tl.sum(y_i * y_i) / W + eps)
    v = normed * w * z_i * tl.sigmoid(z_i)
    tl.store(out + (b * L + i) * W + c, v.to(out.dtype.element_ty), mask=there)


@jit
def gate_bwd(g, y, z, weight, dy, dz, y_b, y_l, z_b, z_l, dz_b, dz_l, L, eps,
             W: tl.constexpr, WIDE: tl.constexpr):
    """The gradients of gate_fwd's y and z, one row.

    In: g, y, z (b l w), weight (w,).  Out: dy, dz (b l w).  Grid: l, b.
    """
    i = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, WIDE)
    there = c < W
    y_i = tl.load(y + b * y_b + i * y_l + c, mask=there, other=0.0).to(tl.float32)
    z_i = tl.load(z + b * z_b + i * z_l + c, mask=there, other=0.0).to(tl.float32)
    g_i = tl.load(g + (b * L + i) * W + c, mask=there, other=0.0).to(tl.float32)
    w = tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(y_i * y_i) / W + eps)
    normed = y_i * inverse
    s = tl.sigmoid(z_i)
    dz_i = g_i * normed * w * s * (1 + z_i * (1 - s))
    v = g_i * w * z_i * s
    dy_i = inverse * (v - normed * (tl.sum(v * normed) / W))
    tl.store(dz + b * dz_b + i * dz_l + c, dz_i.to(dz.dtype.element_ty), mask=there)
    tl.store(dy + (b * L + i) * W + c, dy_i.to(dy.dtype.element_ty), mask=there)


# ---- cross-entropy -------------------------------------------------------------------------------

@jit
def ce_fwd(logits, targets, ce, largest, log_sum, V: tl.constexpr, C: tl.constexpr):
    """-log softmax(logits) at the target of one row, which is read once.

    In:  logits (r v), targets (r,).
    Out: ce, the largest logit, log sum exp(logits - largest), all (r,).  Grid: r.
    """
    r = tl.program_id(0).to(tl.int64)
    logits += r * V
    top = -1e30
    total = 0.0
    for start in range(0, V, C):
        c = start + tl.arange(0, C)
        v = tl.load(logits + c, mask=c < V, other=float("-inf")).to(tl.float32)
        before = top
        top = tl.maximum(before, tl.max(v))
        total = total * tl.exp(before - top) + tl.sum(tl.exp(v - top))
    at_target = tl.load(logits + tl.load(targets + r)).to(tl.float32)
    tl.store(ce + r, tl.log(total) - (at_target - top))
    tl.store(largest + r, top)
    tl.store(log_sum + r, tl.log(total))


@jit
def ce_bwd(logits, targets, largest, log_sum, g, dlogits, V: tl.constexpr, C: tl.constexpr):
    """g (softmax(logits) - 1 at the target), one block of one row.

    In: logits (r v), targets, largest, log_sum, g (r,).  Out: dlogits (r v).  Grid: r, blocks.
    """
    r = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * C + tl.arange(0, C)
    v = tl.load(logits + r * V + c, mask=c < V, other=0.0).to(tl.float32)
    p = tl.exp(v - tl.load(largest + r) - tl.load(log_sum + r))
    p = tl.where(c == tl.load(targets + r), p - 1, p)
    tl.store(dlogits + r * V + c, (tl.load(g + r) * p).to(dlogits.dtype.element_ty), mask=c < V)


# ---- launches ------------------------------------------------------------------------------------

def fits(v, *weights):
    """Whether the kernels take these rows v (b l w); PyTorch takes others, and trains weights."""
    if not takes(v):
        return False
    if torch.is_grad_enabled() and any(w.requires_grad for w in weights):
        return False
    if any(w.dtype.itemsize > 4 for w in weights):
        return False
    return v.shape[0] < 2 ** 16 and v.shape[1] < 2 ** 20  # what a launch grid counts to


def fits_convolution(zxBCdt, weight, bias):
    """The same of `unpack`, whose convolution has at most seven taps, and a middle one."""
    taps = weight.shape[-1]
    return taps <= TAPS and taps % 2 == 1 and fits(zxBCdt, weight, bias)


def with_near_rows(v):
    """v (b l w), copied where a row has gaps, or rows lie too far apart for offsets of 32 bits."""
    if v.stride(2) != 1 or v.stride(1) >= 2 ** 24:
        return v.contiguous()
    return v


def conv_sizes(name, d_inner, modulation, weight, real):
    """The constants of a launch of conv_fwd or conv_bwd."""
    return dict(X=d_inner, M=modulation.shape[2], K=weight.shape[-1], MASKED=real is not None,
                C=CHANNELS[name], STRIP=STRIP, STEP=STEP, num_warps=1)


def run_conv(zxBCdt, weight, bias, real, modulation, d_inner):
    """x, B, C (b l w) after convolution, SiLU and eq. 4, of in_proj's output."""
    b, l, _ = zxBCdt.shape
    k = conv_sizes("conv_fwd", d_inner, modulation, weight, real)
    w = len(bias)
    x = zxBCdt[..., d_inner:d_inner + w]
    out = x.new_empty(b, l, w)
    grid = (triton.cdiv(w, k["C"]), triton.cdiv(l, STRIP), b)
    with torch.cuda.device_of(x):  # which need not be the current one
        conv_fwd[grid](x, weight, bias, bias if real is None else real, modulation, out,
                       x.stride(0), x.stride(1), l, **k)
    return out


def run_conv_backward(packed, zxBCdt, weight, bias, real, modulation, gx, gB, gC, d_inner):
    """Write the gradient of x, B, C into theirs of in_proj's output, `packed`; returns that of the
    modulation (b 4 gn).
    """
    b, l, _ = zxBCdt.shape
    k = conv_sizes("conv_bwd", d_inner, modulation, weight, real)
    w = len(bias)
    x = zxBCdt[..., d_inner:d_inner + w]
    dx = packed[..., d_inner:d_inner + w]
    strips = triton.cdiv(l, STRIP - 6)
    sums = modulation.new_empty(b, strips, 2, w - d_inner)
    grid = (triton.cdiv(w, k["C"]), strips, b)
    with torch.cuda.device_of(x):
        conv_bwd[grid](x, weight, bias, bias if real is None else real, modulation, gx, gB, gC, dx,
                       sums, x.stride(0), x.stride(1), dx.stride(0), dx.stride(1), l, **k)
    sums = sums.unflatten(3, (2, 2, -1)).sum((1, 3))                        # b 2 k gn
    return sums.transpose(1, 2).flatten(1, 2)                               # b 4 gn


def run_gate(y, z, weight, eps):
    """norm(y) weight silu(z), (b l w)."""
    b, l, w = y.shape
    out = y.new_empty(b, l, w)
    with torch.cuda.device_of(y):
        gate_fwd[l, b](y, z, weight, out, y.stride(0), y.stride(1), z.stride(0), z.stride(1), l,
                       eps, W=w, WIDE=triton.next_power_of_2(w), num_warps=4)
    return out


def gate_gradients(y, z):
    """Room for dy, and for dz: rows as far apart as those of z, for what belongs between them."""
    b, l, w = z.shape
    width = max(z.stride(1), w)
    return y.new_empty(b, l, w), z.new_empty(b, l, width)[..., :w]


def run_gate_backward(g, y, z, weight, eps):
    """dy and dz."""
    b, l, w = y.shape
    dy, dz = gate_gradients(y, z)
    with torch.cuda.device_of(y):
        gate_bwd[l, b](g, y, z, weight, dy, dz, y.stride(0), y.stride(1), z.stride(0), z.stride(1),
                       dz.stride(0), dz.stride(1), l, eps,
                       W=w, WIDE=triton.next_power_of_2(w), num_warps=4)
    return dy, dz


def run_cross_entropy(logits, targets):
    """ce, and the largest and log sum exp(logits - largest) of each row: (3 r) float32."""
    r, v = logits.shape
    out = logits.new_empty(3, r, dtype=torch.float32)
    with torch.cuda.device_of(logits):
        ce_fwd[r,](logits, targets, *out, V=v, C=LOGITS, num_warps=4)
    return out


def run_cross_entropy_backward(g, logits, targets, largest, log_sum):
    """The gradient of the logits."""
    r, v = logits.shape
    dlogits = torch.empty_like(logits)
    with torch.cuda.device_of(logits):
        ce_bwd[r, triton.cdiv(v, LOGITS)](logits, targets, largest, log_sum, g, dlogits,
                                          V=v, C=LOGITS, num_warps=4)
    return dlogits


# Operators of their own, so that tensors without data pass through them as well.
def operator(name, function, schema, mutates=()):
    return torch.library.custom_op(f"mark::{name}", function, mutates_args=mutates, schema=schema)


conv_op = operator(
    "conv", run_conv, "(Tensor zxBCdt, Tensor weight, Tensor bias, Tensor? real, "
    "Tensor modulation, int d_inner) -> Tensor")
conv_backward_op = operator(
    "conv_backward", run_conv_backward, "(Tensor(a!) packed, Tensor zxBCdt, Tensor weight, "
    "Tensor bias, Tensor? real, Tensor modulation, Tensor gx, Tensor gB, Tensor gC, int d_inner) "
    "-> Tensor", ("packed",))
gate_op = operator("gate", run_gate, "(Tensor y, Tensor z, Tensor weight, float eps) -> Tensor")
gate_backward_op = operator(
    "gate_backward", run_gate_backward,
    "(Tensor g, Tensor y, Tensor z, Tensor weight, float eps) -> (Tensor, Tensor)")
ce_op = operator("cross_entropy", run_cross_entropy, "(Tensor logits, Tensor targets) -> Tensor")
ce_backward_op = operator(
    "cross_entropy_backward", run_cross_entropy_backward,
    "(Tensor g, Tensor logits, Tensor targets, Tensor largest, Tensor log_sum) -> Tensor")


@ce_op.register_fake
def _(logits, targets):
    return logits.new_empty(3, len(logits), dtype=torch.float32)


@ce_backward_op.register_fake
def _(g, logits, targets, largest, log_sum):
    return torch.empty_like(logits)


@conv_op.register_fake
def _(zxBCdt, weight, bias, real, modulation, d_inner):
    return zxBCdt.new_empty(*zxBCdt.shape[:2], len(bias))


@conv_backward_op.register_fake
def _(packed, zxBCdt, weight, bias, real, modulation, gx, gB, gC, d_inner):
    return torch.empty_like(modulation)


@gate_op.register_fake
def _(y, z, weight, eps):
    return y.new_empty(y.shape)


@gate_backward_op.register_fake
def _(g, y, z, weight, eps):
    return gate_gradients(y, z)


# ---- with gradients ------------------------------------------------------------------------------

def around(dz, like):
    """in_proj's gradient, of the shape of `like`, with dz in it: the buffer that gate_bwd made, or
    a new one.
    """
    b, l, width = like.shape
    strides = (l * width, width, 1)
    start = dz.storage_offset() * dz.itemsize
    if dz.stride() == strides and start + like.nbytes <= dz.untyped_storage().nbytes():
        return dz.as_strided((b, l, width), strides)
    packed = like.new_empty(b, l, width)
    packed[..., :dz.shape[2]] = dz
    return packed


class Unpack(torch.autograd.Function):
    """in_proj's output -> z, x, B, C, dt; shapes as in `unpack`."""

    @staticmethod
    def forward(ctx, zxBCdt, modulation, weight, bias, real, config):
        ctx.save_for_backward(zxBCdt, modulation, weight, bias, real)
        ctx.d_inner = config.d_inner
        out = conv_op(zxBCdt, weight, bias, real, modulation, config.d_inner)
        z = zxBCdt[..., :config.d_inner]
        x, BC = out.tensor_split([config.d_inner], -1)
        B, C = rearrange(BC, "b l (d k g n) -> k b l d g n", d=2, k=2, g=config.ngroups)
        dt = zxBCdt[..., config.d_inner + out.shape[2]:]
        return z, x, B, C, dt

    @staticmethod
    def backward(ctx, dz, dx, dB, dC, ddt):
        zxBCdt, modulation, weight, bias, real = ctx.saved_tensors
        packed = around(dz, zxBCdt)
        packed[..., ctx.d_inner + len(bias):] = ddt
        dm = conv_backward_op(packed, zxBCdt, weight, bias, real, modulation, dx.contiguous(),
                              dB.contiguous(), dC.contiguous(), ctx.d_inner)
        return packed, dm, None, None, None, None


class GatedNorm(torch.autograd.Function):
    """norm(y) weight silu(z)."""

    @staticmethod
    def forward(ctx, y, z, weight, eps):
        ctx.save_for_backward(y, z, weight)
        ctx.eps = eps
        return gate_op(y, z, weight, eps)

    @staticmethod
    def backward(ctx, g):
        dy, dz = gate_backward_op(g.contiguous(), *ctx.saved_tensors, ctx.eps)
        return dy, dz, None, None


class CrossEntropy(torch.autograd.Function):
    """Of each row of logits; their gradient is the only one."""

    @staticmethod
    def forward(ctx, logits, targets):
        ce, largest, log_sum = ce_op(logits, targets).unbind()
        ctx.save_for_backward(logits, targets, largest, log_sum)
        return ce

    @staticmethod
    def backward(ctx, g):
        return ce_backward_op(g.contiguous(), *ctx.saved_tensors), None


def unpack(zxBCdt, weight, bias, m, real, config):
    """`hydra_ssm._unpack` of inputs that fit."""
    b = len(zxBCdt)
    factors = (m.B_scale, m.B_shift, m.C_scale, m.C_shift)                  # each b|1 1 1 g n
    modulation = torch.stack([v.expand(b, 1, 1, -1, -1) for v in factors], 1).flatten(2).float()
    zxBCdt = with_near_rows(zxBCdt)
    if real is not None:
        real = real.contiguous().view(torch.uint8)
    return Unpack.apply(zxBCdt, modulation, weight.contiguous(), bias, real, config)   # b 4 gn


def gated_norm(y, z, weight, eps):
    """`hydra_ssm._gated_norm` of inputs that fit."""
    return GatedNorm.apply(with_near_rows(y), with_near_rows(z), weight, eps)


def takes_logits(logits):
    """Whether `cross_entropy` takes these logits (r v)."""
    return takes(logits) and len(logits) > 0


def cross_entropy(logits, targets):
    """-log softmax(logits) at targets: (r,) float32, of logits (r v) and targets (r,) int64."""
    return CrossEntropy.apply(logits.contiguous(), targets.contiguous())
