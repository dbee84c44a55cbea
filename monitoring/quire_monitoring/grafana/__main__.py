"""`python -m quire_monitoring.grafana`: see `main`."""

import sys

from quire_monitoring.grafana import main

sys.exit(main())
