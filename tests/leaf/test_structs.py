"""msgspec types are inspected before threads decode them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import msgspec
import pytest

from deltacheck.leaf import structs

RACE = """
import sys, threading, types
import msgspec
from deltacheck.leaf.structs import inspect_types

sys.setswitchinterval(1e-6)
source = '''
from __future__ import annotations
import msgspec
class Inner(msgspec.Struct):
    a: int
    b: str | None
    c: tuple[int, ...]
class Outer(msgspec.Struct):
    x: list[Inner]
    y: dict[str, Inner]
    z: tuple[tuple[int, str], ...]
    w: Inner | None
'''
inner = {"a": 1, "b": "x", "c": [1, 2]}
content = msgspec.msgpack.encode({"x": [inner], "y": {"k": inner}, "z": [[1, "a"]], "w": inner})
decoded = []
for number in range(400):
    module = types.ModuleType(f"module{number}")
    sys.modules[module.__name__] = module
    exec(source, module.__dict__)
    if sys.argv[1] == "known":
        inspect_types(module.Outer)
    together = threading.Barrier(3)
    def decode():
        together.wait()
        decoded.append(msgspec.msgpack.decode(content, type=module.Outer).w.a)
    threads = [threading.Thread(target=decode) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
print(sum(decoded))
"""


def test_a_type_that_is_known_is_decoded_by_several_threads_at_once() -> None:
    arguments = [
        sys.executable,
        "-c",
        textwrap.dedent(RACE),
        "known",
    ]  # with another word the process dies, mostly within the first rounds
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "1200"), done.stderr[-2000:]


def test_what_threads_decode_is_known() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("orbax.checkpoint")
    code = """
    import msgspec
    from deltacheck.leaf import structs
    seen = set()
    structs.inspect_types = lambda *kinds: seen.update(kind.__name__ for kind in kinds)
    import deltacheck.save.ranks.joint, deltacheck.profile.record, deltacheck.store.manifest
    import deltacheck.backends.orbax.group.collective, deltacheck.backends.torch.dcp.stream
    print(*sorted(seen))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    wanted = (
        "Agreement Assignment Compact Contribution DurablePart Intent Manifest ManifestHead"
        " OpenAnswer Opening Profile RankRules RankSetup Report SaveProposal SegmentTable Signals"
        " Tag TileTask _Header"
    )
    assert done.stdout.split() == wanted.split()


def test_a_type_that_msgspec_cannot_decode_is_refused_where_it_is_made_known() -> None:
    class Wrong(msgspec.Struct):
        both: Any

    Wrong.__annotations__["both"] = set[list[int]] | list[str]
    with pytest.raises(TypeError):
        structs.inspect_types(Wrong)
