"""What a step's metrics become: lines of JSON on disk, a progress bar, a loss curve."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from meshpar.mesh.distributed import is_first
from meshpar.mesh.topology import peak_bf16
from meshpar.module import Model
from meshpar.train.trainer import Hook


def flops_per_token(model: Model, seq: int) -> float | None:
    """FLOPs that training needs a token, forward and backward: 6 a parameter in matrix products, 4 for one that is not
    trained, and 12 layers * heads * head_dim * seq for attention; None for a model whose config does not name these
    sizes.

    Rematerialisation does not count. A lookup table counts only when it is the output head too. Source: PaLM (Chowdhery
    et al. 2022), appendix B.
    """
    config = model.config
    if not all(hasattr(config, name) for name in ("padded_vocab", "embed", "layers", "heads", "head_size")):
        return None
    table = 0 if getattr(config, "tied", False) else config.padded_vocab * config.embed
    frozen = sum(leaf.size for leaf in jax.tree.leaves(model.untrained(model.shapes)))
    products = 6.0 * (model.size - table) - 2.0 * max(0, frozen - table)
    return products + 12.0 * config.layers * config.heads * config.head_size * seq


def mfu(flops: float | None, seconds: float, devices: Sequence[jax.Device]) -> float | None:
    """Share of the devices' bf16 peak that `flops` in `seconds` are; None where either is not known."""
    peak = peak_bf16(devices[0].device_kind)
    return None if peak is None or flops is None else flops / seconds / (peak * len(devices))


def as_json(values: Mapping[str, Any], indent: int | None = None) -> str:
    """A JSON object; numbers that JSON does not have (inf, nan: a run that diverged) become null."""
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps(known, indent=indent, allow_nan=False)


def replace_text(path: Path, text: str) -> None:
    """Writes a file, whole or not at all."""
    temporary = path.with_name(f"{path.name}.writing")
    temporary.write_text(text)
    temporary.rename(path)


class JsonLines:
    """Appends one JSON object a line, see `as_json`; each is on disk when `write` returns. Of several processes the
    first alone writes.
    """

    def __init__(self, path: Path):
        self.path = path

    def write(self, values: Mapping[str, Any]) -> None:
        if not is_first():
            return
        with self.path.open("a") as file:
            file.write(as_json(values) + "\n")

    def rewind(self, step: int, *, drop: Callable[[dict[str, Any]], bool] = lambda line: False) -> list[dict[str, Any]]:
        """Drops the lines of later steps, and what `drop` says, which a resumed run writes again; returns those that
        stay.
        """
        if not is_first():
            return []
        text = self.path.read_text() if self.path.exists() else ""
        whole = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        kept = [values for values in whole if values["step"] <= step and not drop(values)]
        replace_text(self.path, "".join(as_json(values) + "\n" for values in kept))
        return kept


class Progress:
    """A bar with loss, tokens/s, MFU and time left; without a terminal a line every `every` seconds instead. Of several
    processes only the first prints.
    """

    def __init__(
        self,
        *,
        steps: int,
        start: int,
        tokens: int,
        flops: float | None,
        devices: Sequence[jax.Device],
        every: float = 15.0,
    ):
        """`tokens` and `flops` are of one step."""
        from rich.console import Console

        self.console = Console(quiet=not is_first())
        self._steps, self._tokens, self._flops, self._devices, self._every = steps, tokens, flops, devices, every
        self._printed_at = 0.0
        self._recent: list[float] = []
        self._bar: Any = None
        if self.console.is_terminal and is_first():
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn("step"),
                progress.MofNCompleteColumn(),
                progress.BarColumn(bar_width=24),
                progress.TextColumn("{task.fields[text]}"),
                progress.TimeRemainingColumn(),
                console=self.console,
            )
            self._task = self._bar.add_task("train", total=steps, completed=start, text="compiling")

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def hook(self) -> Hook:
        """The hook that feeds the bar."""
        return Hook(on_metrics=self._on_metrics)

    def log(self, text: str) -> None:
        """Prints a line above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _on_metrics(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        self._recent = [*self._recent[-9:], seconds]
        pace = sorted(self._recent)[len(self._recent) // 2]
        share = mfu(self._flops, pace, self._devices)
        utilisation = "n/a" if share is None else f"{share:.1%}"
        text = f"loss {metrics['loss']:.4f}  {self._tokens / pace:,.0f} tokens/s  MFU {utilisation}"
        if self._bar:
            self._bar.update(self._task, completed=step, text=text)
        elif time.monotonic() - self._printed_at >= self._every or step == self._steps:
            self._printed_at = time.monotonic()
            left = (self._steps - step) * pace
            self.log(f"step {step}/{self._steps}  {text}  {left:.0f} s left")


def plot_losses(
    path: Path, train: Mapping[int, float], validation: Mapping[int, float], baselines: Mapping[str, float]
) -> None:
    """Draws loss in nats a token against steps, the validation losses as dots, the baselines as dashed lines, into a
    PNG.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(train), list(train.values()), linewidth=1, label="training")
    if validation:
        axes.plot(list(validation), list(validation.values()), "o-", label="validation")
    for number, (name, loss) in enumerate(baselines.items()):
        axes.axhline(loss, linestyle="--", linewidth=1, color=f"C{number + 2}", label=f"{name} model, validation")
    axes.set_xlabel("steps")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
