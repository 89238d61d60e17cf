"""Models by their name on the Hub."""

import re
from pathlib import Path
from typing import Final

from ringspan.core.errors import ConfigError
from ringspan.core.files.named import why_no_model
from ringspan.core.messages.lines import one_line

_TOKENIZERS: Final = "*.model", "*.txt", "*.jinja"
_NAME: Final = re.compile(r"[\w.-]+(/[\w.-]+)?")


def local_folder(model: str) -> str:
    """Return a folder, or the Hub's local copy, downloaded if needed; raise ConfigError if neither exists."""
    folder = Path(model)
    if folder.is_dir():
        if reason := why_no_model(folder):
            raise ConfigError(f"{model}: {reason}")
        return str(folder)
    if folder.exists() or not _NAME.fullmatch(model) or model.startswith("."):
        raise ConfigError(f"{model}: there is no such folder; give one with a model and its tokenizer")
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    from ringspan.torch.weights.files import folder_of

    try:
        return str(folder_of(model, more=_TOKENIZERS))
    except ConfigError:
        raise
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise ConfigError(
            f"{model}: there is no such folder, and the Hub has or gives no such model: {one_line(error)}"
        ) from error
