"""`python -m lorazor.training.study STAGE …`."""

import sys

from lorazor.training.study.cli import main

sys.exit(main())
