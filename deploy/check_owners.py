"""Says whether kvreg alone owns its top-level packages in this environment: exit 0, or 1 with a line for each that it does not.

kvreg installs three plain names. Another distribution that installs one of them would be imported in kvreg's stead,
or have its files overwritten, whichever was installed last; an image build runs this so that such an image is never made.
"""

import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version

OWNER = "kvreg"
NAMES = ("orchestrator", "stages", "metrics")


def complaints() -> list[str]:
    """One line for each name that another distribution installs too, and one if kvreg itself is not installed."""
    try:
        version(OWNER)
    except PackageNotFoundError:
        return [f"{OWNER} is not installed in {sys.prefix}"]
    owners = packages_distributions()
    strangers = {name: sorted(set(owners.get(name, ())) - {OWNER}) for name in NAMES}
    return [
        f"package {name!r} of {OWNER} is also installed by {' and '.join(others)}: uninstall {'it' if len(others) == 1 else 'them'}"
        for name, others in strangers.items()
        if others
    ]


if __name__ == "__main__":
    found = complaints()
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    sys.exit(bool(found))
