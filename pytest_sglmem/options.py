"""What a user can set, as data: one row an option, and the settings that a session runs with.

`--sglmem-x` on the command line wins over `sglmem_x` in the ini file; a default is what neither said. A wrong value is
a `pytest.UsageError` that echoes the value, says where it came from and what would be right. Nothing here imports torch
or looks at the machine: whether a device exists is asked where a world starts. Records are named tuples because every
session loads this: a dataclass takes six times as long to make.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import pytest


class Option(NamedTuple):
    """One option. `parse` turns text into the value and raises ValueError with what would be right."""

    name: str
    metavar: str | None
    meaning: str
    parse: Callable[[str], object]
    default: object = None
    repeatable: bool = False
    shown_default: str | None = None
    is_path: bool = False

    @property
    def flag(self) -> str:
        """The option as on the command line: `--sglmem-world`."""
        return f"--sglmem-{self.name}"

    @property
    def dest(self) -> str:
        """Its name in the ini file and on `config.option`: `sglmem_world`."""
        return f"sglmem_{self.name.replace('-', '_')}"


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise ValueError(f"a whole number of at least {least}")
        return value

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError("a number of seconds above 0, such as 120")
    return value


def _percent(text: str) -> float:
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("a percentage of at least 0, such as 0 or 2.5%")
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"one of {', '.join(words)}")
        return text

    return parse


def _ending(*endings: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not text.endswith(endings):
            raise ValueError(f"a file name that ends in {' or '.join(endings)}")
        return text

    return parse


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError("not empty")
    return text


def _flag(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError("true or false")
    return words[text.lower()]


OPTIONS: tuple[Option, ...] = (
    Option("world", "N", "ranks of a world where the test does not say", _whole(1), 2),
    Option(
        "device",
        "auto|cuda|emulated",
        "where ranks allocate; auto: cuda where there is one, else emulated",
        _one_of("auto", "cuda", "emulated"),
        "auto",
    ),
    Option(
        "launcher",
        "local|torchrun",
        "who starts the ranks (torchrun: it started pytest, one process a rank; rank 0 drives)",
        _one_of("local", "torchrun"),
        "local",
    ),
    Option("timeout", "SECONDS", "limit of one call into the ranks", _seconds, 120.0, shown_default="120"),
    Option("inject", "FAULT", "run every selected test under this fault (repeatable)", _text, repeatable=True),
    Option("prove", None, "after the session, run each passed test again under every fault that can fire in it", _flag),
    Option("prove-limit", "N", "at most N proof runs; the rest is said to be left out", _whole(1)),
    Option(
        "ipc-audit",
        "off|warn|error",
        "audit the CUDA IPC contract in every test that runs a world",
        _one_of("off", "warn", "error"),
        "warn",
    ),
    Option(
        "seed", "N", "the one source of chance (geometries, probabilities, the ranks' random numbers)", _whole(0), 0
    ),
    Option(
        "report",
        "FILE",
        "write the session's report: .json, or .html (needs the extra html) (repeatable)",
        _ending(".json", ".html"),
        repeatable=True,
        is_path=True,
    ),
    Option("github-summary", None, "append the summary to $GITHUB_STEP_SUMMARY, where a workflow sets it", _flag),
    Option(
        "baseline",
        "FILE",
        "fail where a settled size or an object count grew since this .json",
        _ending(".json"),
        is_path=True,
    ),
    Option(
        "baseline-tolerance", "PERCENT", "how much more than the baseline passes", _percent, 0.0, shown_default="0%"
    ),
    Option("artifacts", "DIR", "where failures leave snapshots, graphs, stacks", _text, ".sglmem", is_path=True),
)
# option -> the one without which it has no effect. On the command line it is a mistake; an ini file may have it ready.
NEEDS = (("prove-limit", "prove"), ("baseline-tolerance", "baseline"))
INI_ONLY: tuple[tuple[str, str], ...] = (
    ("sglmem_ignore_sites", "allocation sites that no verdict blames: patterns, one a line; what they hide is counted"),
    ("sglmem_ignore_types", "types that gc_tracked does not count: patterns, one a line; what they hide is counted"),
)


class Settings(NamedTuple):
    """What the session runs with. Times in seconds, `baseline_tolerance` in percent."""

    world: int
    device: str
    launcher: str
    timeout: float
    inject: tuple[str, ...]
    prove: bool
    prove_limit: int | None
    ipc_audit: str
    seed: int
    report: tuple[str, ...]
    github_summary: bool
    baseline: str | None
    baseline_tolerance: float
    artifacts: str
    ignore_sites: tuple[str, ...]
    ignore_types: tuple[str, ...]
    origins: dict[str, str]


def add_options(parser: pytest.Parser) -> None:
    """Declare every option and ini name. Defaults are None so that the ini file can speak."""
    group = parser.getgroup("sglmem", "memory of multi-GPU PyTorch programs (pytest-sglmem)")
    for option in OPTIONS:
        shown = option.shown_default or option.default
        text = option.meaning + (f" (default: {shown})" if shown is not None else "")
        escaped = text.replace("%", "%%")  # argparse formats help texts
        if option.metavar is None:
            group.addoption(option.flag, dest=option.dest, action="store_true", default=None, help=escaped)
        else:
            action = "append" if option.repeatable else "store"
            group.addoption(
                option.flag, dest=option.dest, action=action, default=None, metavar=option.metavar, help=escaped
            )
        kind: Literal["linelist", "string"] = "linelist" if option.repeatable else "string"
        parser.addini(option.dest, text, type=kind, default=None)
    group.addoption(
        "--sglmem-faults", dest="sglmem_faults", action="store_true", help="list the fault points and actions, and exit"
    )
    for name, text in INI_ONLY:
        parser.addini(name, text, type="linelist", default=[])


def settings(config: pytest.Config) -> Settings:
    """The session's settings, every value checked. Raises pytest.UsageError."""
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    for option in OPTIONS:
        key = option.dest.removeprefix("sglmem_")
        values[key], origins[key] = _value(config, option)
    for name, _ in INI_ONLY:
        values[name.removeprefix("sglmem_")] = tuple(_patterns(config, name))
    for flag in ("prove", "github_summary"):
        values[flag] = bool(values[flag])
    _refuse_idle(values, origins)
    return Settings(**values, origins=origins)  # type: ignore[arg-type]


