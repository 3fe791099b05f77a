# SPDX-License-Identifier: Apache-2.0
"""Everything that reads a heads folder, for the tests of what each says."""

import pytest
from conftest import Factory
from refusals import Readers


@pytest.fixture(scope="session")
def readers(tiny_model: Factory) -> Readers:
    return Readers(tiny_model())
