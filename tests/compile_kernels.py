"""What the scan's kernels take of a multiprocessor, found without a GPU: compile and disassemble.

Run:      python tests/compile_kernels.py        (bfloat16, within a minute)
          python tests/compile_kernels.py --dtypes bfloat16 float32
          python -m experiments.publish runs/triton_aot        (what the README's table is made of)
Last line: "N kernels compiled; at most N spill instructions"

Prints a line of JSON for each kernel on sm_80 and sm_90, and writes result.json.
"""
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import chunk_scan_triton  # noqa: E402
import common  # noqa: E402
from chunk_scan import A_MIN  # noqa: E402

VARIANTS = (("decay_fwd", {}, 3), ("state_scan", {"BWD": False}, 3), ("mix", {"BWD": False}, 3),
            ("state_scan", {"BWD": True}, 3), ("mix", {"BWD": True}, 3),
            ("bc_bwd", {"IS_C": True}, 2), ("bc_bwd", {"IS_C": False}, 2), ("decay_bwd", {}, 3))
# Arguments that end in _b, _l, _d are strides; every other is a pointer, to x's dtype or to these.
FLOAT32 = {"dt", "A", "D", "dt_rows", "sums", "passing", "over", "leaving", "direct", "ddt", "dA",
           "dD"}


@dataclasses.dataclass(frozen=True)
class Config:
    """Compile every kernel at the released sizes, or at others."""
    dtypes: tuple[Literal["bfloat16", "float32"], ...] = ("bfloat16",)
    h: int = 24                   # heads
    p: int = 64                   # head dim
    n: int = 64                   # state
    out: str = "runs/triton_aot"  # folder of result.json


def argument_types(names, values, pointer):
    """Argument -> its type in a launch; `pointer` is that of x."""
    types = {}
    for name in names:
        if name in values:
            types[name] = "constexpr"
        elif name in FLOAT32:
            types[name] = "*fp32"
        elif re.fullmatch(r"L|batch|\w+_[bld]", name):
            types[name] = "i32"
        else:
            types[name] = pointer
    return types


def disassemble(tool, flag, cubin):
    """What one of NVIDIA's tools, which triton brings, says of a compiled kernel."""
    tools = Path(chunk_scan_triton.triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        run = subprocess.run([tools / tool, flag, file.name], capture_output=True, check=True,
                             encoding="utf-8")
    return run.stdout


def compile_kernel(name, variant, stages, capability, x, B):
    """Compile one kernel for x (b l h p) and B (b l 2 g n) -> what it takes of a multiprocessor."""
    from triton.backends.compiler import GPUTarget
    triton = chunk_scan_triton.triton
    kernel = getattr(chunk_scan_triton, name)
    names = kernel.arg_names
    constants = chunk_scan_triton.constants(x, B)
    warps = constants["num_warps"]
    given = {"A_MIN": A_MIN, "PARTS": 1, **variant, **constants}
    values = {key: value for key, value in given.items() if key in names}
    types = argument_types(names, values, "*bf16" if x.dtype == torch.bfloat16 else "*fp32")
    aligned = {}  # as a launch finds pointers and strides
    for i, argument in enumerate(names):
        if argument not in values and argument not in ("L", "batch"):
            aligned[(i,)] = [["tt.divisibility", 16]]
    compiled = triton.compile(
        triton.compiler.ASTSource(kernel, types, values, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages})

    usage = disassemble("cuobjdump", "--dump-resource-usage", compiled.asm["cubin"])
    sass = disassemble("nvdisasm", "--print-code", compiled.asm["cubin"])

    def count(operations):
        return len(re.findall(rf"\b({operations})\b", sass))

    transposed = re.search(r"tt\.trans [^:]*: tensor<[^>]*, #mma\d*>", compiled.asm["ttgir"])
    return {"kernel": name, **variant, "sm": capability, "dtype": str(x.dtype).split(".")[1],
            "registers": int(re.search(r"REG:(\d+)", usage)[1]), "spills": count("STL|LDL"),
            "shared_kb": round(compiled.metadata.shared / 1024, 1), "mma": count("HMMA"),
            "wgmma": count("HGMMA"), "transposed_product": bool(transposed)}


def main(cfg):
    triton = chunk_scan_triton.triton
    if triton is None:
        raise common.UserError("triton is not installed; pip install triton (on Linux)")
    warnings.simplefilter("ignore")  # of triton, about its own next release
    env = common.banner("chunk_scan", cfg)  # the script under which this is published
    rows = []
    for dtype in cfg.dtypes:
        x = torch.empty(1, 1, cfg.h, cfg.p, dtype=getattr(torch, dtype))
        B = torch.empty(1, 1, 2, 1, cfg.n, dtype=x.dtype)
        for variant in VARIANTS:
            for capability in (80, 90):
                row = compile_kernel(*variant, capability, x, B)
                rows.append(row)
                common.log(json.dumps(row))
    result = {"triton": triton.__version__, "h": cfg.h, "p": cfg.p, "n": cfg.n, "kernels": rows}
    common.save_result(common.ROOT / cfg.out / "result.json", result, cfg, env)
    common.log(f"{len(rows)} kernels compiled; at most {max(row['spills'] for row in rows)} spill "
               "instructions")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
