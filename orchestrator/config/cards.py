"""GPUs by the names that people write, with what the driver reports, for plans made away from a cluster."""

from __future__ import annotations

import re

from autotune.launchers.likeness import suggestion
from autotune.policies.values.value import Value

_MIB = 1 << 20


class Card(Value, frozen=True, kw_only=True):
    """A GPU, one per PyTorch device; its speed and links are in `policies/estimate/constants.py`."""

    name: str  # as written in `cluster.gpu`
    device: str  # the driver's name
    memory_bytes: int  # the driver's total, as printed by `nvidia-smi`; a process can use less
    also: tuple[str, ...] = ()  # other accepted names


def _card(name: str, device: str, mib: int, *also: str) -> Card:
    return Card(name=name, device=device, memory_bytes=mib * _MIB, also=also)


# Total memory in MiB as printed by `nvidia-smi` of drivers 525 and newer. Older drivers subtract what they
# reserve (A100-80GB 81251, A100-40GB 40536, V100 32510): up to 1 % less. The name of a family alone means its
# first entry.
CARDS: tuple[Card, ...] = (
    _card("A100-80GB", "NVIDIA A100-SXM4-80GB", 81920, "A100"),
    _card("A100-40GB", "NVIDIA A100-SXM4-40GB", 40960),
    _card("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe", 81920, "A100-PCIe"),
    _card("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB", 40960),
    _card("A800-80GB", "NVIDIA A800-SXM4-80GB", 81920, "A800"),
    _card("H100-80GB", "NVIDIA H100 80GB HBM3", 81559, "H100", "H100-SXM", "H100-SXM5", "H100-SXM-80GB"),
    _card("H100-PCIe", "NVIDIA H100 PCIe", 81559, "H100-PCIe-80GB"),
    _card("H100-NVL", "NVIDIA H100 NVL", 95830, "H100-NVL-94GB"),
    _card("H800-80GB", "NVIDIA H800", 81559, "H800"),
    _card("H200", "NVIDIA H200", 143771, "H200-141GB", "H200-SXM"),
    _card("H20", "NVIDIA H20", 97871, "H20-96GB"),
    _card("GH200", "NVIDIA GH200 480GB", 97871, "GH200-96GB"),
    _card("B200", "NVIDIA B200", 183359, "B200-180GB", "B200-192GB"),
    _card("GB200", "NVIDIA GB200", 189471, "GB200-186GB", "GB200-192GB"),
    _card("L40S", "NVIDIA L40S", 46068, "L40S-48GB"),
    _card("L40", "NVIDIA L40", 46068, "L40-48GB"),
    _card("L4", "NVIDIA L4", 23034, "L4-24GB"),
    _card("A10G", "NVIDIA A10G", 23028, "A10G-24GB"),
    _card("A10", "NVIDIA A10", 23028, "A10-24GB"),
    _card("A40", "NVIDIA A40", 46068, "A40-48GB"),
    _card("RTX-4090", "NVIDIA GeForce RTX 4090", 24564, "4090"),
    _card("RTX-5090", "NVIDIA GeForce RTX 5090", 32607, "5090"),
    _card("RTX-3090", "NVIDIA GeForce RTX 3090", 24576, "3090"),
    _card("RTX-A6000", "NVIDIA RTX A6000", 49140, "A6000"),
    _card("RTX-6000-Ada", "NVIDIA RTX 6000 Ada Generation", 49140, "RTX-6000", "6000-Ada"),
    _card("V100-32GB", "Tesla V100-SXM2-32GB", 32768, "V100"),
    _card("V100-16GB", "Tesla V100-SXM2-16GB", 16384),
    # AMD: VRAM by the ROCm documentation's "AMD GPU specifications", minus 16 MiB that the driver reserves.
    # An MI250 and an MI250X are two devices each, one per die.
    _card("MI210", "AMD Instinct MI210", 65520, "MI210-64GB"),
    _card("MI250", "AMD Instinct MI250", 65520, "MI250-64GB"),
    _card("MI250X", "AMD Instinct MI250X", 65520, "MI250X-64GB"),
    _card("MI300A", "AMD Instinct MI300A", 131072, "MI300A-128GB"),  # shared with the host
    _card("MI300X", "AMD Instinct MI300X", 196592, "MI300X-192GB"),
    _card("MI325X", "AMD Instinct MI325X", 262128, "MI325X-256GB"),
    _card("MI350X", "AMD Instinct MI350X", 294896, "MI350X-288GB"),
    _card("MI355X", "AMD Instinct MI355X", 294896, "MI355X-288GB"),
    # Huawei: HBM as printed by `npu-smi info`. A 910C is two devices, one per die.
    _card("Ascend-910B", "Ascend910B3", 65536, "910B-64GB", "910B1", "910B2"),
    _card("Ascend-910B-32GB", "Ascend910B4", 32768),
    _card("Ascend-910C", "Ascend910_9392", 65536, "910C-64GB"),
    # Intel: HBM by its product pages. A Max 1550 is two devices, one per stack, with Level Zero's default
    # hierarchy FLAT.
    _card("Max-1550", "Intel(R) Data Center GPU Max 1550", 65536, "Max-1550-64GB"),
    _card("Max-1100", "Intel(R) Data Center GPU Max 1100", 49152, "Max-1100-48GB"),
    _card("Gaudi2", "Intel Gaudi2", 98304, "Gaudi2-96GB"),
    _card("Gaudi3", "Intel Gaudi3", 131072, "Gaudi3-128GB"),
)
_MAKERS = re.compile(r"^(nvidia|amd|huawei|intel(\(r\))?)?(instinct|ascend|datacentergpu)?")


