"""`kvreg`: check a registration's snapshot, plan one before there is an engine, show the rules, run the main job once.

vLLM and LMCache are never imported here: a snapshot is checked on any machine that has torch, and only `preflight` asks
the engine border for vLLM. torch itself is imported by the commands, not by this module, so that `--help` and `--version`
answer at once.
"""

import json
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from stages.errors import KVRegError, Reason, SnapshotInvalid

REJECTED = 1
UNUSABLE = 2

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Registers a vLLM worker's KV caches with LMCache: every layer proven, or refused by name.",
)


def main() -> None:
    """The command `kvreg`. What a user can set right ends in one line and an exit status, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a name in a file is any text, a terminal's encoding may not be
    try:
        app()
    except KVRegError as error:
        print(f"kvreg: {error}", file=sys.stderr)
        sys.exit(UNUSABLE)


def _version(asked: bool) -> None:
    if asked:
        try:
            print(f"kvreg {version('kvreg')}")
        except PackageNotFoundError:
            print("kvreg, from a source tree that is not installed")
        raise typer.Exit


@app.callback()
def kvreg(
    asked: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """What all commands share."""


@app.command()
def check(
    snapshots: Annotated[list[str], typer.Argument(help="Files that a registration wrote, or that you wrote by hand.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document a line, one for each snapshot.")] = False,
) -> None:
    """Replay registrations from their snapshots.

    Shows what would be registered and how, or who is refused, why, and the way out. No device, no engine and no server
    is needed. Exit status: 0 all accepted, 1 any rejected, 2 a file is not a snapshot.
    """
    from orchestrator import screen
    from orchestrator.check import Accepted, document
    from orchestrator.check import check as replay
    from orchestrator.snapshot import read

    offers, unusable = [], []
    for path in snapshots:
        try:
            offers.append(read(path))
        except SnapshotInvalid as error:
            unusable.append(screen.plain(str(error)))
    # Answers to some files would read like answers to all: nothing is printed beside what is wrong with the input.
    if unusable:
        print("\n".join(unusable), file=sys.stderr)
        raise typer.Exit(UNUSABLE)
    answers = [replay(offer) for offer in offers]
    if as_json:
        for path, answer in zip(snapshots, answers, strict=True):
            print(json.dumps(document(path, answer)))
    else:
        console = screen.console()
        for path, answer in zip(snapshots, answers, strict=True):
            console.print(screen.verdict(path, answer))
        if len(answers) > 1:
            console.print(screen.tally(answers))
    raise typer.Exit(0 if all(isinstance(answer, Accepted) for answer in answers) else REJECTED)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def preflight(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model's folder, or its config.json. It comes first.")],
    assume: Annotated[str | None, typer.Option(help="Plan for another machine: cuda-sm90, cuda-sm100, rocm-gfx942 or cpu.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="For a pull request's comment.")] = False,
    snapshot: Annotated[str | None, typer.Option(help="Write what would be registered, for kvreg check.")] = None,
) -> None:
    """Plan a model's registration by the installed vLLM, with no weights, no device and no engine.

    All other flags are vLLM's own (--tensor-parallel-size, --attention-backend, --block-size, ...) and mean what they mean to
    `vllm serve`. Exit status: 0 accepted, 1 rejected, 2 no plan, and one line says why.
    """
    from orchestrator import screen
    from orchestrator.engine.preflight.plan import plan
    from orchestrator.preflight import answer, places
    from orchestrator.preflight import as_json as json_of
    from orchestrator.preflight_screen import markdown
    from orchestrator.preflight_screen import preflight as shown
    from orchestrator.snapshot import write

    told = answer(model, plan(model, context.args, assume))
    if snapshot is not None:
        for path, offer in places(told, snapshot):
            try:
                write(offer, path)
            except OSError as error:
                print(f"kvreg: no snapshot: {error}", file=sys.stderr)
                raise typer.Exit(UNUSABLE) from error
    if as_json:
        print(json.dumps(json_of(told)))
    elif as_markdown:
        print(markdown(told), end="")
    else:
        screen.console().print(shown(told))
    raise typer.Exit(0 if told.accepted else REJECTED)


@app.command()
def rules(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document: rules in order, reasons with their hints.")] = False,
) -> None:
    """Show the rules in order, and every reason with its hint."""
    from orchestrator import screen
    from stages.rules import RULES

    if as_json:
        print(
            json.dumps(
                {
                    "rules": [{"rule": rule.name, "summary": rule.summary} for rule in RULES],
                    "reasons": [{"reason": reason, "hint": screen.blank_hint(reason)} for reason in Reason],
                }
            )
        )
        return
    console = screen.console()
    console.print(screen.rules(RULES), "", screen.reasons(), sep="\n")


@app.command()
def explain(
    reason: Annotated[Reason, typer.Argument(metavar="REASON", help="As an alert, a metric or an error names it: width, chunk_size, …")],
) -> None:
    """Print what a reason for a refusal means, and the way out."""
    from orchestrator.explain import explain as explained

    print(explained(reason))


@app.command()
def demo(
    snapshot: Annotated[str | None, typer.Option(help="Instead, the registration in this file: a block of each group.")] = None,
) -> None:
    """Register four workers, move their blocks and verify every byte.

    Uses memory of this machine only; no GPU, no engine and no server is needed. Exit status 0 only if every byte is back.
    """
    import torch

    from orchestrator import screen
    from orchestrator.portal import run_sync

    torch.set_num_threads(1)  # on a busy machine threads that wait for each other take longer than one
    if snapshot is not None:
        raise typer.Exit(_demo_of(snapshot))
    from orchestrator.demo import demonstrate
    from orchestrator.demo_screen import demonstration

    shown = run_sync(demonstrate)
    screen.console().print(demonstration(shown))
    raise typer.Exit(0 if shown.proven else 1)


def _demo_of(path: str) -> int:
    """The exit status of a snapshot's replay, which is printed."""
    from tempfile import gettempdir

    from orchestrator import screen
    from orchestrator.check import Accepted, check
    from orchestrator.demo_screen import replayed
    from orchestrator.portal import run_sync
    from orchestrator.replay import replay
    from orchestrator.snapshot import read

    try:
        offer = read(path)
    except SnapshotInvalid as error:
        print(screen.plain(str(error)), file=sys.stderr)
        return UNUSABLE
    verdict = check(offer)
    screen.console().print(screen.verdict(path, verdict))
    if not isinstance(verdict, Accepted):
        return REJECTED
    try:
        moved = run_sync(lambda: replay(offer))
    except (OSError, RuntimeError) as error:  # torch maps a file, and says what failed by a RuntimeError
        print(f"kvreg: no room for this registration's memory in {gettempdir()}: {str(error).splitlines()[0]}", file=sys.stderr)
        return UNUSABLE
    screen.console().print(replayed(moved))
    return 0 if all(group.right for group in moved) else 1


if __name__ == "__main__":
    main()
