"""`dpfl reproduce`: the papers' tables and figures, with ours beside them."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfl.cli import app
from dpfl.errors import BadInput, require_one_of

if TYPE_CHECKING:
    from dpfl.experiments.experiment import Experiment, Scale
    from dpfl.experiments.sweep import Job

_EPILOG = """[bold]Examples[/bold]

dpfl reproduce --list

dpfl reproduce dp-fedavg-table-3

dpfl reproduce udp-crd --scale paper --device cuda

dpfl reproduce all --out runs/smoke

NAME is an experiment, a paper for all of its experiments, [bold]all[/bold], or a TOML file of your own. Finished cells
are kept in --out: the same command goes on where it was interrupted, and trains nothing twice.
"""


@app.command(epilog=_EPILOG, no_args_is_help=True)
def reproduce(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME…", help="What to reproduce.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List all experiments with what they would cost.")] = False,
    scale: Annotated[
        str, typer.Option(metavar="smoke|paper", help="smoke: a small version, in a minute. paper: all of it.")
    ] = "smoke",
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to train.")] = "cpu",
    processes: Annotated[
        int | None, typer.Option(metavar="P", help="Trainings at a time; one a core, or 8 on a GPU, if left out.")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option(metavar="T", help="Trainings of each cell; as many as the paper's if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Of the first repetition.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables, plots and finished cells; runs/reproduce-SCALE if left out.")
    ] = None,
    pages: Annotated[
        bool, typer.Option("--pages", help="Write a page for each paper from what --out holds, and train nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Repeat tables and figures of the five papers, next to what they become at true ε."""
    from dpfl.experiments.pages import what_is_private
    from dpfl.experiments.reading import find
    from dpfl.experiments.run import reproduce as carry_out
    from dpfl.experiments.run import write_pages
    from dpfl.experiments.words import markdown

    require_one_of("scale", scale, ("smoke", "paper"))
    require_one_of("device", device, ("cpu", "cuda"))
    if processes is not None and processes < 1:
        raise BadInput(f"processes must be at least 1, was {processes}; leave it out for one a core")
    chosen: Scale = "paper" if scale == "paper" else "smoke"
    if list_:
        listed = _listed(find(names or ["all"], chosen, repetitions=repetitions), device, seed)
        print(json.dumps({"experiments": listed}, ensure_ascii=False) if as_json else _as_text(listed, scale, device))
        return
    if not names:
        raise BadInput("name must be an experiment, a paper or all, was left out; see dpfl reproduce --list")
    folder, found = out or Path("runs", f"reproduce-{scale}"), find(names, chosen, repetitions=repetitions)
    if pages:
        paths = [str(path) for path in write_pages(found, folder, seed=seed)]
        print(json.dumps({"pages": paths}) if as_json else "\n".join(paths))
        return
    with _Progress() as progress:
        results = carry_out(found, folder, seed=seed, device=device, processes=processes, on_done=progress.show)
    plain = [one.to_dict() for one in results]
    if as_json:
        print(json.dumps(plain[0] if len(plain) == 1 else {"experiments": plain}, ensure_ascii=False))
        return
    print("\n".join(markdown(one) for one in results))
    print(what_is_private(results))
    print(f"tables and plots  {folder}")


def _listed(found: "list[Experiment]", device: str, seed: int) -> list[dict[str, Any]]:
    from dpfl.experiments.cost import seconds
    from dpfl.experiments.sweep import jobs_of

    lines = []
    for one in found:
        cells = [job.cell for job in jobs_of(one, seed)]
        lines.append(
            {
                "name": one.name, "shows": one.shows, "title": one.title, "cells": len(cells),
                "repetitions": one.repetitions, "seconds": round(seconds(cells, device), 1),
            }
        )  # fmt: skip
    return lines


def _as_text(listed: list[dict[str, Any]], scale: str, device: str) -> str:
    width = max(len(one["name"]) for one in listed)
    lines = [
        f"{one['name']:<{width}}  {_duration(one['seconds']):>8}  {one['cells']:>4} cells × {one['repetitions']:>2}  "
        f" {one['shows']}: {one['title']}"
        for one in listed
    ]
    total = _duration(sum(one["seconds"] for one in listed))
    return "\n".join([*lines, "", f"together about {total} on this machine's {device}, at the {scale} scale"])


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class _Progress:
    """How many cells are done: a live bar on a terminal, a line a cell elsewhere; on stderr."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("cells"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )  # fmt: skip
        self.bar = Progress(*columns, console=Console(file=sys.stderr))
        self.task = self.bar.add_task("", total=None, note="")
        self.done = 0

    def __enter__(self) -> "_Progress":
        if self.bar.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, problem: type[BaseException] | None, *_: object) -> None:
        if self.bar.console.is_terminal:
            self.bar.stop()
        if problem is KeyboardInterrupt:
            print(f"dpfl: interrupted; {self.done} cells are kept, the same command goes on with the rest",
                  file=sys.stderr)  # fmt: skip
            raise typer.Exit(130)

    def show(self, job: "Job", record: dict[str, Any], done: int, total: int) -> None:
        """Tell of a finished cell."""
        self.done = done
        note = f"{job.experiment}: {job.where} ({record['seconds']:.1f} s)"
        if self.bar.console.is_terminal:
            self.bar.update(self.task, completed=done, total=total, note=note)
        else:
            print(f"{done} of {total}  {note}", file=sys.stderr)