def find_card(written: str) -> Card | None:
    """Return the GPU with a name, ignoring case, dashes and spaces; None if unknown."""
    wanted = _plain(written)
    return next((c for c in CARDS if wanted in {_plain(each) for each in (c.name, c.device, *c.also)}), None)


def _plain(name: str) -> str:
    return _MAKERS.sub("", re.sub(r"[\s_-]+", "", name.lower())).removesuffix("gb")


class Gpus(Value, frozen=True, kw_only=True):
    """The GPUs of a cluster as a person writes them: `8xH100`, `2x8xH100-80GB`, or only `H100`."""

    card: Card
    per_node: int | None = None
    nodes: int | None = None


def parse_gpus(written: str) -> Gpus:
    """Parse a text such as `2x8xH100`; raises ValueError with the accepted forms."""
    match = re.fullmatch(
        r"(?:(\d+)\s*[x×*]\s*)?(?:(\d+)\s*[x×*]\s*)?(\S.*?)\s*", written.strip(), re.IGNORECASE
    )
    card = find_card(match[3]) if match else None
    if match is None or card is None:
        raise ValueError(_unknown(written.strip(), match[3] if match else ""))
    counts = [int(text) for text in (match[1], match[2]) if text is not None]
    if 0 in counts:
        raise ValueError(f"`{written}`: at least one GPU")
    return Gpus(
        card=card,
        per_node=counts[-1] if counts else None,
        nodes=(counts[0] if len(counts) > 1 else 1) if counts else None,
    )


def _unknown(written: str, name: str) -> str:
    turned = re.fullmatch(r"(\S+?)\s*[x×*:]\s*(\d+)", written)
    if turned is not None and find_card(turned[1]) is not None:
        return f"`{written}`: write the count first, `{turned[2]}x{turned[1]}`"
    if not re.search(r"[a-zA-Z]", name):
        return f"`{written}` names no GPU (forms: `8xH100`, `2x8xH100-80GB`)"
    known = ", ".join(each.name for each in CARDS)
    near = suggestion(name, (each.name for each in CARDS))
    what = f"unknown GPU `{name}` (forms: `8xH100`, `2x8xH100-80GB`)"
    return f"{what}; {near}" if near else f"{what}; known: {known}"
