"""What Optuna's sampler is told of configurations that the space does not hold."""

from __future__ import annotations

from autotune.orchestrator.search.optuna_study import distributions, parameters
from autotune.policies.search.space import Dimension
from autotune.policies.values.knobs import Knobs


def test_a_default_of_the_framework_is_the_most_of_a_number_and_the_first_mode() -> None:
    space = (
        Dimension(knob="dataloader_workers", values=(0, 1, 2, 4, 8), ordered=True),
        Dimension(knob="concurrency", values=(16, 32, 64), ordered=True),
        Dimension(knob="memory_fraction", values=(0.1, 0.5, 0.9), ordered=True),
        Dimension(knob="cuda_graphs", values=("full", "limited", "off"), ordered=False),
        Dimension(knob="fused_kernels", values=(False, True), ordered=False),
    )
    assert parameters(distributions(space), Knobs()) == {
        "dataloader_workers": 8,
        "concurrency": 64,
        "memory_fraction": 0.9,
        "cuda_graphs": "full",
        "fused_kernels": False,
    }
