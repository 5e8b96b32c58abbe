"""What the GPU kernels take of a multiprocessor, found without a GPU: compile and disassemble.

Run:      python tests/compile_kernels.py        (bfloat16, within a minute)
          python tests/compile_kernels.py --dtypes bfloat16 float32 --also runs/triton_3.6.0
          python -m experiments.publish runs/triton_aot      (what the table in RESULTS is made of)
Last line: "N kernels compiled; at most N spill instructions"

Prints a line of JSON for each kernel on sm_80 and sm_90, and writes result.json:

    registers of a thread, spills (instructions), shared_kb of a block, mma and wgmma (instructions)
    instructions of the kernel, and of its longest loop; loads and stores: {bytes of one thread's
    access to global memory: instructions}
    per_element   of the mixer's kernels: instructions of a thread for each element that it writes,
                  or each logit
    gigabytes     what the kernel has to read and write at (b, l) = (8, 4096), from shapes
"""
import collections
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Literal, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import chunk_scan_triton  # noqa: E402
import common  # noqa: E402
import mixer_triton  # noqa: E402
from chunk_scan import A_MIN  # noqa: E402
from chunk_scan_triton import STATE_STAGES  # noqa: E402
from mixer_triton import CHANNELS, LOGITS, STEP, STRIP, TAPS  # noqa: E402

VOCABULARY = 30522


class Kernel(NamedTuple):
    """One way to launch a kernel."""
    name: str
    variant: dict                # what tells it from others of its name
    stages: int                  # of its loops' loads
    gigabytes: str               # the tensors it reads and writes, by the letters of `sizes`


SCAN = (
    Kernel("decay_fwd", {}, 3, "r r r"),
    Kernel("state_scan", {"BWD": False}, STATE_STAGES, "x x c r r s"),
    Kernel("mix", {"BWD": False}, 3, "x c c d r r s x"),
    Kernel("state_scan", {"BWD": True}, STATE_STAGES, "x x c r r s s"),
    Kernel("mix", {"BWD": True}, 3, "x x c c d r r s x d"),
    Kernel("bc_bwd", {"IS_C": True}, 2, "x x x x c c r r s c r"),
    Kernel("bc_bwd", {"IS_C": False}, 2, "x x x x c c r r s c r r"),
    Kernel("decay_bwd", {}, 3, "r r r r r"))
MIXER = (
    Kernel("conv_fwd", {"MASKED": False}, 3, "x c c x c c"),
    Kernel("conv_fwd", {"MASKED": True}, 3, "x c c x c c"),
    Kernel("conv_bwd", {"MASKED": False}, 3, "x c c x c c x c c"),
    Kernel("conv_bwd", {"MASKED": True}, 3, "x c c x c c x c c"),
    Kernel("gate_fwd", {}, 3, "x x x"),
    Kernel("gate_bwd", {}, 3, "x x x x x"),
    Kernel("ce_fwd", {}, 3, "v"),
    Kernel("ce_bwd", {}, 3, "v v"))
