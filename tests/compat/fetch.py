"""Other vLLM releases by package name, without their dependencies: Python code only, kept so that reruns need no network."""

import subprocess
import sys
import tempfile
from pathlib import Path
from zipfile import ZipFile

import pytest

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "compat"
FETCH_TIMEOUT_S = 900


def release(package: str, version: str) -> Path:
    """The folder that, first on `sys.path`, makes `import vllm` this release; a skip (in CI a failure) if it is out of reach."""
    folder = CACHE / f"{package}-{version}"
    if not folder.exists():
        try:
            _fetch(f"{package}=={version}", folder)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{package} {version} could not be fetched: {error}; {(error.stderr or b'').decode()[-500:]}")
    return folder


def _fetch(requirement: str, folder: Path) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", scratch, requirement]
        subprocess.run(pip, check=True, capture_output=True, timeout=FETCH_TIMEOUT_S)
        (wheel,) = Path(scratch).glob("*.whl")
        unpacked = Path(scratch) / "unpacked"
        with ZipFile(wheel) as archive:
            archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name])
        unpacked.rename(folder)
