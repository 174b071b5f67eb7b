"""The configuration of DeepSpeed, and DataStates-LLM's section in it, give the engine's options."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("deepspeed")

from deltacheck import SaveOptions
from deltacheck.backends.torch.deepspeed.configuration import engine_options


def options_of(section: Any, **own: Any) -> SaveOptions:
    options = engine_options({"datastates_ckpt": section, "deltacheck": {"options": own}}, {})
    return options["options"]


def test_the_host_cache_of_datastates_is_that_of_the_engine() -> None:
    section = {"host_cache_size": 0.5, "parser_threads": 8, "pin_host_cache": True}
    assert options_of(section) == SaveOptions(host_cache_bytes=1 << 29)
    assert options_of(section, host_cache_bytes=7) == SaveOptions(host_cache_bytes=7)
    assert options_of({}) == options_of(True) == SaveOptions()


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"host_cache": 16}, "'host_cache', which is not one of host_cache_size"),
        ({"host_cache_size": "16"}, "a number of GiB above 0, not '16'"),
        ({"host_cache_size": True}, "not True"),
        ({"host_cache_size": 0}, "not 0"),
    ],
)
def test_what_is_no_such_option_is_refused_by_name(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(section)
