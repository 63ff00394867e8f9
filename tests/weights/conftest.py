"""The programs of these tests are tiny: almost all of the time goes into compiling them well."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly(quick_compilation: None) -> None:
    """Every module here."""
