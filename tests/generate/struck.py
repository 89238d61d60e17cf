"""A command that generates on two ranks, of which one is struck by a signal: ``python -m tests.generate.struck``."""

import os
import signal
import sys
from typing import Any

import torch.distributed as dist

from ringspan.cli.commands.generate import prompt_ids
from ringspan.generate.folder import load_config, load_tokenizer
from ringspan.generate.session import Observer, session
from ringspan.generate.settings import GenerateSettings
from ringspan.torch.runtime.launch import launch


def struck_rank(settings: GenerateSettings, ids: Any, number: int, doing: str) -> None:
    """Rank 1 is struck while it reads, rank 0 while it writes."""
    config = load_config(settings)

    def strike(*_: Any) -> None:
        os.kill(os.getpid(), number)

    observer = Observer()
    if (dist.get_rank(), doing) == (1, "reading"):
        observer.read = strike
    if (dist.get_rank(), doing) == (0, "writing"):
        observer.wrote = strike
    with session(settings, config, load_tokenizer(settings.folder, config), observer) as model:
        model.answer(ids.tolist())


if __name__ == "__main__":
    folder, name, doing = sys.argv[1:]
    settings = GenerateSettings(folder=folder, max_new_tokens=100, prefill_tokens=16, silence_seconds=4.0)
    try:
        launch(struck_rank, 2, settings, prompt_ids(settings, "abc " * 30), signal.Signals[name], doing)
    except RuntimeError as error:
        sys.exit(f"ringspan: {error}")
