"""Which LMCache releases this connector works with, said before anything of LMCache is imported."""

from importlib.metadata import PackageNotFoundError, version

OLDEST, NEWER_THAN_TESTED = (0, 5, 6), (0, 6)
SUPPORTED = "lmcache >=0.5.6, <0.6"
"""The page reading that every plan is proven against is 0.5.6's; another minor release may read pages otherwise."""


def check_lmcache() -> None:
    """Raise ImportError, in one line, where LMCache is missing or of a release whose page reading is not known."""
    try:
        installed = version("lmcache")
    except PackageNotFoundError:
        raise ImportError(f"kvreg's connector needs {SUPPORTED}, and lmcache is not installed: pip install 'kvreg[lmcache]'") from None
    if _release(installed) < OLDEST or _release(installed) >= NEWER_THAN_TESTED:
        raise ImportError(f"kvreg's connector needs {SUPPORTED}, but lmcache {installed} is installed: pip install '{SUPPORTED}'")


def _release(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: (0, 5, 7) of 0.5.7rc2."""
    numbers: list[int] = []
    for part in text.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
