"""What the report of a training run advises."""

import pytest

from lorazor.training.compare import NEVER_RELEASED, Comparison, Row
from lorazor.training.learned import LEARNED, WITHOUT_PROBES
from lorazor.training.replay import Summary
from lorazor.training.report import note_probes


def row(policy: str, share: float | None) -> Row:
    """Of a policy that holds `share` of the judged rows; None: no request is judged."""
    summary = Summary(9, 0.1, 0.9, 0.9, 0.0, 1.0, share or 0.0, 1.0, 0.5)
    return Row(policy, 0.01, 0.5, None if share is None else summary, summary)


def comparisons(probed: float | None, unprobed: float | None) -> dict[str, Comparison]:
    """Two tasks, whose policies hold so much of the rows on average, with probes and without."""
    shares = {LEARNED: probed, WITHOUT_PROBES: unprobed}
    both = {}
    for task, off in (("a", -0.1), ("b", 0.1)):
        rows = [row(name, None if share is None else share + off) for name, share in shares.items()]
        never = row(NEVER_RELEASED, 1.0)
        both[task] = Comparison(task, never, [never, *rows])
    return both


@pytest.mark.parametrize(
    ("probed", "unprobed", "probes", "advice"),
    [
        (0.30, 0.31, True, "without probes holds 31.0% of the rows, one with probes 30.0%: --without-probes costs"),
        (0.30, 0.25, True, "--without-probes costs a server less"),
        (0.30, 0.33, False, "probes are worth their price here"),
        (0.30, 0.33, True, None),
        (0.30, 0.31, False, None),
        (None, None, True, None),
        (None, None, False, None),
    ],
)
def test_the_better_choice_of_probes(
    probed: float | None, unprobed: float | None, probes: bool, advice: str | None
) -> None:
    """A sentence where the other one is better, and none where this one is or nothing was judged."""
    notes = note_probes(comparisons(probed, unprobed), probes)
    assert len(notes) == (advice is not None)
    assert advice is None or advice in notes[0]
