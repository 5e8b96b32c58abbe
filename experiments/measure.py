"""What a call costs: its operations, the bytes it holds and its time; and the models measured.

Run:      not a script; bench.py and gpu_check.py measure with it.

Symbols:  operation   a dispatched ATen operation that is no view: on a GPU, about one launch
          ms, MiB     milliseconds, 2^20 bytes
Differs from the paper: nothing.
"""
import time
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoint import load_backbone
from hydra_ssm import HydraBert, HydraConfig

# ---- counting ------------------------------------------------------------------------------------


def storages(values):
    """The storages of the tensors in nested tuples, lists and dicts."""
    return [value.untyped_storage() for value in tree_leaves(values)
            if isinstance(value, torch.Tensor)]


class Count(TorchDispatchMode):
    """Counts what runs under it.

    operations  that are no views
    reading     those of them that read a tensor of `watched`, or one made of such tensors alone
    sizes       the elements of every new tensor
    live, peak  the bytes that new tensors hold now, and the most that they held at once (what is
                made and dropped inside a kernel is unseen)
    """

    def __init__(self, watched=()):
        super().__init__()
        self.operations = 0
        self.reading = 0
        self.sizes = []
        self.live = 0
        self.peak = 0
        self.known = weakref.WeakSet()
        self.watched = weakref.WeakSet(storages(watched))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = storages((args, kwargs))
        out = func(*args, **(kwargs or {}))
        if func.is_view:
            return out
        self.operations += 1
        read = [storage in self.watched for storage in given]
        if any(read):
            self.reading += 1
        for value in tree_leaves(out):
            if not isinstance(value, torch.Tensor):
                continue
            storage = value.untyped_storage()
            if storage in given or storage in self.known:  # changed in place, or counted already
                continue
            self.add(storage, value.numel())
            if given and all(read):
                self.watched.add(storage)
        return out

    def add(self, storage, size):
        """Count a new storage until it is freed."""
        nbytes = storage.nbytes()
        self.known.add(storage)
        self.sizes.append(size)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.free, nbytes)

    def free(self, nbytes):
        self.live -= nbytes


def peak_mib(function, *modules):
    """MiB of one call: what its new tensors hold at most, and the weights of the modules."""
    weights = [p for module in modules for p in module.parameters()]
    if weights[0].is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        peak = torch.cuda.max_memory_allocated() - before
    else:
        with Count() as count:
            function()
        peak = count.peak
    held = sum(p.numel() * p.element_size() for p in weights)
    return (peak + held) / 2**20


# ---- timing --------------------------------------------------------------------------------------


def timed(function, *inputs, device):
    """(what function(*inputs) returns, its ms), by device events on a GPU."""
    if device == "cpu":
        start = time.perf_counter()
        result = function(*inputs)
        return result, 1e3 * (time.perf_counter() - start)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    result = function(*inputs)
    end.record()
    torch.cuda.synchronize()
    return result, start.elapsed_time(end)


def milliseconds(function, device):
    """The time of one call."""
    _, ms = timed(function, device=device)
    return ms


# ---- models --------------------------------------------------------------------------------------


def make_model(source, device, dtype=None):
    """A frozen backbone: random weights of a HydraConfig, or what load_backbone takes.

    dtype: bfloat16 on a GPU and float32 on a CPU, unless it is given. A_log, dt_bias and D stay in
    float32 under bfloat16, as load_backbone keeps them.
    """
    if dtype is None:
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if not isinstance(source, HydraConfig):
        return load_backbone(source, dtype, device)
    model = HydraBert(source).to(device, dtype).requires_grad_(False).eval()
    if dtype.itemsize < 4:
        for layer in model.layers:
            for parameter in (layer.mixer.A_log, layer.mixer.dt_bias, layer.mixer.D):
                parameter.data = parameter.data.float()
    return model
