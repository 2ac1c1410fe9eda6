"""The composition root: the only room that knows vLLM, LMCache and the event loop.

`stages`, `metrics` and `orchestrator` are plain top-level packages of one distribution. Another distribution that
installs one of these names would be imported in our stead, so the first import checks where the other two lie.
"""

from importlib.util import find_spec
from pathlib import Path


def _check_neighbours() -> None:
    here = Path(__file__).resolve().parent
    for name in ("stages", "metrics"):
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if found != here.parent / name:
            raise ImportError(
                f"kvreg needs its own package {name!r} at {here.parent / name}, but Python finds it at {found}: "
                "another distribution owns that name, or the working directory shadows it (set PYTHONSAFEPATH=1)"
            )


_check_neighbours()
