"""The chat template of a tokenizer or processor: the one that is taken, what it reads, and whether it is valid."""

import re
from functools import lru_cache
from typing import Any, Final

from jinja2 import TemplateSyntaxError

from ringspan.core.errors import ConfigError
from ringspan.core.messages.lines import one_line

# A template that writes whole messages, or walks over their keys, reads every key.
_WHOLE_MESSAGES: Final = re.compile(r"\bmessages?\s*\|\s*tojson|\.items\(\)")


def template_of(processor: Any, *, has_tools: bool = False) -> str:
    """Return the template that ``apply_chat_template`` takes; an empty one if there is none."""
    template = getattr(processor, "chat_template", None)
    if isinstance(template, dict):
        # A processor always uses the default template.
        is_tokenizer = not hasattr(processor, "tokenizer")
        name = (
            "tool_use"
            if has_tools and is_tokenizer and "tool_use" in template
            else "default"
        )
        template = template.get(name)
    return template or ""


@lru_cache(maxsize=4096)
def reads(template: str, name: str) -> bool:
    """Return whether a template mentions a variable, or a key of a message."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None or (
        _WHOLE_MESSAGES.search(template) is not None
    )


def refuse_broken(processor: Any, where: str) -> None:
    """Raise ConfigError for a chat template that Jinja cannot parse, before any conversation is blamed for it."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    try:
        processor.apply_chat_template(messages, tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"{where}: its chat template has an error in line {error.lineno}: {one_line(error)}; correct "
            "chat_template.jinja (or chat_template in tokenizer_config.json) there"
        ) from error
    except Exception:  # noqa: S110 - the template may refuse this conversation, and says so of the real ones
        pass
