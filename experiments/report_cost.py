"""RESULTS.md, the MaRK paper: cost (Table 3), speed, peers, scan, kernels, breaks of the code.

Run:      not a script; report.py writes the page.

Symbols:  none.
Differs from the paper: nothing.
"""
import statistics

import common
from experiments import bench, peers, scan_bench
from experiments.report_pieces import (Section, command, listed, load_result, lowest_to_highest,
                                       picture, provenance, publish_command, titled)
from mark_adapters import GEOMETRIES

COST = "Cost: Table 3"  # the heading of the first of three sections of one run
PAPER_FROZEN_MS = {512: 47.75, 4096: 267.43}  # its public repository; Table 3
PAPER_MS = {"hypernet": 304.75, "chebyshev": 309.74, "dct": 307.28}  # at 4096, Table 3
PAPER_OVERHEAD = {"hypernet": 0.656, "chebyshev": 1.040, "dct": 0.887}  # at 512, Table 3


# ---- bench.py ------------------------------------------------------------------------------------


def bench_commands(result):
    return (command("-m experiments.bench", bench.Config, result.settings, bench.PRESETS),
            publish_command("bench", "laptop"))


def added_ms(kernel):
    """What Table 3 adds to the frozen pass, in milliseconds: at 4096, and at 512."""
    long = PAPER_MS[kernel] - PAPER_FROZEN_MS[4096]
    short = PAPER_OVERHEAD[kernel] * PAPER_FROZEN_MS[512]
    return long, short


def largest_share_alone(result):
    """The largest time of a geometry's adapter over a frozen pass, at the released size."""
    alone = result.metrics["alone"]
    return max(alone[name]["ms"] / alone[name]["frozen_ms"] for name in GEOMETRIES)


def operations_alone(result):
    """(fewest, most) operations of a geometry's adapter, for all layers together."""
    counts = [result.metrics["alone"][name]["operations"] for name in GEOMETRIES]
    return min(counts), max(counts)


def cost_section():
    """Table 3 on a CPU."""
    result = load_result("bench/laptop")
    settings, tables = result.settings, result.metrics["tables"]
    long = [added_ms(kernel)[0] for kernel in GEOMETRIES]
    short = [added_ms(kernel)[1] for kernel in GEOMETRIES]
    fewest, most = operations_alone(result)
    says = f"""
        The paper's adapters make a pass on an A100 14 to 16 % slower at length 4096 and 65 to
        104 % slower at 512. In milliseconds this is {lowest_to_highest(long, 0)} at 4096, and
        {lowest_to_highest(short, 0)} at 512 with the frozen pass of its public repository
        ({PAPER_FROZEN_MS[512]} ms): about a constant, which its code spends in a Python loop over
        the layers. Here the adapters of all layers are one evaluation, and a sampler evaluates all
        of its times at once ("all t at once").

        No GPU was at hand. On two noisy CPU cores few overheads can be told from zero. At the
        released size an adapter alone takes at most {largest_share_alone(result):.2%} of a frozen
        pass; on a GPU the launches count, and it has {fewest} to {most} operations for all layers
        together."""
    counted = (f"{settings['seeds']} seeds of {settings['passes']} passes of each variant, timed "
               f"in turn with the frozen pass, {settings['batch']} sequences, without the head; ± "
               "is Student's 95 % over the seeds. The second table is of random weights of the "
               "released size; its times are medians, without an interval.")
    shown = (titled("a pass of the shipped model", tables["cost"]),
             titled("an adapter alone, at the released size", tables["alone"]),
             *picture("table3_laptop", "Most overheads cannot be told from zero on this machine; a "
                      "pass takes time in proportion to length and depth (medians, no interval)"))
    return Section(COST, says, bench_commands(result), provenance(result), counted, shown)


def speed_section():
    """Training steps, and how a pass grows."""
    result = load_result("bench/laptop")
    tables = result.metrics["tables"]
    steps = result.metrics["training"]
    says = f"""
        A training step needs no gradient of the frozen weights, and only masked tokens reach the
        vocabulary, 4,096 at a time. On two CPU cores the shipped model trains at
        {steps['shipped']['plain']['tokens_per_second']:,.0f} tokens a second and a model of the
        released size at {steps['released size']['plain']['tokens_per_second']:,.0f}. Checkpointing
        takes less memory and more time. The adapter is below 1 % of a step. The time of a frozen
        pass is linear in length and in depth."""
    counted = "medians of a few rounds in one process; no interval was computed."
    shown = (titled("a training step, and the shares of its parts", tables["training"]),
             titled("a frozen pass by length and by depth", tables["scaling"]))
    return Section("Training speed", says, COST, provenance(result), counted, shown)