def _refuse_idle(values: Mapping[str, object], origins: Mapping[str, str]) -> None:
    """An option of the command line that could have no effect, or not the one that its name says, is an error."""
    for name, needed in NEEDS:
        key = name.replace("-", "_")
        if "command line" in origins[key] and not values[needed]:
            raise pytest.UsageError(f"{origins[key]} has no effect without --sglmem-{needed}")
    if values["prove"] and values["inject"]:
        raise pytest.UsageError(
            f"{origins['inject']} would strike the clean run too, of which {origins['prove']} wants to know that it "
            "passes; use one of them"
        )


def _value(config: pytest.Config, option: Option) -> tuple[object, str]:
    given, origin = config.getoption(option.dest), f"{option.flag} on the command line"
    if given is None:
        given, origin = config.getini(option.dest), f"{option.dest} in {config.inipath or 'the ini file'}"
    if given is None or given == []:
        given, origin = option.default, "the default"
    if given is None or isinstance(given, (bool, int, float)):
        return (() if option.repeatable else given), origin
    texts = given if option.repeatable else [given]
    values = tuple(_parsed(option, str(text), origin) for text in texts)
    if option.is_path:
        # As pytest's own: what is typed counts from where it is typed. A test may leave the working directory.
        folder = config.invocation_params.dir if "command line" in origin else config.rootpath
        values = tuple(str(folder / str(value)) for value in values)
    return (values if option.repeatable else values[0]), origin


def _parsed(option: Option, text: str, origin: str) -> object:
    try:
        return option.parse(text)
    except ValueError as right:
        raise pytest.UsageError(f"{origin} is {text!r}, should be {right}") from None


def _patterns(config: pytest.Config, name: str) -> Sequence[str]:
    patterns = config.getini(name)
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise pytest.UsageError(
                f"{name} in {config.inipath or 'the ini file'} has {pattern!r}, should be a regular expression: {error}"
            ) from None
    return patterns
