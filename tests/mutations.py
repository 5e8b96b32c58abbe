"""Would a test notice? One-line breaks of the code, one at a time, each with the test for it.

Run:      python tests/mutations.py        (7 minutes)
          python -m experiments.publish runs/mutations --name small
Last line: "N of N breaks were noticed"

A copy of the repository is broken, never the repository itself. Every named test must pass in the
copy as it is, and fail (not merely end in an error of collection) with its line broken.
`tests/test_mutations.py` checks that each line is still there.
"""
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common  # noqa: E402

BREAKS = (  # file, old, new, test
    ("chunk_scan.py", "beyond = total - through", "beyond = total + through",  # a sign
     "test_chunk_scan.py::test_values_and_every_gradient_equal_the_loop[65-1-shared_A]"),
    ("chunk_scan.py", "C[:, :, 0].roll(1, 1)", "C[:, :, 0]",  # the shift by one
     "test_chunk_scan.py::test_values_and_every_gradient_equal_the_loop[2-1-shared_A]"),
    ("chunk_scan.py", ".tril(-1)", ".tril(0)",  # a state sees its own position
     "test_chunk_scan.py::test_feeding_the_identity_shows_a_quasiseparable_matrix"),
    ("chunk_scan.py", "A_MIN = -30.0", "A_MIN = -1e30",  # large decays poison their neighbours
     "test_chunk_scan.py::test_a_spike_of_decay_costs_its_neighbours_nothing"),
    ("hydra_ssm.py", "weight, eps=1e-5) * F.silu(z)", "weight, eps=1e-3) * F.silu(z)",  # an eps
     "test_hydra_ssm.py::test_logits_of_the_official_modules_are_matched"),
    ("hydra_ssm.py", "dt = dt * mask[..., None, None]", "dt = dt",  # a pad enters the state
     "test_hydra_ssm.py::test_padding_is_exact"),
    ("cart.py", "s = F.pad(v[..., :-1], (1, 0))", "s = F.pad(v[..., :-1], (1, 0)) * (1 - p)",
     "test_cart.py::test_the_golden_weights"),  # the offset of eq. 22
    ("cart.py", "& (u.to(x0.device) < t)", "& (u.to(x0.device) < t * t)",  # eq. 12
     "test_cart.py::test_corruption_masks_each_maskable_token_with_probability_t"),
    ("mark_adapters.py", "[..., self.factors[0]:] = 0", "[..., self.factors[0]:] *= 1",  # V half
     "test_mark_adapters.py::test_every_adapter_starts_as_the_identity_bit_for_bit"),
    ("mark_adapters.py", "BETA_A_MAX * rho_A.sigmoid()", "2 * BETA_A_MAX * rho_A.sigmoid()",
     "test_mark_adapters.py::test_bounds_hold_for_huge_hidden_states_and_magnitudes"),
    ("data.py", "generator=noise_generator(self.seed, epoch)", "generator=noise_generator(0, 0)",
     "test_data.py::test_each_epoch_visits_each_window_once_in_its_own_order"),
    ("data.py", "noise_generator(self.seed, step, slot)", "noise_generator(self.seed, step, 0)",
     "test_train.py::test_ranks_and_workers_together_see_each_sample_once_and_no_noise_twice"),
    ("evaluate.py", "0] * draws.maskable[draws.n:] / k", "0] / k",  # the ELBO
     "test_evaluate.py::test_the_elbo_of_an_exact_model_is_its_log_likelihood"),
    ("sample.py", "1 - 1.001 * (-g).exp()", "1 - 0.5 * (-g).exp()",  # noise that could win
     "test_sample.py::test_noise_that_is_not_computed_could_not_have_won[9000-4.0-1.0]"),
    ("data.py", "        _check_out(out, overwrite)  # again", "        pass  # again",
     "test_bad_input.py::"
     "test_of_two_writers_of_one_shard_folder_the_slower_is_refused_unless_it_overwrites"
     "[False-faster]"),
    ("common.py", "        fsync(temporary)", "        pass",  # a name before its contents
     "test_common.py::test_the_file_is_on_disk_before_it_gets_its_name_and_the_name_after"),
    ("checkpoint.py", "module.load_state_dict(state.pop(name))", "state.pop(name)",
     "test_train.py::test_a_run_stopped_at_any_step_and_resumed_ends_bit_equal[3]"),
    ("train.py", "if not (torch.isfinite(loss) and torch.isfinite(norm)):", "if False:",
     "test_train.py::test_a_gradient_that_is_not_finite_moves_no_parameter"),
    ("train.py", "        dist.all_reduce(total)", "        pass",  # an all-reduce
     "test_train.py::test_one_rank_two_ranks_and_two_micro_batches_train_the_same[one and ninety]"),
    ("checkpoint.py", 'row["step"] <= up_to_step]', 'row["step"] <= up_to_step + 1]',
     "test_checkpoint.py::test_metrics_survive_a_torn_last_line_and_forget_later_steps"),
    ("checkpoint.py", "fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
     "test_bad_input.py::"
     "test_of_two_starts_at_the_same_moment_one_runs_and_the_other_is_told_in_one_line"),
    ("common.py", "                child.kill()", "                pass",  # they ignore all else
     "test_interruption.py::"
     "test_every_way_out_ends_within_ten_seconds_and_leaves_no_process[bug between workers]"),
    ("common.py", "signal.signal(number, signal.SIG_IGN)", "signal.signal(number, signal.SIG_DFL)",
     "test_interruption.py::"
     "test_every_way_out_ends_within_ten_seconds_and_leaves_no_process[SIGTERM]"),
)


