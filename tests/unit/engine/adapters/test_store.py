"""The forms in which a rank keeps adapters: on a GPU they are copied at once, and each matrix begins at its place."""

import torch
from quire_engine.adapters.store import Matrices, _copied, _staged


def test_matrices_come_out_of_the_copy_as_they_went_in() -> None:
    matrices: Matrices = [
        [(torch.randn(3, 10), torch.randn(7, 3)), None],
        [None],
        [(torch.randn(1, 64), torch.randn(65, 1))],
    ]
    cell = _staged(matrices)
    assert cell.staged is not None
    weights = _copied(cell.matrices, cell.staged, torch.device("cpu"))
    for own, there in zip(matrices, weights, strict=True):
        for pair, weight in zip(own, there, strict=True):
            assert (pair is None) == (weight is None)
            if pair is not None and weight is not None:
                assert all(map(torch.equal, pair, weight.unpacked()))
