from types import SimpleNamespace

import pytest

from autotune.launchers.runners.node import host
from autotune.launchers.runners.node.host import Holder, read_cards, read_host
from autotune.launchers.runners.node.processes import ProcessStat
from autotune.launchers.runners.node.sampler import Sampler, with_descendants
from tests.launchers.runners.attempts import wait_for

GIB = 1 << 30


class ScriptedNvml:
    """Two cards, the second of which cannot tell who uses it."""

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802 - as NVML names it
        return SimpleNamespace(used=(device + 1) * GIB, total=80 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, device):  # noqa: N802
        if device == 1:
            raise self.NVMLError
        return [SimpleNamespace(pid=1, usedGpuMemory=GIB), SimpleNamespace(pid=2, usedGpuMemory=None)]

    def nvmlDeviceGetUtilizationRates(self, device):  # noqa: N802
        return SimpleNamespace(gpu=50 * device)

    def nvmlDeviceGetName(self, device):  # noqa: N802
        return b"NVIDIA H100"

    def nvmlDeviceGetUUID(self, device):  # noqa: N802
        return ("GPU-a41", "GPU-b52")[device]


@pytest.fixture
def two_cards(monkeypatch):
    library = ScriptedNvml()
    monkeypatch.setattr(host, "_nvml", lambda: (library, (0, 1)))


def test_cards_are_read(two_cards):
    first, second = read_cards()
    assert (first.index, first.used_bytes, first.total_bytes, first.utilisation) == (0, GIB, 80 * GIB, 0.0)
    assert first.holders == (Holder(pid=1, used_bytes=GIB), Holder(pid=2, used_bytes=0))
    assert second.holders == ()
    assert host.measure().card_name == "NVIDIA H100"


def test_samples_carry_cards(two_cards):
    sampler = Sampler("nobody/1", node="a")
    wait_for(lambda: sampler.since(0)[0] >= 2, seconds=5)
    taken, samples = sampler.since(0)
    sampler.close()
    assert len(samples) == taken
    assert [gpu.used_bytes for gpu in samples[0].gpus] == [GIB, 2 * GIB]
    assert samples[0].gpu_share == 0.5
    assert sampler.highest == {0: GIB, 1: 2 * GIB}
    assert sampler.held == set()
    assert sampler.since(taken)[1] == ()


def test_another_jobs_card_says_nothing_of_ours(two_cards):
    sampler = Sampler("nobody/1", node="a")
    sampler.claim([0])
    wait_for(lambda: sampler.since(0)[0] >= 1, seconds=5)
    _, samples = sampler.since(0)
    sampler.close()
    assert [gpu.of_attempt for gpu in samples[-1].gpus] == [True, False]
    assert samples[-1].gpu_share == 0.0


def test_what_processes_use_counts_for_those_above_them():
    parents = {1: 0, 2: 1, 3: 2, 4: 1, 9: 9}
    total = with_descendants({1: 0.0, 2: 0.5, 3: 1.0, 4: 0.0, 9: 0.25}, parents)
    assert total == {1: 1.5, 2: 1.5, 3: 1.0, 4: 0.0, 9: 0.25}


def test_a_process_on_a_card_is_known_by_the_card_or_by_ray(two_cards, monkeypatch):
    def stat(pid, parent):
        return ProcessStat(
            pid=pid, name="p", state="S", parent=parent, group=1, cpu_s=0.0, started=1, rss_bytes=1
        )

    sampler = Sampler("nobody/1", node="a")
    sampler.close()
    monkeypatch.setattr(sampler._census, "scan", lambda: (stat(7, 1), stat(1, 7), stat(8, 1), stat(30, 0)))
    sampler.claim([], pids=(8,))
    sampler._take(read_cards())
    (sample,) = sampler.since(sampler._taken - 1)[1]
    assert {process.pid: process.gpu for process in sample.processes} == {
        7: True,
        1: True,
        8: True,
        30: False,
    }


def test_two_samples_a_second():
    sampler = Sampler("nobody/1", node="a")
    wait_for(lambda: sampler.since(0)[0] >= 4, seconds=5)
    sampler.close()
    samples = sampler.since(0)[1]
    assert samples[3].at - samples[0].at < 1.6


@pytest.mark.parametrize(
    ("line", "names", "folder"),
    [
        ("0::/job", ("memory.max", "memory.current", "inactive_file"), ""),
        (
            "4:memory:/job",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            "memory",
        ),
    ],
)
def test_the_tightest_cgroup_counts(monkeypatch, tmp_path, line, names, folder):
    total, mine = str(1 << 62) if folder else "max", str(300 * 1024 * 1024)
    real = host.Path

    def rooted(path, *rest):
        text = str(real(path, *rest))
        if text.startswith("/sys/fs/cgroup"):
            return real(str(tmp_path) + text)
        if text == "/proc/self/cgroup":
            return tmp_path / "cgroup"
        return real(text)

    root = real(str(tmp_path) + "/sys/fs/cgroup") / folder
    (root / "job").mkdir(parents=True)
    (tmp_path / "cgroup").write_text(line + "\n")
    for where, limit in ((root, total), (root / "job", mine)):
        (where / names[0]).write_text(limit)
        (where / names[1]).write_text(str(200 * 1024 * 1024))
        (where / "memory.stat").write_text(f"other 1\n{names[2]} {50 * 1024 * 1024}\n")
    monkeypatch.setattr(host, "Path", rooted)
    host._limiting_group.cache_clear()
    memory = read_host()
    host._limiting_group.cache_clear()
    assert memory == (150 * 1024 * 1024, 300 * 1024 * 1024)


def test_an_nvml_error_costs_one_reading_of_one_card(monkeypatch):
    class Failing(ScriptedNvml):
        lost = False

        def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802
            if self.lost and device == 1:
                raise self.NVMLError("GPU is lost")
            return super().nvmlDeviceGetMemoryInfo(device)

    library = Failing()
    monkeypatch.setattr(host, "_nvml", lambda: (library, (0, 1)))
    sampler = Sampler("nobody/1", node="a")
    for lost, cards in ((False, [0, 1]), (True, [0]), (False, [0, 1])):
        library.lost = lost
        wait_for(
            lambda cards=cards: (
                [gpu.index for gpu in sampler.since(0)[1][-1:][0].gpus] == cards
                if sampler.since(0)[1]
                else False
            )
        )
    sampler.close()
    assert sampler.faults == ("GPU 1 cannot be read: GPU is lost",)


def test_an_error_of_proc_does_not_end_the_readings(monkeypatch):
    failing = [True]

    def read() -> host.HostMemory:
        if failing:
            raise PermissionError(13, "denied", "/proc/meminfo")
        return host.HostMemory(1, 2)

    monkeypatch.setattr("autotune.launchers.runners.node.sampler.read_host", read)
    sampler = Sampler("nobody/1", node="a")
    wait_for(lambda: sampler.faults)
    failing.clear()
    wait_for(lambda: sampler.since(0)[1])
    sampler.close()
    (fault,) = sampler.faults
    assert "/proc/meminfo" in fault
