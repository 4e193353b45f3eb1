"""The jars of an embedded server: named and hashed in a committed lock, fetched once, always checked.

A lock is a text file with one jar a line, `group:artifact:version sha256:HEX`. Fetched jars lie
flat in one folder that several homes may share. A jar is downloaded beside that folder, checked,
and only then moved into it, so an interrupted download leaves nothing that a later start could
mistake for a jar.

`python -m infra.embedded.jars` makes the locks anew after a version in COORDINATES was changed.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

KAFKA_LOCK: Final = Path(__file__).with_name("kafka.lock")

# What each lock is made from. The broker logs nothing without the binding of its logging interface.
COORDINATES: Final = {
    KAFKA_LOCK: (
        "org.apache.kafka:kafka_2.13:4.4.0",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.5",
    ),
}

DOWNLOADS_AT_ONCE_MAX: Final = 8
DOWNLOAD_TRIES_MAX: Final = 3
DOWNLOAD_TIMEOUT_S: Final = 60


class JarError(RuntimeError):
    """A jar could not be had, or is not the one in the lock. The message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LockedJar:
    """One line of a lock."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.artifact}-{self.version}.jar"

    def __str__(self) -> str:
        return f"{self.group}:{self.artifact}:{self.version}"


def read_lock(lock: Path) -> tuple[LockedJar, ...]:
    """The jars of a lock, in the order of its lines, which is the order of the class path."""
    return tuple(_locked_jar(line) for line in lock.read_text("utf-8").splitlines() if line)


def fetch_jars(
    jars: Sequence[LockedJar], folder: Path, *, progress: Callable[[str], None]
) -> tuple[Path, ...]:
    """Have every jar in `folder`, checked; return their paths in order.

    Raises JarError when a jar cannot be downloaded or when one has another hash than its lock,
    whether it was there before or has just come.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [jar for jar in jars if not (folder / jar.filename).exists()]
    if missing:
        progress(f"fetching {len(missing)} jars into {folder}")
        with (
            tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch,
            ThreadPoolExecutor(DOWNLOADS_AT_ONCE_MAX, thread_name_prefix="jars") as pool,
        ):
            # A list, so that the first failure is raised here.
            list(pool.map(lambda jar: _fetch(jar, Path(scratch), folder), missing))
    for jar in jars:
        _check(jar, folder / jar.filename)
    return tuple(folder / jar.filename for jar in jars)


def make_lock(coordinates: Iterable[str], folder: Path) -> str:
    """Resolve coordinates with all that they need at run time; return the text of their lock."""
    import jgo  # noqa: PLC0415 - see _download

    found: dict[str, str] = {}
    for coordinate in coordinates:
        for artifact in jgo.resolve(coordinate):
            name = f"{artifact.groupId}:{artifact.artifactId}"
            if name in found:
                # The first coordinate decides: it is the server, the others are its additions.
                continue
            path = _download(name, artifact.version, folder)
            found[name] = f"{name}:{artifact.version} sha256:{_sha256(path)}"
    return "\n".join(found[name] for name in sorted(found)) + "\n"


def _locked_jar(line: str) -> LockedJar:
    coordinate, _, sha256 = line.partition(" sha256:")
    group, artifact, version = coordinate.split(":")
    assert len(sha256) == 64, f"no SHA-256 in {line!r}"
    return LockedJar(group=group, artifact=artifact, version=version, sha256=sha256)


def _download(name: str, version: str, folder: Path) -> Path:
    """Download `group:artifact` into a repository folder; raise what the resolver raises."""
    # Half a second of imports that a start with all jars at hand does not need.
    from jgo.maven import MavenContext  # noqa: PLC0415

    group, artifact = name.split(":")
    context = MavenContext(repo_cache=folder, local_repos=[], timeout=DOWNLOAD_TIMEOUT_S)
    return Path(context.project(group, artifact).at_version(version).artifact().resolve())


def _fetch(jar: LockedJar, scratch: Path, folder: Path) -> None:
    for attempt in range(1, DOWNLOAD_TRIES_MAX + 1):
        try:
            # A fresh folder a try: what a broken download left must not be taken for the jar.
            path = _download(f"{jar.group}:{jar.artifact}", jar.version, scratch / f"try{attempt}")
        except (RuntimeError, OSError) as error:  # What requests raises is an OSError.
            if attempt == DOWNLOAD_TRIES_MAX:
                reason = type(error).__name__
                raise JarError(
                    f"could not download {jar} in {attempt} tries ({reason}); is there a network?"
                ) from error
            continue
        _check(jar, path)
        path.replace(folder / jar.filename)
        return


def _check(jar: LockedJar, path: Path) -> None:
    actual = _sha256(path)
    if actual != jar.sha256:
        raise JarError(
            f"{path} is not the {jar} of the lock: its SHA-256 is {actual}, "
            f"expected {jar.sha256}; delete it to fetch it again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    """Make every lock anew."""
    with tempfile.TemporaryDirectory(prefix="turnlog-lock-") as folder:
        for lock, coordinates in COORDINATES.items():
            lock.write_text(make_lock(coordinates, Path(folder)), "utf-8")


if __name__ == "__main__":
    main()
