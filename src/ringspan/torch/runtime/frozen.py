"""Imported last by the process that ranks are forks of: each looks for garbage in what is its own. One look at the rest
would make it a copy of its own of all that memory.
"""

import gc

gc.freeze()
gc.enable()
