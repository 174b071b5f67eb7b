"""Contract suites: what every implementation of a plug-in point must do, as pytest classes to
subclass. Needs pytest.

from deltacheck.testing.codec import CodecContract

class TestMyCodec(CodecContract):
    @pytest.fixture
    def codec(self):
        return MyCodec()
"""

import pytest

pytest.register_assert_rewrite("deltacheck.testing.codec", "deltacheck.testing.place")
