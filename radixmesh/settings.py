"""Settings: flags over environment over file over defaults. The only reader of the environment.

Each service declares one frozen, flat class. A field `max_running` is the flag
`--max-running`, the variable `RADIXMESH_WORKER_MAX_RUNNING` and the key
`max_running` of the file that `--config` names (YAML or JSON). Built on
pydantic-settings.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)

__all__ = [
    "ServiceSettings",
    "SettingsConfigDict",
    "cache_dir",
    "child_environment",
    "load",
    "stay_offline",
]


class ServiceSettings(BaseSettings):
    """The base of every service's settings. Set `env_prefix` in `model_config`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        # No timer takes them, and JSON has no word for them.
        allow_inf_nan=False,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Put the file that `load` found behind flags and environment."""
        del dotenv_settings, file_secret_settings
        sources: tuple[PydanticBaseSettingsSource, ...] = (init_settings, env_settings)
        path = cls.model_config.get("yaml_file")
        return (*sources, YamlConfigSettingsSource(settings_cls)) if path else sources


# A default that is nothing, or that only code can say.
_SAYS_NOTHING = re.compile(r" \(default(: (None)?| factory: .*)\)$")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves out defaults that say nothing; the text before says what holds without the flag."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = super()._get_help_string(action)
        return text and _SAYS_NOTHING.sub("", text)


Settings = TypeVar("Settings", bound=ServiceSettings)


def load(kind: type[Settings], argv: Sequence[str], *, prog: str) -> Settings:
    """Read the settings of a service, or exit with a message that names the flag.

    Args:
        kind: The settings class of the service.
        argv: Arguments without the program's name.
        prog: The program's name, for messages and `--help`.

    Raises:
        SystemExit: A value is wrong (status 2), or help was asked for (0).
    """
    config = argparse.ArgumentParser(prog=prog, add_help=False, allow_abbrev=False)
    config.add_argument("--config", type=Path, metavar="FILE", default=None)
    known, rest = config.parse_known_args(list(argv))
    chosen = _with_file(kind, known.config, prog)
    variables = kind.model_config.get("env_prefix", "")
    try:
        flags: CliSettingsSource[Any] = CliSettingsSource(
            chosen, cli_prog_name=prog, formatter_class=_HelpFormatter
        )
        # Only for the help: it was read above.
        flags.root_parser.add_argument(
            "--config",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help=f"YAML or JSON; flags and {variables}<FLAG> variables go before it.",
        )
        return chosen(_cli_settings_source=flags(args=list(rest)))  # type: ignore[call-arg]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # about several flags; the message names them
            _leave(prog, message)
        name = ".".join(str(part) for part in first["loc"]).replace("_", "-")
        given = "" if first["type"] == "missing" else f", got {first.get('input')!r}"
        _leave(prog, f"--{name}: {message}{given}")
    except SettingsError as error:
        _leave(prog, str(error))


def _with_file(kind: type[Settings], path: Path | None, prog: str) -> type[Settings]:
    if path is None:
        return kind
    if not path.is_file():
        _leave(prog, f"--config: there is no file {path}")
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where else ""
        _leave(prog, f"--config: {path} is neither YAML nor JSON{line}")
    except OSError as error:
        _leave(prog, f"--config: {path} can't be read ({error.strerror})")
    if content is not None and not (isinstance(content, dict) and all(map(_is_name, content))):
        _leave(prog, f"--config: {path} is no YAML or JSON of the form 'name: value'")

    class WithFile(kind):  # type: ignore[valid-type, misc]
        model_config = SettingsConfigDict(yaml_file=path, title=kind.__name__)

    WithFile.__doc__ = kind.__doc__
    return WithFile


def _is_name(key: object) -> bool:
    return isinstance(key, str)


def _leave(prog: str, message: str) -> NoReturn:
    sys.stderr.write(f"{prog}: {message}\n")
    raise SystemExit(2)


def child_environment(
    defaults: Mapping[str, str] = MappingProxyType({}), **changes: str
) -> dict[str, str]:
    """Return this process's environment with changes, for a child process.

    `defaults` hold where the environment says nothing.
    """
    return {**defaults, **os.environ, **changes}


def cache_dir() -> Path:
    """Return the folder of converted models: RADIXMESH_CACHE, or the user's cache folder."""
    base = os.environ.get("RADIXMESH_CACHE")
    if base:
        return Path(base)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "radixmesh"


def stay_offline() -> None:
    """Keep Hugging Face libraries off the network, and quiet. Call it before they are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TQDM_DISABLE"] = "1"
