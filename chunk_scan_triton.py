"""The bidirectional chunked scan on a GPU: Triton kernels, forward and backward (eq. 7, 11).

Run:      not a script: chunk_scan.py imports it for CUDA tensors. `python tests/compile_kernels.py`
          says what the kernels compile to; `python -m experiments.gpu_check` runs them on
          a GPU.

In one chunk, direction d and head, from the sums of a = dt A over the chunk in the order of d
(through i, before i, beyond i, and the total):

    C'_i   is C one step upstream of i: what position i reads a state with
    w_ij = exp(before_i - through_j) where i comes after j, else 0: the decay strictly between them
    h      is the state that enters the chunk, k the gradient of the state that leaves it    (n p)

    h    <- exp(total) h + sum_j exp(beyond_j) dt_j B_j x_j^T       with the scan       state_scan
    y_i   = sum_d [exp(before_i) h^T C'_i + sum_j w_ij (C'_i.B_j) dt_j x_j] + D_i x_i          mix

The transpose of a quasiseparable matrix is one too: B and C trade places, and the scans turn. So
the same two kernels take g = dL/dy back, and one more serves both dB and dC, summed over heads:

    k    <- exp(total) k + sum_i exp(before_i) C'_i g_i^T           against it          state_scan
    dx_j  = sum_d dt_j [exp(beyond_j) k^T B_j + sum_i w_ij (C'_i.B_j) g_i] + D_j g_j           mix
    dC'_i = sum [exp(before_i) h g_i + sum_j w_ij dt_j (g_i.x_j) B_j]                       bc_bwd
    dB_j  = sum dt_j v_j,  v_j = exp(beyond_j) k x_j + sum_i w_ij (g_i.x_j) C'_i            bc_bwd
    ddt_j = B_j.v_j + A da_j,  dA = sum dt_j da_j,  dD_i = g_i.x_i                  decay_bwd, mix

exp(a_m) is a factor of all that flows past m, so da_m is the sum of those flows: of what starts
before m, or entered the chunk, and ends after m, or leaves it. No term is a difference of results
that were rounded to bfloat16 apart: that would lose da where the decay is strong.

Arrays stay in position order, and nothing is flipped, rolled, repeated or added atomically: a chunk
is one full matrix, strictly lower from direction 0 plus strictly upper from direction 1. Sums are
float32; bfloat16 are only factors of a product. Saved: the inputs, dt, `through` and the states h.

Symbols:  chunk_scan.py's, sizes capital: L length, H heads, G groups, P head dim, N state, Q chunk
          size. In a kernel h is the head, c the chunk, d the direction and b the sample that its
          program works on; i counts positions. b is int64, so that no offset wraps at 2^31
          elements. NAME_b, NAME_l, NAME_d are the strides of NAME along b, l and d.
Differs from the paper: nothing beyond chunk_scan.py.
"""
from __future__ import annotations  # so that tl.constexpr below need not exist without triton

import torch

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:  # chunk_scan.py then takes its PyTorch path
    triton = None
    tl = None

    def jit(kernel):
        return kernel


SIZES = (16, 32, 64)  # of p and n: tiles of 128 overflow shared memory
PROGRAMS = 512        # as many keep a large GPU busy
STATE_STAGES = 2      # of state_scan's loads: with three, a multiprocessor holds 3 blocks, not 4


# ---- what several kernels do ---------------------------------------------------------------------

