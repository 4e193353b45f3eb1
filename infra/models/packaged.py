"""Where the file of a model lies: in a package that is located and never imported, whole or in parts that are joined once."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 1_048_576


class ModelFileMissingError(FileNotFoundError):
    """The package that carries the model's file is not installed, or lies there without the
    file.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeFile:
    """`name` inside the package's folder."""

    package: str
    name: str

    def path(self) -> Path:
        """Raises ModelFileMissingError."""
        return _in_package(self.package, self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedFile:
    """`name`, made of parts that lie in packages of their own. It is kept in the user's cache; `sha256` is that of the whole."""

    parts: tuple[WholeFile, ...]
    name: str
    sha256: str

    def path(self) -> Path:
        """Joins the parts where that was not done before (253 MB: 1 s). Raises ModelFileMissingError."""
        parts = [part.path() for part in self.parts]
        joined = _cache_folder() / f"{self.sha256[:16]}-{self.name}"
        size = sum(part.stat().st_size for part in parts)
        if not joined.is_file() or joined.stat().st_size != size:
            self._join(parts, joined)
        return joined

    def _join(self, parts: list[Path], joined: Path) -> None:
        digest = hashlib.sha256()
        with tempfile.NamedTemporaryFile(dir=joined.parent, delete=False) as whole:
            try:
                for part in parts:
                    with part.open("rb") as piece:
                        while block := piece.read(BLOCK_BYTES):
                            digest.update(block)
                            whole.write(block)
                whole.flush()
                if digest.hexdigest() != self.sha256:
                    raise ModelFileMissingError(f"the parts of {self.name} are not what they were")
                # At once, since several processes may start together: each of them puts the same file there.
                Path(whole.name).replace(joined)
            finally:
                Path(whole.name).unlink(missing_ok=True)


def _in_package(package: str, name: str) -> Path:
    found = importlib.util.find_spec(package)
    for folder in (found.submodule_search_locations if found else None) or ():
        path = Path(folder) / name
        if path.is_file():
            return path
    raise ModelFileMissingError(f"{package}/{name} is not installed")


def _cache_folder() -> Path:
    """In the user's cache, else where temporary files go."""
    homes = [os.environ.get("XDG_CACHE_HOME") or "~/.cache", tempfile.gettempdir()]
    for home in homes:
        folder = Path(home).expanduser() / "turnlog-models"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise ModelFileMissingError("no folder to join a model's parts in")
