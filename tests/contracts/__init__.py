"""Contract suites for the implementations of plug-in points, as pytest classes to subclass.

They need pytest:

    from tests.contracts.codec import CodecContract

    class TestMyCodec(CodecContract):
        @pytest.fixture
        def codec(self):
            return MyCodec()
"""

import pytest

pytest.register_assert_rewrite("tests.contracts.codec", "tests.contracts.place")
