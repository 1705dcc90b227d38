"""The table of cards."""

from __future__ import annotations

import pytest

from autotune.policies.estimate.constants import CARDS, CPU_CARD, DEFAULT_CARD, card


@pytest.mark.parametrize("name", [name for name, _ in CARDS])
def test_every_row_is_found_by_its_own_name(name):
    assert card(f"NVIDIA {name}") == dict(CARDS)[name]


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA RTX A4000", "RTX A4000"),
        ("NVIDIA A40", "A40"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_what_a_driver_calls_a_card_leads_to_its_row(text, row):
    assert card(text) == dict(CARDS)[row]


def test_an_unknown_card_counts_as_an_a100_and_none_as_a_processor():
    assert card("Something 9000") == DEFAULT_CARD == card("A100")
    assert card("", gpus=False) == CPU_CARD


def test_links_are_those_of_the_card():
    wired = [card(name).link for name in ("V100", "A800", "A100", "H100", "GB200")]
    assert wired == sorted(wired)
    for name in ("NVIDIA A10", "NVIDIA L4", "NVIDIA L40S", "NVIDIA RTX A6000", "NVIDIA GeForce RTX 4090"):
        assert card(name).link < 0.25 * min(wired)
    assert card("NVIDIA A100-PCIE-40GB").link == card("NVIDIA A100 80GB PCIe").link == card("A10").link
