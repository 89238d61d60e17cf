"""From text to sequences of one length."""

from ringspan.core.messages.extras import require

require("training", "datasets")  # once, before any module of this folder imports it
