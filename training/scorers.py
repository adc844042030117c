"""Scorers by name: what judges a text, as a function of (text, example) -> float in [0, 1].

`load_scorer` gives a built-in by its name or anybody's function by `package.module:function`; either comes back
wrapped, so that a score outside [0, 1] or NaN is an error that names the scorer and the request.
"""

import importlib
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lorazor.features.errors import InputError
from lorazor.training.config import unknown
from lorazor.training.scorers_json import format_check, json_equal, json_field_f1
from lorazor.training.scorers_sql import sql_execution
from lorazor.training.scorers_text import (
    Example,
    bleu,
    exact_match,
    number_match,
    refusal,
    regex_match,
    rouge_l,
)

SCORERS: dict[str, Callable[..., float]] = {
    "bleu": bleu,
    "exact_match": exact_match,
    "format_check": format_check,
    "json_equal": json_equal,
    "json_field_f1": json_field_f1,
    "number_match": number_match,
    "refusal": refusal,
    "regex_match": regex_match,
    "rouge_l": rouge_l,
    "sql_execution": sql_execution,
}


@dataclass(frozen=True)
class CheckedScorer:
    """A scorer with its settings bound; calling it checks what comes out."""

    name: str
    function: Callable[..., float]
    settings: dict[str, Any] = field(default_factory=dict)

    def __call__(self, text: str, example: Example, request_id: str = "?") -> float:
        """The score of `text` as a float in [0, 1].

        Raises:
            InputError: the scorer failed, or gave something that is no number in [0, 1]; names scorer and request.
        """
        try:
            value = self.function(text, example, **self.settings)
            score = float(value)
        except Exception as error:  # a scorer may be anybody's code: whatever it raises is told with its name
            kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
            raise InputError(f"scorer {self.name}, request {request_id}: {kind}{error}") from error
        if math.isnan(score) or not 0 <= score <= 1:
            raise InputError(f"scorer {self.name}, request {request_id}: the score must lie in [0, 1], got {value!r}")
        return score

    @property
    def built_in(self) -> bool:
        """Whether it is one of ours, hence cheap enough to be tried on every row before anything runs."""
        return self.name in SCORERS


def load_scorer(name: str, settings: dict[str, Any] | None = None, search: Sequence[str | Path] = ()) -> CheckedScorer:
    """The scorer called `name`, with its settings.

    Args:
        name: a key of `SCORERS`, or `package.module:function`.
        settings: keyword arguments for it.
        search: folders in which a module is looked for after the installed ones.

    Raises:
        InputError: no such scorer, module or function, or a setting that it does not take.
    """
    if ":" in name:
        function = _import(name, search)
    elif name in SCORERS:
        function = SCORERS[name]
    else:
        raise InputError(f'{unknown("scorer", name, SCORERS)}, or "package.module:function"')
    _check_settings(name, function, settings or {})
    return CheckedScorer(name, function, settings or {})


def _import(name: str, search: Sequence[str | Path]) -> Callable[..., float]:
    module_name, _, attribute = name.partition(":")
    added = [str(Path(folder).absolute()) for folder in search]
    sys.path.extend(added)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # importing runs the module, which may fail in any way
        raise InputError(f'scorer "{name}": cannot import {module_name} ({type(error).__name__}: {error})') from error
    finally:
        for folder in added:
            sys.path.remove(folder)
    function = getattr(module, attribute, None)
    if not callable(function):
        offered = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f'scorer "{name}": {unknown("function", attribute, offered)}')
    return function  # type: ignore[no-any-return]


def _check_settings(name: str, function: Callable[..., float], settings: dict[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = list(parameters)[2:]
    for key in settings:
        if key not in known:
            raise InputError(f"scorer {name}: {unknown('setting', key, known)}")
