"""A picture that a command is asked to draw, checked before the minutes after which it would be drawn."""

from pathlib import Path


def check_picture(picture: Path, *endings: str) -> None:
    """Refuse what could not be written.

    Raises:
        ConfigError: another ending than those that can be drawn, or a folder that is not there.
    """
    from ringspan.core.errors import ConfigError

    if picture.suffix not in endings:
        *others, last = endings
        shown = f"{', '.join(others)} or {last}" if others else last
        raise ConfigError(f"--picture {picture}: end the name in {shown}")
    if not picture.parent.is_dir():
        raise ConfigError(f"--picture {picture}: there is no folder {picture.parent}")
