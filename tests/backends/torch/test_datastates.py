"""Options of DataStates-LLM become options of the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deltacheck import SaveOptions
from deltacheck.backends.torch import Engine
from deltacheck.backends.torch.datastates import datastates_options


def test_the_host_cache_of_a_deepspeed_configuration_is_that_of_the_engine(tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 1},
        "datastates_ckpt": {"host_cache_size": 0.5, "parser_threads": 8},
    }
    assert datastates_options(config) == SaveOptions(host_cache_bytes=1 << 29)
    assert datastates_options({"host_cache_size": 16, "pin_host_cache": True}) == SaveOptions(
        host_cache_bytes=16 << 30
    )
    with Engine(tmp_path, options=datastates_options(config)) as engine:
        engine.save(1, {"w": torch.ones(3)})
    assert datastates_options({"datastates_ckpt": {}}) == SaveOptions()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"datastates_ckpt": {"host_cache": 16}},
            "'host_cache', which is not one of host_cache_size",
        ),
        ({"zero_optimization": {}}, "'zero_optimization'"),
        ({"datastates_ckpt": {"host_cache_size": "16"}}, "a number of GiB above 0, not '16'"),
        ({"datastates_ckpt": {"host_cache_size": True}}, "not True"),
        ({"datastates_ckpt": {"host_cache_size": 0}}, "not 0"),
        ({"datastates_ckpt": True}, "not True"),
    ],
)
def test_what_is_no_such_option_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        datastates_options(config)