@dataclasses.dataclass(frozen=True)
class Config:
    only: str = ""  # a file: its breaks alone


def copy_repository(folder):
    """All that the tests read, without caches: a broken line may be as long as the old one."""
    skip = shutil.ignore_patterns(".*", "runs", "corpora", "shared", "__pycache__", "*.tmp")
    return shutil.copytree(common.SOURCE, folder / "repository", ignore=skip)


def run_tests(repository, *tests):
    """pytest's status: 0 where all pass, 1 where one fails, more where they could not run."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("MARK_ROOT", None)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider",
         *(f"tests/{test}" for test in tests)], cwd=repository, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode


def try_break(repository, file, old, new, test):
    """Break one line of the copy, run its test, mend the line again -> the record of it."""
    path = repository / file
    began = time.time()
    whole = path.read_text("utf-8")
    assert whole.count(old) == 1, f"{file}: {old!r} occurs {whole.count(old)} times"
    path.write_text(whole.replace(old, new), "utf-8")
    status = run_tests(repository, test)
    path.write_text(whole, "utf-8")
    verdict = "red" if status == 1 else f"NOT NOTICED ({status})"
    common.log(f"{verdict:>5}  {file}: {old.strip()}  ->  {new.strip()}\n       {test}")
    return {"file": file, "old": old.strip(), "new": new.strip(), "test": test,
            "noticed": status == 1, "seconds": time.time() - began}


def main(cfg):
    env = common.banner("mutations.py", cfg)
    chosen = [b for b in BREAKS if cfg.only in ("", b[0])]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        repository = copy_repository(Path(folder))
        status = run_tests(repository, *dict.fromkeys(test for *_, test in chosen))
        if status:
            raise common.UserError(f"the tests do not all pass as it is (pytest: {status})")
        common.log(f"{len(chosen)} tests pass as it is\n")
        for file, old, new, test in common.progress(chosen, desc="breaks"):
            rows.append(try_break(repository, file, old, new, test))
    noticed = sum(row["noticed"] for row in rows)
    result = {"breaks": rows, "noticed": noticed}
    common.save_result(common.ROOT / "runs/mutations/result.json", result, cfg, env)
    common.log(f"\n{noticed} of {len(rows)} breaks were noticed")
    return result


if __name__ == "__main__":
    common.run_cli(Config, main)
