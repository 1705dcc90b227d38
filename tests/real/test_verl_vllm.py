"""verl 0.9.1 with its own vLLM server, out of memory on this machine's processor, recovered by autotune."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.test_driver import Head
from tests.real.results import Row, story
from tests.real.test_verl import (
    CARD,
    PLAYED,
    explained,
    is_cured_from_the_checkpoint,
    logs,
    of,
    ran,
    write_job,
)
from tests.real.verl_job import AWAKE, with_vllm, write_material, write_script

pytestmark = [pytest.mark.e2e_long, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head of its own: vLLM's reload on a processor leaves a tied one as it was."""
    return write_material(tmp_path_factory.mktemp("verl"), tied=0)


def test_backward_is_cured_beside_verls_own_vllm_server(
    head: Head, material: Path, record: Callable[..., None]
) -> None:
    variables = CARD | with_vllm(head.folder / "names")
    write_script(head.folder, material, variables, "verl-vllm", **AWAKE)
    write_job(head)
    events, seconds = ran(head, "launch", "job.yaml")
    (diagnosed,) = of(events, "diagnosed")
    assert (diagnosed["cause"], diagnosed["phase"]) == ("gpu-oom", "backward")
    first, second = of(events, "started")
    assert second["knobs"]["tokens_per_microbatch"] < first["knobs"]["tokens_per_microbatch"]
    is_cured_from_the_checkpoint(head, events)
    for text in (log.read_text() for log in logs(head)):
        assert re.search(r"\(vLLMHttpServer pid=\d+\)\S* \(EngineCore pid=\d+\)", text)
        # vLLM sampled with the trainer's weights of each step
        differences = re.findall(r"\brollout_corr/log_ppl_abs_diff:([\d.e-]+)", text)
        assert differences and max(map(float, differences)) < 0.001
    assert explained(head, logs(head)[0]) == ("gpu-oom", "backward")
    case = Row(
        framework="verl 0.9.1 with vLLM 0.28.0",
        case="the update's backward pass exceeds its memory",
        outcome=story(head.folder / "runs"),
        seconds=seconds,
        played=PLAYED,
    )
    record(case, {"verl-vllm-backward": logs(head)[0]})
