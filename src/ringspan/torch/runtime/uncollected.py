"""Imported first by the process that ranks are forks of: imports leave no garbage, and to look for it took a fifth of
their time. ``ringspan.torch.runtime.frozen``, imported last, ends that.
"""

import gc

gc.disable()