def plan_section():
    """The paper's training on GPUs, computed."""
    result = load_result("plan/paper")
    found = result.metrics
    plan, ms, shares = found["plan"], found["forward_ms"], found["shares"]
    fits = ", ".join(f"{n} sequences in {memory} GB"
                     for memory, n in found["micro_batches"].items())
    says = f"""
        This table is computed and not measured. The paper trains on {plan['tokens'] / 1e9:.1f} G
        tokens: what each map and the scan cost forward and backward, the head for the masked half,
        and the bytes that these move (experiments/plan.py lists them). The first row takes the data
        sheets' rates for bfloat16 and memory, one after the other, and counts two GPUs as twice as
        fast as one. The second takes the share of those rates that the paper's own frozen pass in
        Table 3 reaches on an A100 ({1 / plan['slower_than_data_sheets']:.0%}). The third also moves
        the bytes that the reference code moves, so it is the paper's own code.

        By shapes, a step without checkpointing fits {fits}. From the compiled kernels, at
        {shares['bandwidth']:.0%} of the bandwidth, {shares['arithmetic']:.0%} of the arithmetic and
        {shares['issue']:.0%} of the instructions that a data sheet names, the layers of a frozen
        pass at batch 8 and length 4,096 would take {ms['A100']:.0f} ms on an A100 and
        {ms['H200']:.0f} on an H200. The paper measures 267 on an A100. These shares are our guess
        until a GPU has run the kernels."""
    counted = "computed; nothing is random."
    return Section("The paper's training, computed", says,
                   ("python -m experiments.plan", publish_command("plan", "paper")),
                   provenance(result), counted, (found["table"],))


def rehearsal_section():
    """The released size through --preset paper, on a CPU."""
    result = load_result("train/rehearsal")
    found = result.metrics
    table = common.markdown(
        ["parameters", "loading", "memory for it", "training, bf16, length 512", "peak memory",
         "whole command"],
        [f"{found['parameters']:,}", f"{found['load_seconds']:.1f} s",
         f"{found['load_bytes'] / 1e9:.2f} GB", f"{found['tokens_per_second']:.0f} tokens/s",
         f"{found['peak_bytes'] / 1e9:.2f} GB", f"{found['seconds']:.0f} s"])
    says = """
        A random checkpoint in the layout and of the size of the released one is loaded and trained
        for two steps with `--preset paper` on a CPU. So the paper's command works at its size; it
        says nothing about losses or about speed on a GPU."""
    counted = "one run; no interval."
    made = "MARK_PUBLISH=1 pytest -m slow tests/test_train.py -k full_size_rehearsal"
    return Section("The paper's size, rehearsed", says, (made,), provenance(result), counted,
                   (table,))


# ---- peers.py ------------------------------------------------------------------------------------


def peers_section():
    """A layer beside Mamba-2's and BERT's, on a CPU."""
    result = load_result("bench/peers")
    found, settings = result.metrics, result.settings
    longest = str(max(settings["length"]))
    times = found["ms"][longest]
    ratio = {name: statistics.median(peers.ratios(times, name)) for name in times}
    millions = {}
    for name, count in found["parameters"].items():
        millions[name.partition(" (")[0]] = count / 1e6
    says = f"""
        One layer of width {settings['d_model']} at batch 1 in float32, forward: ours, the PyTorch
        path of transformers' Mamba-2 ({found['transformers']}) with the same heads and state, and
        its BERT layer with scaled_dot_product_attention. Ours and BERT read from both sides,
        Mamba-2 from one. At {int(longest):,} tokens Mamba-2 takes
        {ratio['Mamba-2 (chunks of 256)']:.2f} times our time with its default chunk, and
        {ratio['Mamba-2 (chunks of 64)']:.2f} times with the chunk of ours; BERT, whose attention is
        quadratic, takes {ratio['BERT']:.2f} times. The layers have {listed(millions, 1)} million
        parameters: BERT's holds an MLP too, so a model has fewer of them. These are
        implementations on one CPU, where Mamba-2 has no kernels of its own; nothing follows for a
        GPU."""
    counted = (f"n = {settings['rounds']} rounds, each times every layer once, one after the "
               "other, and begins with another one; times are medians. A ratio is the median over "
               "the rounds of a peer's time over ours in the same round; in brackets are the two "
               "rounds between which its true median lies with 95 % or more (binomial). One "
               f"machine, {settings['threads']} thread, beside other work: {found['load'][0]:.1f} "
               f"processes wanted its cores at the start, {found['load'][1]:.1f} at the end.")
    made = command("-m experiments.peers", peers.Config, settings)
    return Section("Peers on a CPU", says,
                   (made, publish_command("peers"), "# before: pip install transformers"),
                   provenance(result), counted, (peers.time_table(found["ms"]),))


