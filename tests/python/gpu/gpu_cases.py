"""What tests on a GPU share."""

import nf4
import pytest

_INFO = nf4.device_info(0)
NEEDS_GPU = pytest.mark.skipif(not _INFO.usable, reason=f"no usable GPU: {_INFO.reason}")
