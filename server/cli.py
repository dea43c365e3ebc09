"""`headway COMMAND`: finds the command, reads its config, runs it and turns errors into one line.

A command is a function of one frozen dataclass. Its module is imported only when it is chosen, so
that help and healthcheck do not wait for torch.
"""

import difflib
import importlib
import io
import logging
import os
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

from headway.engine.errors import HeadwayError, UsageError


@dataclass(frozen=True, slots=True)
class Command:
    """Where a command is and what it does, in the words of its config's docstring."""

    module: str
    function: str
    summary: str


COMMANDS = {
    "serve": Command("serve", "serve", "Serve a model over gRPC."),
    "generate": Command("generate", "generate", "Continue a prompt and print the text."),
    "demo": Command("demo", "demo", "Show a model being served, with and without speculation."),
    "models pull": Command("models", "pull", "Get a model of the catalogue."),
    "models list": Command("models", "list_models", "List the models of the catalogue."),
    "models quantize": Command(
        "models", "quantize", "Pack a model's weights, and measure the cost."
    ),
    "heads train": Command("heads", "train", "Train draft heads for a model on a file of chats."),
    "bench engine": Command("bench", "bench_engine", "Measure the engine on a set of prompts."),
    "bench serve": Command("bench_serve", "bench_serve", "Measure a server over gRPC."),
    "doctor": Command("doctor", "doctor", "Show what this machine has and what clashes."),
    "healthcheck": Command("healthcheck", "healthcheck", "Ask a server whether it is serving."),
}
LEVELS = ("debug", "info", "warning", "error")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for what was asked wrongly or cannot start."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may say what an old terminal cannot show; that is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
    try:
        return _run(arguments)
    except HeadwayError as error:
        print(f"headway: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; what Python flushes at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"headway {_version()}")
        return 0
    name, rest = split_command(arguments)
    command = COMMANDS.get(name)
    if command is None:
        if rest and rest[0] not in ("-h", "--help"):
            raise UsageError(f"there is no command {name} {rest[0]!r}{_near(f'{name} {rest[0]}')}")
        print(usage(name))
        return 0 if rest else 2
    set_up_logging("info" if name == "serve" else "warning")
    function = load(command)
    # tyro takes longer to import than usage() to run.
    from headway.server.settings import read_config

    return function(read_config(config_type(function), rest, f"headway {name}"))


def split_command(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split the command, of one or two words, from what follows; a group alone counts as one.

    Raises UsageError that names the near ones.
    """
    for num_words in (2, 1):
        name = " ".join(arguments[:num_words])
        if name in COMMANDS or any(command.startswith(f"{name} ") for command in COMMANDS):
            return name, list(arguments[num_words:])
    raise UsageError(f"there is no command {arguments[0]!r}{_near(arguments[0])}")


def usage(group: str = "") -> str:
    """Describe all commands, or those of a group, in 80 columns."""
    listed = {name: command for name, command in COMMANDS.items() if name.startswith(group)}
    lines = [f"  {name:16}{command.summary}" for name, command in listed.items()]
    return "\n".join(
        [
            "usage: headway COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "headway COMMAND --help tells its options, headway --version the version.",
            "HEADWAY_LOG sets how much is logged: " + ", ".join(LEVELS) + ".",
        ]
    )


def load(command: Command) -> Callable[[typing.Any], int]:
    """Import the function behind a command."""
    module = importlib.import_module(f"headway.server.commands.{command.module}")
    function: Callable[[typing.Any], int] = getattr(module, command.function)
    return function


def config_type(function: Callable[[typing.Any], int]) -> type[typing.Any]:
    """Return the dataclass that a command takes."""
    hints = typing.get_type_hints(function)
    found: type[typing.Any] = next(hint for name, hint in hints.items() if name != "return")
    return found


def set_up_logging(default_level: str) -> None:
    """Log as key=value text to stderr, from the level in HEADWAY_LOG on."""
    level = os.environ.get("HEADWAY_LOG", default_level).lower()
    if level not in LEVELS:
        raise UsageError(f"HEADWAY_LOG is {level!r}; {', '.join(LEVELS)} are allowed")
    logging.basicConfig(format="time=%(asctime)s level=%(levelname)s logger=%(name)s %(message)s")
    logging.getLogger("headway").setLevel(level.upper())


def _near(name: str) -> str:
    names = difflib.get_close_matches(name, COMMANDS, cutoff=0.5)
    return f"; near ones are: {', '.join(names)}" if names else "; headway --help lists them"


def _version() -> str:
    try:
        return metadata.version("headway")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
