"""`dpfl schema`: a draft of what everybody may know of the sites' columns."""

import json
from pathlib import Path
from typing import Annotated

import typer

from dpfl.cli import app
from dpfl.cli.problem import AsJson
from dpfl.errors import BadInput

_EPILOG = """[bold]Examples[/bold]

dpfl schema hospitals/ --target disease --out schema.toml

dpfl schema hospitals/a.csv --range age=20:90 --values pain=1,2,3,4 --values "disease=0,1|2|3|4"

dpfl schema hospitals/ --public published.csv --out schema.toml
"""


@app.command(epilog=_EPILOG, no_args_is_help=True)
def schema(
    files: Annotated[list[Path], typer.Argument(metavar="FILE…", help="Sites' files, or a folder of them.")],
    public: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file that is public: its ranges and vocabularies may stand in the schema."
        ),
    ] = None,
    target: Annotated[
        str | None, typer.Option(metavar="NAME", help="The column to be predicted; found by its name if it is usual.")
    ] = None,
    range_: Annotated[
        list[str] | None, typer.Option("--range", metavar="NAME=LOW:HIGH", help="The public range of a column.")
    ] = None,
    values: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=A,B,…", help="The public vocabulary of a column; A|B are one value."),
    ] = None,
    names_only: Annotated[
        bool, typer.Option("--names-only", help="Read the column names alone, and no record to see what is a number.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the draft here instead of printing it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draft a schema.toml: the public ranges and vocabularies by which sites' values are read.

    No minimum, maximum or vocabulary of private records is written: what nobody said stays "?", to be filled in.
    """
    from dpfl.federation.drafts import draft
    from dpfl.federation.site_files import site_files

    if out is not None and out.exists():
        raise BadInput(f"out must not exist yet, but {str(out)!r} does; name another file, or move that one away")
    made = draft(
        site_files(files).values(),
        public=public,
        target=target,
        ranges=dict(_range(text) for text in range_ or []),
        values=dict(_vocabulary(text) for text in values or []),
        names_only=names_only,
    )
    if out is not None:
        try:
            out.write_text(made.to_toml(), encoding="utf-8")
        except OSError as problem:
            raise BadInput(f"out must be a file to write, was {str(out)!r} ({problem.strerror}); check it") from None
    if as_json:
        said = {"out": None if out is None else str(out), "target": made.target, "columns": made.columns}
        print(json.dumps(said | {"blanks": made.blanks, "toml": made.to_toml()}, ensure_ascii=False))
        return
    print(made.to_toml() if out is None else f"{out}: a draft for {len(made.columns)} columns")
    print("\n".join(f"# {line}" if out is None else line for line in _next(made.blanks, out)))


def _next(blanks: list[str], out: Path | None) -> list[str]:
    """Say what to do with the draft."""
    file = str(out or "schema.toml")
    write = [] if out else [f"Write this to {file} (--out {file})"]
    shown = ", ".join(blanks[:3]) + (" …" if len(blanks) > 3 else "")
    fill = [f'Fill in {len(blanks)} × "?" ({shown}) with what everybody may know'] if blanks else []
    fill += ["Take the # off `missing = …` wherever rows may lack a value: other rows that lack one count as zero"]
    use = [f"Give {file} to every site, then: dpfl run fedsgd-dpc --sites FOLDER --schema {file} --epsilon 1"]
    return ["Next:", *(f"{number}. {step}" for number, step in enumerate(write + fill + use, 1))]


def _range(text: str) -> tuple[str, tuple[float, float]]:
    name, _, limits = text.rpartition("=")
    low, colon, high = limits.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        found = (0.0, 0.0)
    if not (name and colon and found[0] < found[1]) or found[1] - found[0] == float("inf"):
        raise BadInput(f"--range must be NAME=LOW:HIGH with LOW below HIGH, was {text!r}; write for example age=20:90")
    return name, found


def _vocabulary(text: str) -> tuple[str, list[str | list[str]]]:
    name, _, listed = text.partition("=")
    if not (name and listed):
        raise BadInput(f"--values must be NAME=A,B,…, was {text!r}; write for example sex=f,m")
    return name, [group.split("|") if "|" in group else group for group in listed.split(",")]
