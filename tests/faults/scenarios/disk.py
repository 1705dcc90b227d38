"""The disk of the runs folder: full, read-only, over its quota."""

from __future__ import annotations

import resource
import subprocess
import time
from pathlib import Path
from random import Random

import psutil

from tests.faults.bench import Bench, Unmet
from tests.faults.scenario import Scenario


class Disk:
    """An ext4 file system of its own under the runs folder."""

    def __init__(self, bench: Bench) -> None:
        self._image, self._place = bench.folder / "disk.img", bench.runs
        with self._image.open("wb") as file:
            file.truncate(16 << 20)
        _do("mkfs.ext4", "-q", "-F", str(self._image))
        self._place.mkdir(exist_ok=True)
        self.mount()
        bench.at_end(self.unmount)

    def mount(self) -> None:
        """Mount it, to become read-only at its first error."""
        _do("mount", "-o", "loop,errors=remount-ro", str(self._image), str(self._place))

    def unmount(self) -> None:
        """Take it away, even while it is used."""
        subprocess.run(["umount", "-l", str(self._place)], check=False, capture_output=True)

    def fill(self) -> Path:
        """Write until nothing more fits."""
        filler = self._place / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                try:
                    while True:
                        file.write(b"x" * size)
                except OSError:
                    continue
        return filler

    def fail(self) -> None:
        """Let it report an error, after which the kernel makes it read-only."""
        source = _do("findmnt", "-n", "-o", "SOURCE", str(self._place)).strip()
        Path("/sys/fs/ext4", Path(source).name, "trigger_fs_error").write_text("fault")

    def repair(self) -> None:
        """Mount it anew."""
        self.unmount()
        subprocess.run(["e2fsck", "-p", str(self._image)], check=False, capture_output=True)
        self.mount()


def _do(*words: str) -> str:
    try:
        return subprocess.run(words, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unmet(f"the harness may not make this fault here: {error}") from None


def _full(bench: Bench, random: Random) -> int:
    disk = Disk(bench)
    _, driver = bench.launched(1)
    bench.training(3)
    time.sleep(random.uniform(0.0, 2.0))
    bench.fault()
    filler = disk.fill()
    time.sleep(15.0)
    filler.unlink()
    bench.training(5)
    code = bench.finish(driver)
    bench.notice("no space|full|cannot write")
    return code


def _read_only(bench: Bench, random: Random) -> int:
    disk = Disk(bench)
    _, driver = bench.launched(1)
    bench.training(3)
    time.sleep(random.uniform(0.0, 2.0))
    bench.fault()
    disk.fail()
    bench.until(lambda: not driver.running or "read-only" in driver.story, "nothing says so")
    bench.notice("read-only")
    time.sleep(10.0)
    if driver.running:
        driver.kill()  # its files are of a file system that is gone
    disk.repair()
    second = bench.resume()
    bench.training(5)
    return bench.finish(second)


def _quota(bench: Bench, random: Random) -> int:
    _, driver = bench.launched(1)
    bench.training(3)
    time.sleep(random.uniform(0.0, 2.0))
    bench.fault()
    process = psutil.Process(driver.process.pid)
    _, hard = process.rlimit(resource.RLIMIT_FSIZE)
    process.rlimit(resource.RLIMIT_FSIZE, (256, hard))
    time.sleep(15.0)
    process.rlimit(resource.RLIMIT_FSIZE, (hard, hard))
    bench.training(5)
    code = bench.finish(driver)
    bench.notice("file too large|quota|cannot write")
    return code


SCENARIOS = (
    Scenario(
        name="disk-full",
        fault="the disk of the runs folder is full for 15 s",
        play=_full,
        how="an ext4 file system of 16 MiB, filled to its last byte",
    ),
    Scenario(
        name="disk-read-only",
        fault="the disk of the runs folder becomes read-only; it is mounted anew, then `resume`",
        play=_read_only,
        how="an ext4 file system that reports an error",
    ),
    Scenario(
        name="quota",
        fault="the driver may write no more for 15 s",
        play=_quota,
        how="RLIMIT_FSIZE of the driver, not a quota of the file system",
        ci=True,
    ),
)
