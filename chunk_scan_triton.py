"""The bidirectional chunked scan on a GPU: Triton kernels, forward and backward (eq. 7, 11).

Run:      not a script: chunk_scan.py imports it for CUDA tensors. `python tests/compile_kernels.py`
          says what the kernels compile to, `python bench.py --gpu-check` runs them on a GPU.

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
          size. b is int64, so that no offset wraps at 2^31 elements.
Differs from the paper: nothing beyond chunk_scan.py.
"""
from __future__ import annotations  # so that tl.constexpr below need not exist without triton

import torch

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:  # chunk_scan.py then takes its PyTorch path
    triton, jit = None, lambda kernel: kernel

A_MIN, PROGRAMS = -30.0, 512  # as in chunk_scan.py; programs that keep a large GPU busy


@jit
def at(array, stride, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Addresses of a tile whose rows lie `stride` apart."""
    return array + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLS)[None, :]


@jit
def tile(array, stride, c, shift, L, Q: tl.constexpr, W: tl.constexpr):
    """Rows c Q + shift + (0 ... Q - 1) of an array (l, w), zeros where there is no such row."""
    row = c * Q + shift + tl.arange(0, Q)
    array += (c * Q + shift).to(tl.int64) * stride
    return tl.load(at(array, stride, Q, W), mask=((row >= 0) & (row < L))[:, None], other=0.0)


@jit
def decays(dt, sums, c, d, L, Q: tl.constexpr):
    """dt and the sums of a over chunk c in the order of direction d: all (q,), the total ()."""
    i, rows = tl.arange(0, Q), tl.minimum(Q, L - c * Q)
    upstream, last = i - 1 + 2 * d, tl.where(d == 0, rows - 1, 0)
    through = tl.load(sums + c * Q + i, mask=i < rows, other=0.0)
    before = tl.load(sums + c * Q + upstream, mask=(upstream >= 0) & (upstream < rows), other=0.0)
    total = tl.load(sums + c * Q + last)
    beyond = tl.minimum(total - through, 0.0)  # a difference of rounded sums may exceed 0
    return tl.load(dt + c * Q + i, mask=i < rows, other=0.0), through, before, beyond, total


@jit
def cumulate(v, d):
    """Inclusive sums of v (q,) in the order of direction d; 1 - d: against that order."""
    return tl.where(d == 0, tl.cumsum(v, 0), tl.cumsum(v, 0, reverse=True))


@jit
def pairs(u, v, before, through, d, READ: tl.constexpr, PRECISION: tl.constexpr):
    """u v^T times the decays w. READ: rows are the i that read, columns the j; else the reverse.

    Each orientation is computed as such: Triton 3.4 to 3.7.0 transposes a product wrongly on sm_90.
    """
    i = tl.arange(0, u.shape[0])
    if READ:
        between, after = before[:, None] - through[None, :], i[:, None] - i[None, :]
    else:
        between, after = before[None, :] - through[:, None], i[None, :] - i[:, None]
    w = tl.where(after * (1 - 2 * d) > 0, tl.exp(tl.minimum(between, 0.0)), 0.0)
    return tl.dot(u, tl.trans(v), input_precision=PRECISION) * w


# ---- the kernels. One fixed configuration each: in bfloat16 none spills, float32 spills 6 at most

@jit
def decay_fwd(dt, A, dt_rows, sums, L, H: tl.constexpr, Q: tl.constexpr, A_MIN: tl.constexpr):
    """dt (b l d h), A (b h) -> dt (b d h l), and the sums of a through each position of a chunk."""
    h, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i = c * Q + tl.arange(0, Q)
    for d in range(2):
        row = ((b * 2 + d) * H + h) * L
        dt_i = tl.load(dt + ((b * L + i) * 2 + d) * H + h, mask=i < L, other=0.0)
        a = dt_i * tl.load(A + b * H + h)
        a = tl.where(a < A_MIN, A_MIN, tl.where(a > 0, 0.0, a))  # unlike a maximum, passes NaN on
        tl.store(dt_rows + row + i, dt_i, mask=i < L)
        # float64: a sum grows large over a run of spikes, and its roundings would add up.
        tl.store(sums + row + i, cumulate(a.to(tl.float64), d).to(tl.float32), mask=i < L)


@jit
def decay_bwd(dt_rows, A, over, leaving, passing, direct, ddt, dA, L, H: tl.constexpr,
              Q: tl.constexpr, A_MIN: tl.constexpr):
    """ddt (b l d h), and what each chunk adds to dA (b d h c). Of the flows over a position, some
    end in its chunk, some start there and leave it, and some pass all of it."""
    h, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, A_h = c * Q + tl.arange(0, Q), tl.load(A + b * H + h)
    for d in range(2):
        row = (b * 2 + d) * H + h
        at_i, at_c, there = row * L + i, row * tl.cdiv(L, Q) + c, i < L
        dt_i = tl.load(dt_rows + at_i, mask=there, other=0.0)
        leaves = tl.load(leaving + at_i, mask=there, other=0.0)
        da = cumulate(leaves, d) - leaves + tl.load(passing + at_c)
        da += tl.load(over + at_i, mask=there, other=0.0)
        da = tl.where((dt_i * A_h < A_MIN) | (dt_i * A_h > 0), 0.0, da)  # where a was clamped
        ddt_i = tl.load(direct + at_i, mask=there, other=0.0) + A_h * da
        tl.store(ddt + ((b * L + i) * 2 + d) * H + h, ddt_i, mask=there)
        tl.store(dA + at_c, tl.sum(dt_i * da))


@jit
def state_scan(key, value, dt, sums, entering, states, passing, key_b, key_l, key_d, value_b,
               value_l, L, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
               Q: tl.constexpr, BWD: tl.constexpr, PRECISION: tl.constexpr):
    """h of every chunk, from B and x. BWD: k of every chunk, from C and g, and the flow that passes
    all of it, exp(total) h.k (b d h c). A program walks the chunks of one head and direction."""
    h, d, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, chunks = (b * 2 + d) * H + h, tl.cdiv(L, Q)
    key += b * key_b + d * key_d + h // (H // G) * N
    value += b * value_b + h * P
    state = tl.zeros((N, P), tl.float32)
    for step in range(chunks):
        c = tl.where(d == BWD, step, chunks - 1 - step)
        here = (row * chunks + c) * N * P
        tl.store(at(states + here, P, N, P), state.to(states.dtype.element_ty))
        dt_j, _, before, beyond, total = decays(dt + row * L, sums + row * L, c, d, L, Q)
        if BWD:
            h_in = tl.load(at(entering + here, P, N, P)).to(tl.float32)                     # n p
            tl.store(passing + row * chunks + c, tl.exp(total) * tl.sum(h_in * state))
            keys, weight = tile(key, key_l, c, 2 * d - 1, L, Q, N), tl.exp(before)          # q n
        else:
            keys, weight = tile(key, key_l, c, 0, L, Q, N), tl.exp(beyond) * dt_j           # q n
        keys = (keys.to(tl.float32) * weight[:, None]).to(keys.dtype)
        values = tile(value, value_l, c, 0, L, Q, P)                                        # q p
        state = tl.exp(total) * state + tl.dot(tl.trans(keys), values, input_precision=PRECISION)


@jit
def mix(value, B, C, D, dt, sums, states, out, x, dD, value_b, value_l, x_b, x_l, bc_b, bc_l, bc_d,
        L, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, Q: tl.constexpr,
        BWD: tl.constexpr, PRECISION: tl.constexpr):
    """y of one chunk and head, from the values x and the states h. BWD: dx from g and k; and dD."""
    h, c, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i, first = tl.arange(0, Q), (b * L + c * Q) * H + h
    there = c * Q + i < L
    values = tile(value + b * value_b + h * P, value_l, c, 0, L, Q, P)                      # q p
    M, acc = tl.zeros((Q, Q), tl.float32), tl.zeros((Q, P), tl.float32)
    for d in tl.range(0, 2, disable_licm=not BWD):
        row, bc = (b * 2 + d) * H + h, b * bc_b + d * bc_d + h // (H // G) * N
        dt_j, through, before, beyond, _ = decays(dt + row * L, sums + row * L, c, d, L, Q)
        Cs, Bs = tile(C + bc, bc_l, c, 2 * d - 1, L, Q, N), tile(B + bc, bc_l, c, 0, L, Q, N)
        if BWD:
            M += pairs(Bs, Cs, before, through, d, False, PRECISION) * dt_j[:, None]
            own, weight = Bs, tl.exp(beyond) * dt_j
        else:
            M += pairs(Cs, Bs, before, through, d, True, PRECISION) * dt_j[None, :]
            own, weight = Cs, tl.exp(before)
        state = tl.load(at(states + (row * tl.cdiv(L, Q) + c) * N * P, P, N, P))            # n p
        acc += tl.dot(own, state, input_precision=PRECISION) * weight[:, None]
    acc = tl.dot(M.to(values.dtype), values, acc, input_precision=PRECISION)
    values = values.to(tl.float32)
    acc += tl.load(D + first + i * H, mask=there, other=0.0)[:, None] * values
    tl.store(at(out + first * P, H * P, Q, P), acc.to(out.dtype.element_ty), mask=there[:, None])
    if BWD:
        xs = tile(x + b * x_b + h * P, x_l, c, 0, L, Q, P).to(tl.float32)
        tl.store(dD + first + i * H, tl.sum(xs * values, 1), mask=there)


@jit
def bc_bwd(x, B, C, g, dt, sums, states, out, over, leaving, direct, x_b, x_l, bc_b, bc_l, bc_d,
           batch, L, H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
           Q: tl.constexpr, PARTS: tl.constexpr, IS_C: tl.constexpr, PRECISION: tl.constexpr):
    """dC' of one chunk and direction, over the heads of one part of a group, from the states h; and
    the flows over each position that end in the chunk. Else dB, from k; B.v; and what leaves."""
    part, c, d, b = tl.program_id(0), tl.program_id(1), tl.program_id(2) % 2, tl.program_id(2) // 2
    b, heads, group = b.to(tl.int64), H // G // PARTS, part // PARTS
    i, bc = tl.arange(0, Q), b * bc_b + d * bc_d + group * N
    there, chunks = c * Q + i < L, tl.cdiv(L, Q)
    Cs, Bs = tile(C + bc, bc_l, c, 2 * d - 1, L, Q, N), tile(B + bc, bc_l, c, 0, L, Q, N)   # q n
    if IS_C:
        CB = tl.dot(Cs, tl.trans(Bs), input_precision=PRECISION)                            # q q
    acc = tl.zeros((Q, N), tl.float32)
    for k in tl.range(0, heads, disable_licm=IS_C):
        h = part * heads + k
        row, here = (b * 2 + d) * H + h, ((b * 2 + d) * H + h) * L + c * Q + i
        dt_j, through, before, beyond, _ = decays(dt + row * L, sums + row * L, c, d, L, Q)
        xs = tile(x + b * x_b + h * P, x_l, c, 0, L, Q, P)                                  # q p
        gs = tile(g + (b * L * H + h) * P, H * P, c, 0, L, Q, P)                            # q p
        state = tl.load(at(states + (row * chunks + c) * N * P, P, N, P))                   # n p
        if IS_C:
            dCB = pairs(gs, xs, before, through, d, True, PRECISION) * dt_j[None, :]        # q q
            flow = dCB * CB  # from j to i; what is over m has started before m and not ended
            ends, starts = tl.sum(flow, 1), tl.sum(flow, 0)
            via = tl.dot(gs, tl.trans(state), input_precision=PRECISION) * tl.exp(before)[:, None]
            ends += tl.sum(via * Cs.to(tl.float32), 1)  # from the entering state
            acc = tl.dot(dCB.to(Bs.dtype), Bs, acc + via, input_precision=PRECISION)
            tl.store(over + here, cumulate(ends - starts, 1 - d) - ends, mask=there)
        else:
            dCB = pairs(xs, gs, before, through, d, False, PRECISION)                       # q q
            via = tl.dot(xs, tl.trans(state), input_precision=PRECISION) * tl.exp(beyond)[:, None]
            leaves = tl.sum(via * Bs.to(tl.float32), 1) * dt_j
            via = tl.dot(dCB.to(Cs.dtype), Cs, via, input_precision=PRECISION)              # q n
            acc += via * dt_j[:, None]
            tl.store(leaving + here, leaves, mask=there)
            tl.store(direct + here, tl.sum(via * Bs.to(tl.float32), 1), mask=there)
    shift = 2 * d - 1 if IS_C else 0  # dC'_i is the gradient of C one step upstream
    target = c * Q + i + shift
    out += (((part % PARTS * batch + b) * L + c * Q + shift) * 2 + d) * G * N + group * N
    tl.store(at(out, 2 * G * N, Q, N), acc.to(out.dtype.element_ty),
             mask=(there & (target >= 0) & (target < L))[:, None])


# ---- the operator --------------------------------------------------------------------------------

def fits(x, dt, A, B, C, D):
    """Whether the kernels take these inputs of `bidirectional_scan`; PyTorch takes the others."""
    return (triton is not None and x.dtype in (torch.bfloat16, torch.float32)
            and x.dtype == B.dtype == C.dtype and max(v.dtype.itemsize for v in (dt, A, D)) <= 4
            and {x.shape[3], B.shape[4]} <= {16, 32, 64}   # tiles of 128 overflow shared memory
            and len(x) < 2 ** 15 and x.shape[1] < 2 ** 20  # what a launch grid counts to
            and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= (8, 0)))


def scan(x, dt, A, B, C, D):
    """`chunk_scan.bidirectional_scan` of inputs that fit, in chunks of the kernels' own size."""
    b, l, h, p = x.shape
    if x.stride()[2:] != (p, 1) or x.stride(1) >= 2 ** 24:  # within a tile, offsets are 32 bits
        x = x.contiguous()
    if B.stride() != C.stride() or B.stride()[3:] != (B.shape[4], 1) or B.stride(1) >= 2 ** 24:
        B, C = B.contiguous(), C.contiguous()
    dt, A, D = (v.float().contiguous() for v in (dt, A.expand(b, h), D))
    return scan_op(x, dt, A, B, C, D)[0]


def constants(x, B):
    """Of every launch. float32 operands fill twice the registers: smaller tiles and more warps."""
    low, exact = x.dtype == torch.bfloat16, torch.get_float32_matmul_precision() == "highest"
    return dict(H=x.shape[2], G=B.shape[3], P=x.shape[3], N=B.shape[4], Q=64 if low else 32,
                PRECISION="tf32x3" if exact else "tf32", num_warps=4 if low else 8)


def empty_outputs(x, dt, A, B, C, D):
    """y (b l h p), dt and the sums through each position (2 b d h l), states h (b d h c n p)."""
    (b, l, h, p), k = x.shape, constants(x, B)
    return (x.new_empty(b, l, h, p), dt.new_empty(2, b, 2, h, l),
            x.new_empty(b, 2, h, -(-l // k["Q"]), k["N"], p))


def empty_gradients(g, x, A, B, C, D, rows, states):
    """dx, ddt, dA, dB, dC, dD."""
    return (x.new_empty(x.shape), D.new_empty(*D.shape[:2], 2, D.shape[2]),
            *(v.new_empty(v.shape) for v in (A, B, C, D)))


def run_forward(x, dt, A, B, C, D):
    (b, l, h, _), k, xs, bc = x.shape, constants(x, B), x.stride()[:2], B.stride()[:3]
    y, rows, states = outputs = empty_outputs(x, dt, A, B, C, D)
    with torch.cuda.device_of(x):  # which need not be the current one
        decay_fwd[h, states.shape[3], b](dt, A, *rows, l, h, k["Q"], A_MIN)
        state_scan[h, 2, b](B, x, *rows, states, states, rows, *bc, *xs, l, BWD=False,
                            num_stages=3, **k)
        mix[h, states.shape[3], b](x, B, C, D, *rows, states, y, x, D, *xs, *xs, *bc, l,
                                   BWD=False, num_stages=3, **k)
    return outputs


def run_backward(g, x, A, B, C, D, rows, states):
    (b, l, h, p), k, xs, bc = x.shape, constants(x, B), x.stride()[:2], B.stride()[:3]
    dx, ddt, _, dB, dC, dD = empty_gradients(g, x, A, B, C, D, rows, states)
    chunks, groups, gs = states.shape[3], k["G"], (l * h * p, h * p)
    k_states, (over, leaving, direct) = torch.empty_like(states), rows.new_empty(3, *rows[0].shape)
    passing, dA = rows.new_empty(2, b, 2, h, chunks)
    # Where chunks are few, the heads of a group are split over more programs, and added up here.
    parts = next(s for s in range(1, h // groups + 1) if s == h // groups or
                 h // groups % s == 0 and 2 * b * chunks * groups * s >= PROGRAMS)
    if parts > 1:
        dB, dC = (v.new_empty(parts, *v.shape, dtype=torch.float32) for v in (dB, dC))
    with torch.cuda.device_of(x):
        state_scan[h, 2, b](C, g, *rows, states, k_states, passing, *bc, *gs, l, BWD=True,
                            num_stages=3, **k)
        mix[h, chunks, b](g, B, C, D, *rows, k_states, dx, x, dD, *gs, *xs, *bc, l, BWD=True,
                          num_stages=3, **k)
        for is_c, from_states, out in ((True, states, dC), (False, k_states, dB)):
            bc_bwd[groups * parts, chunks, 2 * b](
                x, B, C, g, *rows, from_states, out, over, leaving, direct, *xs, *bc, b, l,
                PARTS=parts, IS_C=is_c, num_stages=2, **k)
        decay_bwd[h, chunks, b](rows[0], A, over, leaving, passing, direct, ddt, dA, l, h, k["Q"],
                                A_MIN)
    dC[..., -1, 0, :, :] = dC[..., 0, 1, :, :] = 0  # C there is upstream of no position
    if parts > 1:
        dB, dC = (v.sum(0).to(x.dtype) for v in (dB, dC))
    return dx, ddt, dA.sum((1, 3)), dB, dC, dD


# Operators of their own, so that torch.compile takes each as one opaque node, at any length.
scan_op = torch.library.custom_op("mark::scan", run_forward, mutates_args=(), schema=(
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D) -> (Tensor, Tensor, Tensor)"))
backward_op = torch.library.custom_op("mark::scan_backward", run_backward, mutates_args=(), schema=(
    "(Tensor g, Tensor x, Tensor A, Tensor B, Tensor C, Tensor D, Tensor rows, Tensor states) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"))
scan_op.register_fake(empty_outputs)
backward_op.register_fake(empty_gradients)


def keep(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # or zeros of the size of the states would be written
    ctx.save_for_backward(inputs[0], *inputs[2:], *output[1:])


scan_op.register_autograd(lambda ctx, g, *_: backward_op(g.contiguous(), *ctx.saved_tensors),
                          setup_context=keep)
