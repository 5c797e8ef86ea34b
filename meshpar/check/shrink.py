"""A failing case made as small as it goes: greedy, one axis or feature at a time (delta debugging, Zeller 1999).

What the smallest case still has is needed for the failure: the cause, as far as it can be told from outside.
"""

from __future__ import annotations

from collections.abc import Callable

from meshpar.check.case import Case


def shrink(
    case: Case, fails: Callable[[Case], bool], *, most: int = 40, say: Callable[[str], None] = lambda text: None
) -> tuple[Case, list[str]]:
    """The smallest case that still fails, and what it has: degrees of mesh axes and features, as `--set` spells them.

    Args:
      case: fails.
      fails: runs a case.
      most: cases that are run.
    """
    tried: set[str] = {case.command()}
    smaller = True
    while smaller and most > 0:
        smaller = False
        for what, candidate in case.smaller():
            if candidate.command() in tried:
                continue
            tried.add(candidate.command())
            most -= 1
            still = fails(candidate)
            say(f"without {what}: {'fails too' if still else 'equal'}")
            if still:
                case, smaller = candidate, True
                break
            if most <= 0:
                break
    return case, list(dict.fromkeys(what for what, _ in case.smaller()))