@jit
def addresses(array, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Of a tile (rows, cols) whose rows lie `stride` apart."""
    array += tl.arange(0, ROWS)[:, None] * stride
    return array + tl.arange(0, COLS)[None, :]


@jit
def tile(array, stride, c, shift, L, Q: tl.constexpr, W: tl.constexpr):
    """Rows c Q + shift + (0 ... Q - 1) of an array (l, w), zeros where there is no such row."""
    row = c * Q + shift + tl.arange(0, Q)
    array += (c * Q + shift).to(tl.int64) * stride
    there = (row >= 0) & (row < L)
    return tl.load(addresses(array, stride, Q, W), mask=there[:, None], other=0.0)


@jit
def dt_and_sums(dt, sums, c, d, L, Q: tl.constexpr):
    """Of chunk c in the order of direction d: dt, and the sums of a through, before and beyond each
    position, all (q,); and the total ().

    Only `through` is stored. `before` is that of the position upstream, `total` that of the last.
    """
    i = tl.arange(0, Q)
    rows = tl.minimum(Q, L - c * Q)
    upstream = i - 1 + 2 * d
    last = tl.where(d == 0, rows - 1, 0)
    through = tl.load(sums + c * Q + i, mask=i < rows, other=0.0)
    before = tl.load(sums + c * Q + upstream, mask=(upstream >= 0) & (upstream < rows), other=0.0)
    total = tl.load(sums + c * Q + last)
    beyond = tl.minimum(total - through, 0.0)  # a difference of rounded sums may exceed 0
    dt_j = tl.load(dt + c * Q + i, mask=i < rows, other=0.0)
    return dt_j, through, before, beyond, total


@jit
def cumulate(v, d):
    """Inclusive sums of v (q,) in the order of direction d; 1 - d: against that order."""
    return tl.where(d == 0, tl.cumsum(v, 0), tl.cumsum(v, 0, reverse=True))


@jit
def pairs(u, v, before, through, d, READ: tl.constexpr, PRECISION: tl.constexpr):
    """u v^T times the decays w (q q). READ: row i reads column j. Else row j is read by column i.

    Each orientation is computed as such: Triton 3.4 to 3.7.0 transposes a product wrongly on sm_90.
    """
    i = tl.arange(0, u.shape[0])
    if READ:
        between = before[:, None] - through[None, :]
        after = i[:, None] - i[None, :]
    else:
        between = before[None, :] - through[:, None]
        after = i[None, :] - i[:, None]
    sign = 1 - 2 * d
    w = tl.where(after * sign > 0, tl.exp(tl.minimum(between, 0.0)), 0.0)
    return tl.dot(u, tl.trans(v), input_precision=PRECISION) * w


# ---- the kernels. One fixed configuration each: in bfloat16 none spills, float32 spills 6 at most

@jit
def decay_fwd(dt, A, dt_rows, sums, L, H: tl.constexpr, Q: tl.constexpr, A_MIN: tl.constexpr):
    """dt as rows along l, and the sums of a = dt A through each position of its chunk.

    In:  dt (b l d h), A (b h).  Out: dt_rows, sums (b d h l).  Grid: h, c, b.
    """
    h = tl.program_id(0)
    c = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = c * Q + tl.arange(0, Q)
    there = i < L
    for d in range(2):
        row = ((b * 2 + d) * H + h) * L
        dt_i = tl.load(dt + ((b * L + i) * 2 + d) * H + h, mask=there, other=0.0)
        a = dt_i * tl.load(A + b * H + h)
        at_most_0 = tl.where(a > 0, 0.0, a)  # unlike a minimum, these two pass NaN on
        a = tl.where(a < A_MIN, A_MIN, at_most_0)
        tl.store(dt_rows + row + i, dt_i, mask=there)
        # float64: a sum grows large over a run of spikes, and its roundings would add up.
        through = cumulate(a.to(tl.float64), d).to(tl.float32)
        tl.store(sums + row + i, through, mask=there)


@jit
def decay_bwd(dt_rows, A, over, leaving, passing, direct, ddt, dA, L,
              H: tl.constexpr, Q: tl.constexpr, A_MIN: tl.constexpr):
    """ddt, and what each chunk adds to dA, from the flows over each position.

        da    = those that end in its chunk (over) + those that start there upstream of it and
                leave (sums of leaving) + those that pass all of the chunk (passing)
        ddt   = direct + A da,  direct = B.v
        dA    = sum dt da

    In:  dt_rows, over, leaving, direct (b d h l), A (b h), passing (b d h c).
    Out: ddt (b l d h), dA (b d h c).  Grid: h, c, b.
    """
    h = tl.program_id(0)
    c = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = c * Q + tl.arange(0, Q)
    there = i < L
    A_h = tl.load(A + b * H + h)
    for d in range(2):
        row = (b * 2 + d) * H + h
        at_i = row * L + i
        at_c = row * tl.cdiv(L, Q) + c
        dt_i = tl.load(dt_rows + at_i, mask=there, other=0.0)
        leaves = tl.load(leaving + at_i, mask=there, other=0.0)
        da = cumulate(leaves, d) - leaves + tl.load(passing + at_c)
        da += tl.load(over + at_i, mask=there, other=0.0)
        clamped = (dt_i * A_h < A_MIN) | (dt_i * A_h > 0)
        da = tl.where(clamped, 0.0, da)
        ddt_i = tl.load(direct + at_i, mask=there, other=0.0) + A_h * da
        tl.store(ddt + ((b * L + i) * 2 + d) * H + h, ddt_i, mask=there)
        tl.store(dA + at_c, tl.sum(dt_i * da))


@jit
def state_scan(key, value, dt, sums, entering, states, passing,
               key_b, key_l, key_d, value_b, value_l, L,
               H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
               Q: tl.constexpr, BWD: tl.constexpr, PRECISION: tl.constexpr):
    """The states at the borders, from chunk to chunk: h with the scan; BWD: k against it.

        h <- exp(total) h + sum_j exp(beyond_j) dt_j B_j x_j^T
        k <- exp(total) k + sum_i exp(before_i) C'_i g_i^T

    BWD also: the flow that passes all of a chunk, exp(total) h.k.

    In:  key B or C (b l d g n), value x or g (b l h p), dt, sums (b d h l); BWD: entering, the h.
    Out: states, h or k of every chunk (b d h c n p); BWD: passing (b d h c).
    Grid: h, d, b. A program walks the chunks of one head and direction.
    """
    h = tl.program_id(0)
    d = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    row = (b * 2 + d) * H + h
    chunks = tl.cdiv(L, Q)
    group = h // (H // G)
    key += b * key_b + d * key_d + group * N
    value += b * value_b + h * P
    state = tl.zeros((N, P), tl.float32)                                                    # n p
    for step in range(chunks):
        c = tl.where(d == BWD, step, chunks - 1 - step)
        here = (row * chunks + c) * N * P
        tl.store(addresses(states + here, P, N, P), state.to(states.dtype.element_ty))
        dt_j, through, before, beyond, total = dt_and_sums(
            dt + row * L, sums + row * L, c, d, L, Q)
        if BWD:
            h_in = tl.load(addresses(entering + here, P, N, P)).to(tl.float32)              # n p
            tl.store(passing + row * chunks + c, tl.exp(total) * tl.sum(h_in * state))
            keys = tile(key, key_l, c, 2 * d - 1, L, Q, N)                                  # q n
            weight = tl.exp(before)                                                         # q
        else:
            keys = tile(key, key_l, c, 0, L, Q, N)                                          # q n
            weight = tl.exp(beyond) * dt_j                                                  # q
        keys = (keys.to(tl.float32) * weight[:, None]).to(keys.dtype)
        values = tile(value, value_l, c, 0, L, Q, P)                                        # q p
        added = tl.dot(tl.trans(keys), values, input_precision=PRECISION)                   # n p
        state = tl.exp(total) * state + added


@jit
def mix(value, B, C, D, dt, sums, states, out, x, dD,
        value_b, value_l, x_b, x_l, bc_b, bc_l, bc_d, L,
        H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
        Q: tl.constexpr, BWD: tl.constexpr, PRECISION: tl.constexpr):
    """y of one chunk and head, from the values x and the states h; BWD: dx from g and k, and dD.

        y_i  = sum_d [exp(before_i) h^T C'_i + sum_j w_ij (C'_i.B_j) dt_j x_j] + D_i x_i
        dx_j = sum_d dt_j [exp(beyond_j) k^T B_j + sum_i w_ij (C'_i.B_j) g_i] + D_j g_j
        dD_i = g_i.x_i

    M, the sum over both directions of the factors of x_j or g_i, meets the values in one product.

    In:  value x or g (b l h p), B, C (b l d g n), D (b l h), dt, sums (b d h l),
         states h or k (b d h c n p); BWD: x.
    Out: out, y or dx (b l h p); BWD: dD (b l h).  Grid: h, c, b.
    """
    h = tl.program_id(0)
    c = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    i = tl.arange(0, Q)
    there = c * Q + i < L
    first = (b * L + c * Q) * H + h
    group = h // (H // G)
    values = tile(value + b * value_b + h * P, value_l, c, 0, L, Q, P)                      # q p
    M = tl.zeros((Q, Q), tl.float32)
    acc = tl.zeros((Q, P), tl.float32)
    for d in tl.range(0, 2, disable_licm=not BWD):
        row = (b * 2 + d) * H + h
        bc = b * bc_b + d * bc_d + group * N
        dt_j, through, before, beyond, total = dt_and_sums(
            dt + row * L, sums + row * L, c, d, L, Q)
        Cs = tile(C + bc, bc_l, c, 2 * d - 1, L, Q, N)                                      # q n
        Bs = tile(B + bc, bc_l, c, 0, L, Q, N)                                              # q n
        if BWD:
            M += pairs(Bs, Cs, before, through, d, False, PRECISION) * dt_j[:, None]        # q q
            own = Bs
            weight = tl.exp(beyond) * dt_j
        else:
            M += pairs(Cs, Bs, before, through, d, True, PRECISION) * dt_j[None, :]         # q q
            own = Cs
            weight = tl.exp(before)
        here = (row * tl.cdiv(L, Q) + c) * N * P
        state = tl.load(addresses(states + here, P, N, P))                                  # n p
        acc += tl.dot(own, state, input_precision=PRECISION) * weight[:, None]              # q p
    acc = tl.dot(M.to(values.dtype), values, acc, input_precision=PRECISION)
    values = values.to(tl.float32)
    D_i = tl.load(D + first + i * H, mask=there, other=0.0)
    acc += D_i[:, None] * values
    rows = addresses(out + first * P, H * P, Q, P)
    tl.store(rows, acc.to(out.dtype.element_ty), mask=there[:, None])
    if BWD:
        xs = tile(x + b * x_b + h * P, x_l, c, 0, L, Q, P).to(tl.float32)                   # q p
        tl.store(dD + first + i * H, tl.sum(xs * values, 1), mask=there)


@jit
def bc_bwd(x, B, C, g, dt, sums, states, out, over, leaving, direct,
           x_b, x_l, bc_b, bc_l, bc_d, batch, L,
           H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
           Q: tl.constexpr, PARTS: tl.constexpr, IS_C: tl.constexpr, PRECISION: tl.constexpr):
    """dC' (IS_C) or dB of one chunk and direction, over the heads of one part of a group.

        dC'_i = sum [exp(before_i) h g_i + sum_j w_ij dt_j (g_i.x_j) B_j]
        dB_j  = sum dt_j v_j,  v_j = exp(beyond_j) k x_j + sum_i w_ij (g_i.x_j) C'_i

    And the flows: with IS_C those over each position that end in the chunk (over); else those that
    start at a position and leave the chunk (leaving), and B.v (direct).

    In:  x, g (b l h p), B, C (b l d g n), dt, sums (b d h l), states h or k (b d h c n p).
    Out: out (parts b l d g n); IS_C: over (b d h l), else leaving, direct (b d h l).
    Grid: parts of all groups, c, b and d.
    """
    part = tl.program_id(0)
    c = tl.program_id(1)
    d = tl.program_id(2) % 2
    b = (tl.program_id(2) // 2).to(tl.int64)
    heads = H // G // PARTS
    group = part // PARTS
    i = tl.arange(0, Q)
    there = c * Q + i < L
    chunks = tl.cdiv(L, Q)
    bc = b * bc_b + d * bc_d + group * N
    Cs = tile(C + bc, bc_l, c, 2 * d - 1, L, Q, N)                                          # q n
    Bs = tile(B + bc, bc_l, c, 0, L, Q, N)                                                  # q n
    if IS_C:
        CB = tl.dot(Cs, tl.trans(Bs), input_precision=PRECISION)                            # q q
    acc = tl.zeros((Q, N), tl.float32)
    for k in tl.range(0, heads, disable_licm=IS_C):
        h = part * heads + k
        row = (b * 2 + d) * H + h
        here = row * L + c * Q + i
        dt_j, through, before, beyond, total = dt_and_sums(
            dt + row * L, sums + row * L, c, d, L, Q)
        xs = tile(x + b * x_b + h * P, x_l, c, 0, L, Q, P)                                  # q p
        gs = tile(g + (b * L * H + h) * P, H * P, c, 0, L, Q, P)                            # q p
        state = tl.load(addresses(states + (row * chunks + c) * N * P, P, N, P))            # n p
        if IS_C:
            dCB = pairs(gs, xs, before, through, d, True, PRECISION) * dt_j[None, :]        # q q
            flow = dCB * CB                                                                 # i j
            ends = tl.sum(flow, 1)
            starts = tl.sum(flow, 0)
            from_state = tl.dot(gs, tl.trans(state), input_precision=PRECISION)
            from_state *= tl.exp(before)[:, None]                                           # q n
            ends += tl.sum(from_state * Cs.to(tl.float32), 1)
            acc = tl.dot(dCB.to(Bs.dtype), Bs, acc + from_state, input_precision=PRECISION)
            # What flows over m started before it, in the chunk or upstream, and has not ended yet.
            tl.store(over + here, cumulate(ends - starts, 1 - d) - ends, mask=there)
        else:
            dCB = pairs(xs, gs, before, through, d, False, PRECISION)                       # q q
            from_state = tl.dot(xs, tl.trans(state), input_precision=PRECISION)
            from_state *= tl.exp(beyond)[:, None]                                           # q n
            leaves = tl.sum(from_state * Bs.to(tl.float32), 1) * dt_j
            v = tl.dot(dCB.to(Cs.dtype), Cs, from_state, input_precision=PRECISION)         # q n
            acc += v * dt_j[:, None]
            tl.store(leaving + here, leaves, mask=there)
            tl.store(direct + here, tl.sum(v * Bs.to(tl.float32), 1), mask=there)
    shift = 2 * d - 1 if IS_C else 0  # dC'_i is the gradient of C one step upstream
    target = c * Q + i + shift
    out += (((part % PARTS * batch + b) * L + c * Q + shift) * 2 + d) * G * N + group * N
    there = there & (target >= 0) & (target < L)
    tl.store(addresses(out, 2 * G * N, Q, N), acc.to(out.dtype.element_ty), mask=there[:, None])


# ---- the operator --------------------------------------------------------------------------------

def takes(v):
    """Whether a kernel may take v: triton is there, v is bfloat16 or float32, on an Ampere or later
    or, in the interpreter, on no GPU.
    """
    if triton is None or v.dtype not in (torch.bfloat16, torch.float32):
        return False
    return not v.is_cuda or torch.cuda.get_device_capability(v.device) >= (8, 0)


def fits(x, dt, A, B, C, D):
    """Whether the kernels take these inputs of `bidirectional_scan`; PyTorch takes the others."""
    if not takes(x) or {B.dtype, C.dtype} != {x.dtype}:
        return False
    if max(v.dtype.itemsize for v in (dt, A, D)) > 4:
        return False
    if x.shape[3] not in SIZES or B.shape[4] not in SIZES:
        return False
    return x.shape[0] < 2 ** 15 and x.shape[1] < 2 ** 20  # what a launch grid counts to


def scan(x, dt, A, B, C, D, a_min):
    """`chunk_scan.bidirectional_scan` of inputs that fit, in chunks of the kernels' own size.

    a_min: the least log-decay, chunk_scan.A_MIN.
    """
    b, _, h, p = x.shape
    n = B.shape[4]
    # The kernels want each position's heads, or groups, without gaps, and positions close enough
    # for offsets of 32 bits within a tile.
    if x.stride()[2:] != (p, 1) or x.stride(1) >= 2 ** 24:
        x = x.contiguous()
    if B.stride() != C.stride() or B.stride()[3:] != (n, 1) or B.stride(1) >= 2 ** 24:
        B = B.contiguous()
        C = C.contiguous()
    dt = dt.float().contiguous()
    A = A.expand(b, h).float().contiguous()
    D = D.float().contiguous()
    y, _, _ = scan_op(x, dt, A, B, C, D, a_min)
    return y


def constants(x, B):
    """Of every launch. float32 operands fill twice the registers: smaller tiles and more warps."""
    sizes = dict(H=x.shape[2], G=B.shape[3], P=x.shape[3], N=B.shape[4])
    if x.dtype == torch.bfloat16:  # whose products are exact in float32: no choice to make
        return dict(**sizes, Q=64, PRECISION="tf32x3", num_warps=4)
    return dict(**sizes, Q=32, PRECISION=float32_precision(), num_warps=8)


def float32_precision():
    """Of products: what torch.set_float32_matmul_precision asks. torch raises where its newer
    settings of precision were used too, and then the exact one is taken.
    """
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        exact = True
    return "tf32x3" if exact else "tf32"


def empty_outputs(x, dt, A, B, C, D):
    """y (b l h p), dt and the sums through each position (2 b d h l), states h (b d h c n p)."""
    b, l, h, p = x.shape
    n = B.shape[4]
    chunks = -(-l // constants(x, B)["Q"])
    y = x.new_empty(b, l, h, p)
    rows = dt.new_empty(2, b, 2, h, l)
    states = x.new_empty(b, 2, h, chunks, n, p)
    return y, rows, states


def empty_gradients(x, A, B, C, D):
    """dx, ddt, dA, dB, dC, dD: each of the shape of its input."""
    b, l, h, _ = x.shape
    ddt = D.new_empty(b, l, 2, h)
    return (x.new_empty(x.shape), ddt, A.new_empty(A.shape), B.new_empty(B.shape),
            C.new_empty(C.shape), D.new_empty(D.shape))


def run_forward(x, dt, A, B, C, D, a_min):
    """y, and what the backward pass wants: as `empty_outputs`."""
    b, l, h, _ = x.shape
    k = constants(x, B)
    y, rows, states = empty_outputs(x, dt, A, B, C, D)
    dt_rows, sums = rows
    chunks = states.shape[3]
    x_strides = x.stride()[:2]                                              # b l
    bc_strides = B.stride()[:3]                                             # b l d
    unused = y
    with torch.cuda.device_of(x):  # which need not be the current one
        decay_fwd[h, chunks, b](dt, A, dt_rows, sums, l, h, k["Q"], a_min)
        state_scan[h, 2, b](
            B, x, dt_rows, sums, unused, states, unused, *bc_strides, *x_strides, l,
            BWD=False, num_stages=STATE_STAGES, **k)
        mix[h, chunks, b](
            x, B, C, D, dt_rows, sums, states, y, unused, unused,
            *x_strides, *x_strides, *bc_strides, l, BWD=False, num_stages=3, **k)
    return y, rows, states


def run_backward(g, x, A, B, C, D, rows, states, a_min):
    """The six gradients, of g = dL/dy (b l h p) and what the forward pass kept."""
    b, l, h, p = x.shape
    k = constants(x, B)
    chunks = states.shape[3]
    groups = k["G"]
    dx, ddt, _, dB, dC, dD = empty_gradients(x, A, B, C, D)
    dt_rows, sums = rows
    k_states = torch.empty_like(states)
    over = torch.empty_like(dt_rows)                                        # b d h l
    leaving = torch.empty_like(dt_rows)
    direct = torch.empty_like(dt_rows)
    passing = rows.new_empty(b, 2, h, chunks)                               # b d h c
    dA = torch.empty_like(passing)
    x_strides = x.stride()[:2]                                              # b l
    g_strides = (l * h * p, h * p)
    bc_strides = B.stride()[:3]                                             # b l d
    # Where chunks are few, the heads of a group are split over more programs, and added up below.
    parts = parts_of_a_group(h // groups, 2 * b * chunks * groups)
    if parts > 1:
        dB = dB.new_empty(parts, *dB.shape, dtype=torch.float32)
        dC = dC.new_empty(parts, *dC.shape, dtype=torch.float32)
    with torch.cuda.device_of(x):
        state_scan[h, 2, b](
            C, g, dt_rows, sums, states, k_states, passing, *bc_strides, *g_strides, l,
            BWD=True, num_stages=STATE_STAGES, **k)
        mix[h, chunks, b](
            g, B, C, D, dt_rows, sums, k_states, dx, x, dD,
            *g_strides, *x_strides, *bc_strides, l, BWD=True, num_stages=3, **k)
        for is_c, from_states, out in ((True, states, dC), (False, k_states, dB)):
            bc_bwd[groups * parts, chunks, 2 * b](
                x, B, C, g, dt_rows, sums, from_states, out, over, leaving, direct,
                *x_strides, *bc_strides, b, l, PARTS=parts, IS_C=is_c, num_stages=2, **k)
        decay_bwd[h, chunks, b](
            dt_rows, A, over, leaving, passing, direct, ddt, dA, l, h, k["Q"], a_min)
    # C there is upstream of no position.
    dC[..., -1, 0, :, :] = 0
    dC[..., 0, 1, :, :] = 0
    if parts > 1:
        dB = dB.sum(0).to(x.dtype)
        dC = dC.sum(0).to(x.dtype)
    return dx, ddt, dA.sum((1, 3)), dB, dC, dD


def parts_of_a_group(heads, programs):
    """The fewest equal parts of a group's heads that keep a large GPU busy; else a part a head."""
    for parts in range(1, heads):
        if heads % parts == 0 and programs * parts >= PROGRAMS:
            return parts
    return heads


# Operators of their own, so that torch.compile takes each as one opaque node, at any length.
scan_op = torch.library.custom_op(
    "mark::scan", run_forward, mutates_args=(),
    schema="(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, float a_min) -> "
           "(Tensor, Tensor, Tensor)")
backward_op = torch.library.custom_op(
    "mark::scan_backward", run_backward, mutates_args=(),
    schema="(Tensor g, Tensor x, Tensor A, Tensor B, Tensor C, Tensor D, Tensor rows, "
           "Tensor states, float a_min) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)")


@scan_op.register_fake
def _(x, dt, A, B, C, D, a_min):
    return empty_outputs(x, dt, A, B, C, D)


@backward_op.register_fake
def _(g, x, A, B, C, D, rows, states, a_min):
    return empty_gradients(x, A, B, C, D)


def keep(ctx, inputs, output):
    """What the backward pass wants: the inputs but for dt, whose rows are among the outputs."""
    x, _, A, B, C, D, a_min = inputs
    _, rows, states = output
    ctx.a_min = a_min
    ctx.set_materialize_grads(False)  # or zeros of the size of the states would be written
    ctx.save_for_backward(x, A, B, C, D, rows, states)


def gradients(ctx, g, *_):
    """Of the seven arguments of scan_op."""
    return *backward_op(g.contiguous(), *ctx.saved_tensors, ctx.a_min), None


scan_op.register_autograd(gradients, setup_context=keep)
