"""What moves batches to a device, as far as it shows without one."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from loader.device import each_tensor


class Encoding(UserDict[str, Any]):
    """A batch as tokenizers make them: its items are attributes too, and it knows more than its items."""

    def __init__(self, items: dict[str, Any], lengths: tuple[int, ...]) -> None:
        super().__init__(items)
        self.lengths = lengths

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


class Pair(NamedTuple):
    left: Any
    right: Any


def one_more(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def test_a_batch_keeps_the_types_that_it_is_made_of() -> None:
    inner = Encoding({"input_ids": torch.zeros(2), "text": "a"}, (1, 1))
    batch = Pair([inner, b"raw"], OrderedDict(x=torch.zeros(1), y=(torch.ones(1), None)))
    found = each_tensor(batch, one_more)
    assert type(found) is Pair
    (encoding, raw), right = found
    assert (type(encoding), encoding.lengths, encoding.text, raw) == (Encoding, (1, 1), "a", b"raw")
    assert encoding.input_ids.tolist() == [1, 1]
    assert type(right) is OrderedDict
    assert (right["x"].item(), right["y"][0].item(), right["y"][1]) == (1, 2, None)
    assert inner.input_ids.tolist() == [0, 0]  # pinned memory stays until the copy has ended
    assert each_tensor(MappingProxyType({"x": torch.zeros(1)}), one_more) == {"x": torch.ones(1)}
