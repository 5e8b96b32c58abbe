"""What a section of RESULTS.md is made of: result files, commands, tables, figures, text.

Run:      not a script; report.py writes the page.

A section says what was measured, with which command, at which commit, and over what its ± is taken.
Its numbers come from result files. The command is made from the settings in the file: it is the one
that has them today, which is not always the one that was typed then.

Symbols:  none.
Differs from the paper: nothing.
"""
import dataclasses
import re
import textwrap
from typing import NamedTuple

import common

WIDTH = 110  # of lines of text; tables and links may be longer


# ---- result files --------------------------------------------------------------------------------


class Result(NamedTuple):
    """A file of results/."""
    name: str            # such as "certify/small"
    metrics: dict
    settings: dict       # of the run; empty in a file of a script that had none
    about: dict          # everything else: commit, versions, hardware

    def path(self):
        return f"results/{self.name}.json"

    def embedded_text(self):
        """What the setting "embedded" named when the file was written."""
        if "script" in self.about:  # files have this since the text was changed
            return "tiny Shakespeare (assets/)"
        return "the documentation that comes with Python (`embedded` at that commit)"


def load_result(name):
    """The Result of results/<name>.json. Raises UserError."""
    path = common.ROOT / "results" / f"{name}.json"
    if not path.is_file():
        raise common.UserError(f"no {path}: publish that run first, see experiments/publish.py")
    found = common.read_json(path, "metrics", "commit")
    about = {key: value for key, value in found.items() if key not in ("metrics", "config")}
    return Result(name, found["metrics"], found.get("config") or {}, about)


def origin(result):
    """Commit and machine of a Result, as text."""
    about = result.about
    machine = about["hardware"]
    processors = ", ".join(machine["gpus"]) or machine["cpu"]
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return (f"commit `{about['commit']}`, torch {about['torch']}, {processors}, "
            f"{machine['cores']} cores, {threads}")


def provenance(*results):
    """The files of some Results with their origins, as a line of Markdown."""
    by_origin = {}
    for result in results:
        by_origin.setdefault(origin(result), []).append(result)
    parts = []
    for made, together in by_origin.items():
        links = [f"[{result.path()}]({result.path()})" for result in together]
        parts.append(f"{', '.join(links)}: {made}")
    return "; ".join(parts)


# ---- commands ------------------------------------------------------------------------------------

UNSHOWN = ("resume", "overwrite", "device", "dirty")  # settings that change no number


def command(program, config_class, settings, presets=None):
    """The command line, today, of a run with these settings: a flag for each that is not a default.

    program: such as "train.py" or "-m experiments.bench". Settings that `config_class` does not
    have any more are left out, so a file of an old script may need its own words (see the callers).
    """
    default = config_class()
    words = ["python", *program.split()]
    if presets and settings.get("preset", default.preset) != default.preset:
        default = common.from_preset(config_class, presets, settings["preset"])
        words += ["--preset", default.preset]
    for field in dataclasses.fields(config_class):
        if field.name in settings and field.name not in UNSHOWN:
            value = settings[field.name]
            if value != common.plain(getattr(default, field.name)):
                words += flag(field.name, value)
    return wrap_words(words)


def flag(name, value):
    """A setting as words of a command line."""
    spelled = name.replace("_", "-")
    if value is True:
        return [f"--{spelled}"]
    if value is False:
        return [f"--no-{spelled}"]
    if isinstance(value, list):
        return [f"--{spelled}", *shorten_paths(map(str, value))]
    return [f"--{spelled}", f"{value}"]


def shorten_paths(paths):
    """Neighbours that differ by a number alone, such as a_1.txt a_2.txt, as one: a_{1..2}.txt."""
    runs = []  # [before the number, first, last, after it], or [path]
    for path in paths:
        numbered = re.fullmatch(r"([^,=]*?)(\d+)(\.\w+)", path)
        if numbered is None:
            runs.append([path])
            continue
        before, number, after = numbered[1], int(numbered[2]), numbered[3]
        if runs and runs[-1][0] == before and runs[-1][2:] == [number - 1, after]:
            runs[-1][2] = number
        else:
            runs.append([before, number, number, after])
    words = []
    for run in runs:
        if len(run) == 1:
            words += run
        elif run[1] == run[2]:
            words.append(f"{run[0]}{run[1]}{run[3]}")
        else:
            words.append(f"{run[0]}{{{run[1]}..{run[2]}}}{run[3]}")
    return words


def wrap_words(words):
    """A command line in lines of WIDTH, with a backslash at the end of all but the last."""
    lines = [words[0]]
    for word in words[1:]:
        if len(lines[-1]) + len(word) + 3 > WIDTH:
            lines[-1] += " \\"
            lines.append(f"    {word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def publish_command(run, name=""):
    """How the result of runs/<run> gets into results/."""
    words = f"python -m experiments.publish runs/{run}"
    if name:
        words += f" --name {name}"
    return words


# ---- sections ------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A heading of RESULTS.md and what stands below it."""
    heading: str
    says: str                  # what was measured and what it shows: two to six sentences
    commands: tuple | str      # that make it; or the heading of another section of the same run
    source: str                # `provenance` of its files
    counted: str               # n, and what ± is over
    shown: tuple[str, ...]     # tables, legends and figures, in Markdown


def anchor(heading):
    """The name by which a link reaches a heading: [text](RESULTS.md#name)."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.replace(" ", "-")


def link(heading):
    """A link from the README to a heading of RESULTS.md."""
    return f"[{heading}](RESULTS.md#{anchor(heading)})"


def wrapped(text):
    """Paragraphs in lines of WIDTH. Code and the text of a link stay in one line."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        words = " ".join(paragraph.split())
        joined = re.sub(r"`[^`]*`|\[[^\]]*\]\(", lambda part: part[0].replace(" ", "\0"), words)
        filled = textwrap.fill(joined, WIDTH, break_long_words=False, break_on_hyphens=False)
        paragraphs.append(filled.replace("\0", " "))
    return "\n\n".join(paragraphs)


def render_section(section):
    """The Markdown of a Section."""
    if isinstance(section.commands, str):
        made = f"*Made by* the command of [{section.commands}](#{anchor(section.commands)})."
    else:
        lines = "\n".join(section.commands)
        made = f"```bash\n{lines}\n```"
    parts = [f"### {section.heading}", wrapped(section.says), made,
             wrapped(f"*From* {section.source}."), wrapped(f"*n and ±:* {section.counted}"),
             *section.shown]
    return "\n\n".join(parts)


def titled(title, table):
    """A table below its title."""
    return f"*{title}*\n\n{table}"


def folded(title, table):
    """A table that opens on a click."""
    return f"<details><summary>{title}</summary>\n\n{table}\n\n</details>"


def picture(name, says):
    """figures/<name>.png with what it says, or nothing where it has not been drawn."""
    path = common.ROOT / "figures" / f"{name}.png"
    if not path.is_file():
        return ()
    return (f"![{says}](figures/{name}.png)\n\n*{says}*",)


def lowest_to_highest(values, digits=4, sign=""):
    """The range of some numbers, as text."""
    values = list(values)
    return f"{min(values):{sign}.{digits}f} to {max(values):{sign}.{digits}f}"


def listed(values, digits=4, sign=""):
    """{name: number} as text: 0.1 (a), 0.2 (b)."""
    return ", ".join(f"{value:{sign}.{digits}f} ({name})" for name, value in values.items())