# Arguments that end in _b, _l, _d are strides; every other is a pointer, to x's dtype or to these.
FLOAT32 = {"dt", "A", "D", "dt_rows", "sums", "passing", "over", "leaving", "direct", "ddt", "dA",
           "dD", "modulation", "ce", "largest", "log_sum"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Compile every kernel at the released sizes, or at others."""
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16",)
    h: int = 24                   # heads
    p: int = 64                   # head dim
    n: int = 64                   # state
    also: tuple[str, ...] = ()    # folders of results with other versions of triton, to be named
    out: str = "runs/triton_aot"  # folder of result.json


# ---- launches ------------------------------------------------------------------------------------

def sizes(cfg, dtype, chunk, b=8, l=4096):
    """Bytes at (b, l) of x, of B or C, of a row of dt or sums, of D, and of all states."""
    e = cfg.h * cfg.p
    return {"v": 4096 * VOCABULARY * dtype.itemsize,  # a chunk of logits
            "x": b * l * e * dtype.itemsize,
            "c": b * l * 2 * cfg.n * dtype.itemsize,
            "r": b * l * 2 * cfg.h * 4,
            "d": b * l * cfg.h * 4,
            "s": b * 2 * (l // chunk) * e * cfg.n * dtype.itemsize}


def scan_constants(cfg, x, B):
    """What `chunk_scan_triton.constants` says, and what a launch adds."""
    return {"A_MIN": A_MIN, "PARTS": 1, **chunk_scan_triton.constants(x, B)}


def mixer_constants(cfg, kernel):
    """As mixer_triton.py launches a kernel."""
    e = cfg.h * cfg.p
    if kernel.name.startswith("ce"):
        return {"V": VOCABULARY, "C": LOGITS, "num_warps": 4}
    if kernel.name.startswith("gate"):
        return {"W": e, "WIDE": 1 << (e - 1).bit_length(), "num_warps": 4}
    return {"X": e, "M": cfg.n, "K": TAPS, "C": CHANNELS[kernel.name], "STRIP": STRIP, "STEP": STEP,
            "num_warps": 1}


def argument_types(names, values, pointer):
    """Argument -> its type in a launch; `pointer` is that of x."""
    types = {}
    for name in names:
        if name in values:
            types[name] = "constexpr"
        elif name in FLOAT32:
            types[name] = "*fp32"
        elif name == "real":
            types[name] = "*u8"
        elif name == "targets":
            types[name] = "*i64"
        elif name == "eps":
            types[name] = "fp32"
        elif re.fullmatch(r"L|batch|\w+_[bld]", name):
            types[name] = "i32"
        else:
            types[name] = pointer
    return types


def compile_kernel(module, kernel, constants, capability, dtype):
    """What triton makes of one kernel at these constants."""
    from triton.backends.compiler import GPUTarget
    triton = chunk_scan_triton.triton
    function = getattr(module, kernel.name)
    names = function.arg_names
    values = {key: v for key, v in {**kernel.variant, **constants}.items() if key in names}
    types = argument_types(names, values, "*bf16" if dtype == torch.bfloat16 else "*fp32")
    aligned = {}  # as a launch finds pointers and strides
    for i, argument in enumerate(names):
        if argument not in values and argument not in ("L", "batch", "eps"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(
        triton.compiler.ASTSource(function, types, values, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": constants["num_warps"], "num_stages": kernel.stages})


# ---- what came out -------------------------------------------------------------------------------

def disassemble(tool, flag, cubin):
    """What one of NVIDIA's tools, which triton brings, says of a compiled kernel."""
    tools = Path(chunk_scan_triton.triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        run = subprocess.run([tools / tool, flag, file.name], capture_output=True, check=True,
                             encoding="utf-8")
    return run.stdout


def instructions_of(sass):
    """(the instructions without predicates, {label: index of the instruction behind it})."""
    instructions, labels = [], {}
    for line in sass.splitlines():
        label = re.match(r"(\.L_\w+):", line)
        code = re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ +)?(.*?) *;", line)
        if label:
            labels[label[1]] = len(instructions)
        elif code:
            instructions.append(code[1])
    return instructions, labels


def longest_loop(instructions, labels):
    """The instructions between a label and the farthest jump back to it."""
    longest = 0
    for i, code in enumerate(instructions):
        target = re.match(r"BRA\b.*?(\.L_\w+)", code)
        if target:
            longest = max(longest, i + 1 - labels.get(target[1], i + 1))
    return longest


def widths(instructions, operation):
    """{bytes of one access: instructions}; an access without a width is of four bytes."""
    counts = collections.Counter()
    for code in instructions:
        if re.match(rf"{operation}\b", code):
            name = code.split()[0]
            bits = re.search(r"\.(?:[US])?(8|16|64|128)\b", name)
            counts[int(bits[1]) // 8 if bits else 4] += 1
    return dict(sorted(counts.items(), reverse=True))


def describe(module, kernel, constants, capability, dtype):
    """A row of the table, without its bytes."""
    compiled = compile_kernel(module, kernel, constants, capability, dtype)
    usage = disassemble("cuobjdump", "--dump-resource-usage", compiled.asm["cubin"])
    sass = disassemble("nvdisasm", "--print-code", compiled.asm["cubin"])
    instructions, labels = instructions_of(sass)

    def count(operations):
        return sum(bool(re.match(rf"({operations})\b", code)) for code in instructions)

    transposed = re.search(r"tt\.trans [^:]*: tensor<[^>]*, #mma\d*>", compiled.asm["ttgir"])
    return {"kernel": kernel.name, **kernel.variant, "sm": capability,
            "dtype": str(dtype).split(".")[1],
            "registers": int(re.search(r"REG:(\d+)", usage)[1]), "spills": count("STL|LDL"),
            "shared_kb": round(compiled.metadata.shared / 1024, 1), "mma": count("HMMA"),
            "wgmma": count("HGMMA"), "transposed_product": bool(transposed),
            "instructions": len(instructions), "loop": longest_loop(instructions, labels),
            "loads": widths(instructions, "LDG|LDGSTS"), "stores": widths(instructions, "STG")}


def per_element(row, constants):
    """Instructions of a thread for each element that it writes, of one of the mixer's kernels."""
    if row["kernel"].startswith("ce"):
        counted = row["loop"] if row["kernel"] == "ce_fwd" else row["instructions"]
        return counted * 32 * constants["num_warps"] / constants["C"]
    if row["kernel"].startswith("gate"):
        return row["instructions"] * 32 * constants["num_warps"] / constants["W"]
    rows = STRIP if row["kernel"] == "conv_fwd" else STRIP - 6
    return row["loop"] * STRIP / STEP * 32 / (rows * constants["C"])


def rows_of(cfg, dtype):
    """A row for each kernel on each architecture."""
    x = torch.empty(1, 1, cfg.h, cfg.p, dtype=dtype)
    B = torch.empty(1, 1, 2, 1, cfg.n, dtype=dtype)
    chunk = chunk_scan_triton.constants(x, B)["Q"]
    of = sizes(cfg, dtype, chunk)
    for module, kernels in ((chunk_scan_triton, SCAN), (mixer_triton, MIXER)):
        for kernel in kernels:
            for capability in (80, 90):
                if module is mixer_triton:
                    constants = mixer_constants(cfg, kernel)
                else:
                    constants = scan_constants(cfg, x, B)
                row = describe(module, kernel, constants, capability, dtype)
                if module is mixer_triton:
                    row["per_element"] = round(per_element(row, constants), 1)
                row["gigabytes"] = round(sum(of[k] for k in kernel.gigabytes.split()) / 1e9, 3)
                yield row


def other_version(folder):
    """Of a result with another version of triton: how many kernels compiled, and the most spills.
    """
    found = json.loads((folder / "result.json").read_text("utf-8"))["metrics"]
    return {"triton": found["triton"], "kernels": len(found["kernels"]),
            "spills": max(row["spills"] for row in found["kernels"])}


def main(cfg):
    triton = chunk_scan_triton.triton
    if triton is None:
        raise common.UserError("triton is not installed; pip install triton (on Linux)")
    warnings.simplefilter("ignore")  # of triton, about its own next release
    env = common.banner("chunk_scan", cfg)  # the script under which this is published
    rows = []
    for dtype in cfg.dtypes:
        for row in rows_of(cfg, getattr(torch, dtype)):
            rows.append(row)
            common.log(json.dumps(row))
    result = {"triton": triton.__version__, "h": cfg.h, "p": cfg.p, "n": cfg.n, "kernels": rows,
              "also": [other_version(common.ROOT / folder) for folder in cfg.also]}
    common.save_result(common.ROOT / cfg.out / "result.json", result, cfg, env)
    common.log(f"{len(rows)} kernels compiled; at most {max(row['spills'] for row in rows)} spill "
               "instructions")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
