"""Imported first by the process that ranks are forks of: imports leave no garbage, and to look for it took a fifth of
their time. Each rank looks through what is its own, from ``settle`` on.
"""

import gc

gc.disable()
