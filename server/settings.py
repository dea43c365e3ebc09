"""From a command's arguments to its config: a TOML file first, then flags, which win.

A config is a frozen dataclass; the docstring under a field is its help. Knows no command.
"""

import difflib
import inspect
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from textwrap import TextWrapper
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro

from headway.engine.errors import UsageError

Config = TypeVar("Config")

FLAT = tyro.conf.arg(name="")
"""Marks a nested config whose fields stand among those of the config around it."""
POSITIONAL: Any = tyro.conf.Positional
REPEATED: Any = tyro.conf.UseAppendAction
"""Marks a list that takes one item each time its flag is given."""

ABOUT_FILES = "--config FILE.toml gives settings by the names below; flags win over it."


def read_config(config_type: type[Config], arguments: Sequence[str], program: str) -> Config:
    """Build a command's config from `--config FILE.toml` and the flags beside it.

    Raises UsageError for the file; tyro prints what is wrong with a flag and exits with 2.
    """
    path, flags = _take_config_path(arguments)
    from_file = [] if path is None else _flags_of_file(path, config_type, flags)
    try:
        return tyro.cli(
            config_type,
            args=[*from_file, *flags],
            prog=program,
            description=_about(config_type),
            config=(tyro.conf.DisallowNone,),
        )
    except ValueError as error:
        # What a flat part refuses is not caught by tyro.
        raise UsageError(str(error)) from error
    except SystemExit as stop:
        if from_file and stop.code:
            sys.stderr.write(f"Settings of {path} were read as flags, too.\n")
        raise


def _about(config_type: type) -> str:
    """Describe a command in lines of 80 columns; tyro would join those that are not indented."""
    summary, *paragraphs = [
        " ".join(paragraph.split())
        for paragraph in (inspect.getdoc(config_type) or "").split("\n\n")
    ]
    wrap = TextWrapper(width=78, initial_indent="  ", subsequent_indent="  ")
    return "\n\n".join([summary, *map(wrap.fill, [*paragraphs, ABOUT_FILES])])


def flat_items(config: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield each setting of a config by the name that it has in a file: ("engine.block_size", 16)."""
    hints = get_type_hints(type(config), include_extras=True)
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            inner = prefix if FLAT in _marks(hints[field.name]) else f"{prefix}{field.name}."
            yield from flat_items(value, inner)
        else:
            yield prefix + field.name, value


def _take_config_path(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split `--config FILE` or `--config=FILE` from the other arguments."""
    path, rest = None, []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--config" or argument.startswith("--config="):
            value = argument.partition("=")[2] or next(remaining, "")
            if not value or path is not None:
                raise UsageError("--config takes one TOML file; give it once, with a path")
            path = Path(value)
        else:
            rest.append(argument)
    return path, rest


def _flags_of_file(path: Path, config_type: type, flags: Sequence[str]) -> list[str]:
    """Spell a TOML file as flags, those left out that are given by hand.

    Example: `block_size = 32` under `[engine]` becomes `--engine.block-size=32`.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: is not TOML: {error}") from error
    known = dict(_settings(config_type))
    given = {_setting_of_flag(flag) for flag in flags if flag.startswith("--")}
    spelled: list[str] = []
    for key, value in _leaves(table, known):
        if key not in known:
            raise UsageError(f"{path}: there is no setting {key!r}{_near(key, known)}")
        if key not in given:
            spelled += _spell(path, key, value, known[key])
    return spelled


def _settings(config_type: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield name and type of each setting that a file may hold."""
    hints = get_type_hints(config_type, include_extras=True)
    for field in fields(config_type):
        hint = hints[field.name]
        inner = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if is_dataclass(inner) and isinstance(inner, type):
            flat = FLAT in _marks(hint)
            yield from _settings(inner, prefix if flat else f"{prefix}{field.name}.")
        elif POSITIONAL not in _marks(hint):
            yield prefix + field.name, hint


def _marks(hint: Any) -> tuple[Any, ...]:
    return hint.__metadata__ if get_origin(hint) is Annotated else ()


def _leaves(
    table: Mapping[str, Any], known: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        name = prefix + key
        if isinstance(value, dict) and any(other.startswith(f"{name}.") for other in known):
            yield from _leaves(value, known, f"{name}.")
        else:
            yield name, value


def _near(key: str, known: Mapping[str, Any]) -> str:
    names = difflib.get_close_matches(key, known, cutoff=0.5)
    # `block_size` at the top level is probably meant for its section.
    names += [name for name in known if name.endswith(f".{key}") and name not in names]
    return f"; near ones are {', '.join(names)}" if names else "; --help lists them all"


def _setting_of_flag(flag: str) -> str:
    """Return "engine.prefix_cache" for --engine.no-prefix-cache and for --engine.prefix-cache."""
    *section, name = flag[2:].partition("=")[0].replace("-", "_").split(".")
    return ".".join([*section, name.removeprefix("no_")])


def _spell(path: Path, key: str, value: Any, hint: Any) -> list[str]:
    section, _, name = key.replace("_", "-").rpartition(".")
    dotted = f"{section}." if section else ""
    if isinstance(value, bool) is not (hint is bool) or isinstance(value, dict):
        expected = "true or false" if hint is bool else "a value or a list"
        raise UsageError(f"{path}: {key} is {value!r}; {expected} is allowed")
    if isinstance(value, bool):
        return [f"--{dotted}{name if value else f'no-{name}'}"]
    flag = f"--{dotted}{name}"
    if not isinstance(value, list):
        return [f"{flag}={value}"]
    items = [
        [str(part) for part in item] if isinstance(item, list) else [str(item)] for item in value
    ]
    if REPEATED not in _marks(hint):
        return [flag, *(part for item in items for part in item)]
    return [
        part
        for item in items
        for part in ([f"{flag}={item[0]}"] if len(item) == 1 else [flag, *item])
    ]
