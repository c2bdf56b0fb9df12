"""How much a command says: `-q` leaves warnings, errors and results, `-v` adds every step and what lies behind errors.

One owner: commands are registered through `command`, which gives each of them both options; processes that a command
starts inherit the choice through a variable of the environment.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from disaggkd_cli.errors import StoppedByHand, UserError
from disaggkd_cli.terminal import write

if TYPE_CHECKING:
    import typer

_VARIABLE = "DISAGGKD_VERBOSITY"
_QUIET, _VERBOSE = "quiet", "verbose"


def is_quiet() -> bool:
    """Whether only warnings, errors and results shall be said."""
    return os.environ.get(_VARIABLE) == _QUIET


def is_verbose() -> bool:
    """Whether everything shall be said."""
    return os.environ.get(_VARIABLE) == _VERBOSE


def say(line: str) -> None:
    """Print a line that is neither a result nor a warning, unless quiet."""
    if not is_quiet():
        write(line)


def command(application: typer.Typer, **options: Any) -> Callable[[Callable], Callable]:
    """Return a decorator that registers a command with `-q` and `-v`, and that says so when Ctrl-C ends it."""
    import typer

    quiet = Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="Say warnings, errors and results only.")]
    verbose = Annotated[
        bool, typer.Option("--verbose", "-v", metavar="", help="Say every step, and tracebacks behind errors.")
    ]

    def register(function: Callable) -> Callable:
        @functools.wraps(function)
        def called(*arguments: Any, quiet: bool, verbose: bool, **named: Any) -> Any:
            _choose(quiet, verbose)
            try:
                return function(*arguments, **named)
            except KeyboardInterrupt:
                raise StoppedByHand(f"{function.__name__}: stopped by Ctrl-C") from None

        own = inspect.signature(function, eval_str=True)
        added = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
            for name, annotation in (("quiet", quiet), ("verbose", verbose))
        ]
        called.__signature__ = own.replace(parameters=[*own.parameters.values(), *added])
        called.__annotations__ = {name: one.annotation for name, one in called.__signature__.parameters.items()}
        del called.__wrapped__
        application.command(**options)(called)
        return function

    return register


def _choose(quiet: bool, verbose: bool) -> None:
    if quiet and verbose:
        raise UserError("-q and -v: give one of them")
    if quiet or verbose:
        os.environ[_VARIABLE] = _QUIET if quiet else _VERBOSE
