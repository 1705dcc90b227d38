"""Wordings of every generation of every tool mean what their names say."""

import pytest

from autotune.policies.diagnosis.diagnose import diagnose
from autotune.policies.diagnosis.scan import scan
from tests.policies.variants import Variant, variants

VARIANTS = variants()


def test_names_are_unique():
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_the_wording_is_understood(variant: Variant):
    assert variant.wrong(diagnose(scan([variant.text.encode()]))) == []
