"""What holds for every test: no deadlines, as nothing here measures time; GPU tests only where there is a GPU."""

import pytest
from hypothesis import settings

settings.register_profile("dcpbench", deadline=None, print_blob=True)
settings.load_profile("dcpbench")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` on a machine without CUDA."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