# ---- the scan ------------------------------------------------------------------------------------


def scan_section():
    """The chunked scan on a CPU."""
    result = load_result("chunk_scan/cpu")
    found, settings = result.metrics, result.settings
    says = f"""
        The chunked scan beside the recurrence that defines it, and beside the listing of the
        Mamba-2 paper, forward and backward in float32. It is
        {found['speedup_over_plain']['median']:.1f} times as fast as the recurrence and
        {found['speedup_over_ssd_listing']['median']:.1f} times as fast as the listing. Four times
        the length takes {found['growth']['median']:.1f} times the time. Before it is timed it is
        checked against the recurrence in float64, to
        {max(found['errors'].values()):.0e}."""
    counted = (f"{settings['rounds']} rounds, each times all of them one after the other; medians, "
               "and in brackets the quartiles of the ratio over the rounds.")
    made = command("-m experiments.scan_bench", scan_bench.Config, settings)
    return Section("The scan on a CPU", says, (made, publish_command("chunk_scan", "cpu")),
                   provenance(result), counted, (found["table"],))


def kernel_name(row):
    """Which kernel a row of chunk_scan/triton_aot is of."""
    name = row["kernel"]
    if row.get("BWD"):
        return f"{name}, backward"
    if row.get("MASKED"):
        return f"{name}, with pads"
    if "IS_C" in row:
        return f"{name}, dC" if row["IS_C"] else f"{name}, dB"
    return name


def kernels_table(found, dtype="bfloat16"):
    """What the kernels take of a multiprocessor, by architecture."""
    rows = {}
    for row in found["kernels"]:
        if row["dtype"] == dtype:
            multiplies = row["wgmma"] if row["sm"] == 90 else row["mma"]
            cell = f"{row['registers']} / {row['spills']} / {row['shared_kb']:.0f} / {multiplies}"
            rows.setdefault(kernel_name(row), {})[row["sm"]] = cell
    lines = [[f"`{name}`", cells[80], cells[90]] for name, cells in rows.items()]
    return common.markdown([f"registers / spills / shared KB / matrix instructions (triton "
                            f"{found['triton']})", "sm_80 (mma)", "sm_90 (wgmma)"], *lines)


def kernels_section():
    """The Triton kernels, compiled without a device."""
    result = load_result("chunk_scan/triton_aot")
    found = result.metrics
    spilling = [row for row in found["kernels"] if row["spills"]]
    dtypes = sorted({row["dtype"] for row in spilling}) or ["none"]
    others = ", ".join(other["triton"] for other in found["also"])
    says = f"""
        On a GPU the scan runs as Triton kernels, forward and backward, where tensors are bfloat16
        or float32 and head dim and state are 16, 32 or 64; so do convolution, SiLU and eq. 4
        (`conv`), norm and gate (`gate`), and the cross-entropy (`ce`). They are tested against
        float64 loops in Triton's interpreter, and compiled for sm_80 and sm_90 without a device by
        Triton {found['triton']} and {others}; no GPU time has been measured. The table is of
        bfloat16 at the released sizes. Of the
        {len(found['kernels'])} compiled kernels of both types, {len(spilling)} spill registers
        ({', '.join(dtypes)}). `python -m experiments.gpu_check` is the command that times them
        on a GPU."""
    counted = "counted in the compiled code; nothing is random."
    made = "python tests/compile_kernels.py --dtypes bfloat16 float32"
    return Section("The GPU kernels, compiled", says,
                   (made, publish_command("triton_aot")),
                   provenance(result), counted, (kernels_table(found),))


# ---- the tests -----------------------------------------------------------------------------------


def mutations_section():
    """One-line breaks of the code, and the test that notices each."""
    result = load_result("mutations/small")
    lines = []
    for row in result.metrics["breaks"]:
        noticed = "yes" if row["noticed"] else "**no**"
        lines.append([row["file"], in_cell(row["old"]), in_cell(row["new"]),
                      f"`{row['test'].partition('::')[2]}`", noticed])
    table = common.markdown(["file", "line as it is", "broken", "test", "noticed"], *lines)
    says = f"""
        Would a test notice? The code is broken in a copy, one line at a time: a sign, a shift, a
        bound, a seed. {result.metrics['noticed']} of {len(lines)} breaks turn the test that is
        named for them red."""
    counted = "each break once; nothing is random."
    return Section("Breaking the code on purpose", says,
                   ("python tests/mutations.py", publish_command("mutations", "small")),
                   provenance(result), counted, (table,))


def in_cell(code):
    """A piece of code in a cell of a table."""
    escaped = code.replace("|", "\\|")
    return f"`{escaped}`"
