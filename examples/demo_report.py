"""The demo's report: one HTML page with nothing outside it, from a template beside this file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATE = "demo_report.html.j2"


def render(figures: Mapping[str, str], **values: Any) -> str:
    """The page.

    Args:
        figures: `<svg>` elements by the names that the template gives them; all other text is escaped.
        values: every name that the template uses; one that is missing raises jinja2.UndefinedError.
    """
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "promise": promise}
    return environment.get_template(TEMPLATE).render(
        figures={name: Markup(svg) for name, svg in figures.items()}, **values
    )


def percent(value: float | None, digits: int = 1) -> str:
    """0.513 as "51.3 %"; a null is a dash."""
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def promise(tuned: Mapping[str, Any]) -> str:
    """A task of `lorazor tune --json`, as the sentence that its threshold is worth."""
    if tuned["threshold"] is None:
        return f"No threshold could be promised from {tuned['n']:,} requests, so this task never releases."
    if tuned.get("max_drop") is None:
        return "Set by hand: nothing is promised."
    bound = "" if tuned.get("bound") is None else f" (at most {percent(tuned['bound'])}, for this threshold alone)"
    return (
        f"With {percent(tuned['confidence'], 0)} confidence, requests like these lose at most "
        f"{percent(tuned['max_drop'], 0)} of the never-released score. "
        f"From {tuned['n']:,} calibration requests, which lost {percent(tuned['drop'])}{bound}."
    )
