"""`python -m nf4.cli`."""

import sys

from nf4.cli.main import main

sys.exit(main())
