"""`python -m nf4`: the command `nf4`."""

import sys

from nf4.cli.main import main

sys.exit(main())
